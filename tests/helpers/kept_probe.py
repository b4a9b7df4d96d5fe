"""One report of a container runtime for all tests that meet it in the same circumstances.

A worker, and an executor of a test, first builds tiny sandboxes to see what works here, for 0.3 s
of CPU each time (`sandbox/manager/probe.py`). `install` keeps the reports of runtimes that work in
a folder, which the forks of `forked_start.py` read too. A report counts only for a process with the
same user, capabilities, namespaces, limits, `PATH` and subordinate users, on the same file system.
Files with tests of the probe are in `REAL_STARTS` of tests/conftest.py: they probe each time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tangram_hpc.atomic_file import replace_file
from tangram_hpc.sandbox.isolation.container_runtimes import Runtime
from tangram_hpc.sandbox.manager import backends
from tangram_hpc.sandbox.manager.probe import RuntimeReport, examine

from .surroundings import surroundings


def install(folder: str) -> None:
    """Keeps reports in this folder from now on."""
    def kept(runtime: Runtime, image: str, read: Sequence[str], seconds: float, scratch: str = ""
             ) -> RuntimeReport:
        circumstances = [runtime.name, image, list(read), _file_system(scratch), _subordinates(),
                         os.environ.get("PATH"), surroundings()]
        path = Path(folder, hashlib.sha256(json.dumps(circumstances).encode()).hexdigest())
        try:
            return msgspec.json.decode(path.read_bytes(), type=RuntimeReport)
        except OSError:  # not there, or another user's
            report = examine(runtime, image, read, seconds, scratch)
        if not report.why_not and os.access(folder, os.W_OK):
            replace_file(path, msgspec.json.encode(report))
        return report

    backends.examine = kept


def uninstall() -> None:
    """Lets every worker and executor probe again."""
    backends.examine = examine


def _file_system(scratch: str) -> int:
    return os.stat(scratch if os.path.isdir(scratch) else tempfile.gettempdir()).st_dev


def _subordinates() -> list[str]:
    return [text for name in ("uid", "gid") for text in (
        Path(f"/etc/sub{name}").read_text() if os.path.exists(f"/etc/sub{name}") else "",)]
