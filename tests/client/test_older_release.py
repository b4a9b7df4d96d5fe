"""Clients of earlier states of this package and the broker of this one, as after an upgrade of the
side that a trainer does not share. A client that speaks the same protocol works; any other one is
refused in one line that names both versions.

The earlier states are commits, since nothing has been released yet. A checkout without the history
skips the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.other_python import CHECKOUT

from tangram_hpc import LocalCluster
from tangram_hpc.protocol.message import PROTOCOL_VERSION

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
# by the version of the protocol that they speak: its first commit of 7, and the last one of 6
STATES = {7: "dc4e4fd9", 6: "2bd7ca9a"}
TRAINER = """
import tangram_hpc
print(tangram_hpc.__file__)
with tangram_hpc.connect(name="older") as client:
    print(client.submit("echo done", trusted=True).result(60).text.strip())
    print(list(client.map(pow, range(4), [2] * 4)))
    with client.session(mem=10) as session:
        session.write("big", "x" * 100_000).result(60)
        print(len(session.read("big").result(60)), session.exec("wc -c < big").result(60).text)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2) as running:
        yield running


def programs(folder: Path, version: int) -> Path:
    """Installs an earlier state in a virtual environment; returns its folder of programs."""
    tree, venv = folder / "tree", folder / "venv"
    tree.mkdir()
    packed = subprocess.run(["git", "-C", CHECKOUT, "archive", STATES[version]],
                            capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"this checkout does not have the commit {STATES[version]}")
    subprocess.run(["tar", "x", "-C", tree], input=packed.stdout, check=True)
    assert any(f"PROTOCOL_VERSION = {version}\n" in path.read_text()
               for path in tree.glob("tangram_hpc/*/*.py"))
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    subprocess.run([venv / "bin/pip", "install", "-q", tree], check=True, timeout=400)
    return venv / "bin"


def run(argv: list[str | Path], cluster: LocalCluster, folder: Path
        ) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(argv, env=env | {"TANGRAM_ACCESS": str(cluster.access)}, cwd=folder,
                          capture_output=True, text=True, timeout=120, check=False)


def test_an_older_client_works_with_this_broker(cluster: LocalCluster, tmp_path: Path) -> None:
    assert PROTOCOL_VERSION in STATES, "add the last commit of the protocol before"
    ours = programs(tmp_path, PROTOCOL_VERSION)
    told = run([ours / "python", "-c", TRAINER], cluster, tmp_path)
    lines = told.stdout.split("\n")
    assert lines[0].startswith(str(tmp_path)), (told.stdout, told.stderr)
    assert lines[1:4] == ["done", "[0, 1, 4, 9]", "100000 100000"], told.stderr
    told = run([ours / "tangram", "run", "--", "echo", "hello"], cluster, tmp_path)
    assert (told.stdout, told.returncode) == ("hello\n", 0), told.stderr


def test_a_client_of_another_protocol_is_refused_in_one_line(
        cluster: LocalCluster, tmp_path: Path) -> None:
    version = PROTOCOL_VERSION - 1
    ours = programs(tmp_path, version)
    refused = (f"the broker refused us: protocol version {version} is not the broker's "
               f"{PROTOCOL_VERSION}: install the same tangram_hpc on both sides")
    for words in (["run", "--", "true"], ["info"]):
        told = run([ours / "tangram", *words], cluster, tmp_path)
        assert told.returncode == 2 and told.stderr.count("\n") == 1, told.stderr
        assert told.stderr.rstrip().endswith(refused)
    told = run([ours / "python", "-c", TRAINER], cluster, tmp_path)
    assert told.stderr.rstrip().split("\n")[-1].endswith(refused), told.stderr
