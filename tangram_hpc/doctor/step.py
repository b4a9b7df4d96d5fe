"""The task that the check `nodes` runs on each node of the job: it reads an access file and
connects.

The task is a program of its own. It prints one JSON line and ends with status 0, whatever it finds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from ..errors import TangramError
from ..slurm.job_environment import slurm_place
from ..storage.access import Access, read_access
from ..transport.socket.dial import dial

_SHARED_FS_S = 10.0  # seconds after which a shared file system shows a new file at the latest


def main(path: Path) -> int:
    """Runs the program; returns the exit status."""
    place = slurm_place(os.environ)
    row: dict[str, object] = {"node": place.node if place is not None else socket.gethostname(),
                              "why": "", "ms": 0.0}
    try:
        access = _access(path)
        began = time.perf_counter()
        dial(access.addresses, access.key, access.job).close()
        row["ms"] = round((time.perf_counter() - began) * 1000, 3)
    except TangramError as error:
        row["why"] = str(error)
    row["clock"] = time.time()
    print(json.dumps(row), flush=True)
    return 0


def _access(path: Path) -> Access:
    deadline = time.monotonic() + _SHARED_FS_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return read_access(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
