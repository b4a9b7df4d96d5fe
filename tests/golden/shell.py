"""Runs `tangram` inside this process, in an environment and a folder without settings."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import where


@contextlib.contextmanager
def clean() -> Iterator[Path]:
    """An empty working folder and an environment that says nothing to `tangram`."""
    before, here = dict(os.environ), Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for key in list(os.environ):
            if key.startswith(("TANGRAM_", "SLURM_", "PMI", "XDG_CONFIG")):
                del os.environ[key]
        os.environ |= {"HOME": name, "TANGRAM_HOME": str(folder / "home")}
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(here)
            os.environ.clear()
            os.environ.update(before)


# A line of `ProgressBar`: only a slow machine prints one.
_PROGRESS = re.compile(r"tangram: [a-z :]+ \d+(/\d+)?, \d+ s(,.*)?\n")


def run(words: Sequence[str]) -> tuple[int, str, str]:
    """One command line inside this process: status, stdout, stderr without lines of progress."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = where.find("main")(words)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except Exception as error:  # noqa: BLE001 - a process of its own would end so
            print(f"Traceback: {error!r}", file=err)
            status = 1
    lines = err.getvalue().splitlines(keepends=True)
    return status, out.getvalue(), "".join(line for line in lines if not _PROGRESS.fullmatch(line))


def told(words: Sequence[str]) -> Any:
    """What a command line prints as JSON; its status and its stderr where it fails."""
    status, out, err = run(words)
    return json.loads(out) if status == 0 else {"status": status, "stderr": err}
