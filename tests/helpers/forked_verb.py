"""The command `tangram` in tests of what it prints and with which status it ends.

Each call is a process of its own. In most tests it is a fork of a process that has imported the
package (`forked_start.py`), which spares the start of Python.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def tangram(*words: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None,
            check: bool = False, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs one command of `tangram` to its end, with an empty stdin."""
    return subprocess.run([sys.executable, "-m", "tangram_hpc", *map(str, words)], env=env, cwd=cwd,
                          check=check, timeout=timeout, text=True, capture_output=True,
                          stdin=subprocess.DEVNULL)
