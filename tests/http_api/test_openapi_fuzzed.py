"""Schemathesis, in a virtual environment of its own, against all routes that the server describes.

It sends requests that the description allows and others that it forbids. Each answer must be one
that the description has, a request that is wrong must be refused, and nothing may be a traceback.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tangram_hpc import LocalCluster
from tests.helpers.http_serving import Serving
from tests.helpers.other_python import find_python, make_venv

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]  # installs packages
VERSION = "4.32.5"
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance",
          "response_schema_conformance", "negative_data_rejection")
REWARD = "def exact(prompt, response, label):\n    return float(response == label)\n"


def test_each_request_is_answered_as_the_description_says(tmp_path: Path) -> None:
    bin_folder = make_venv(tmp_path / "venv", find_python((3, 11)), [f"schemathesis=={VERSION}"])
    (tmp_path / "rewards.py").write_text(REWARD)
    log = tmp_path / "log"
    with LocalCluster(cpus=2, home=tmp_path / "home") as cluster, Serving(
            cluster, "--reward", f"exact={tmp_path}/rewards.py:exact", log=log) as server:
        told = subprocess.run(
            [bin_folder / "schemathesis", "run", f"{server.url}/openapi.json",
             "--header", f"X-API-Key: {server.key}", "--checks", ",".join(CHECKS),
             "--phases", "coverage,fuzzing", "--max-examples", "25", "--seed", "1",
             "--suppress-health-check", "all", "--no-shrink", "--continue-on-failure",
             "--request-timeout", "60"],
            cwd=tmp_path, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout[-8000:]
    assert "Traceback" not in log.read_text()
