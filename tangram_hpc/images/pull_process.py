"""The helper process of a worker that makes one image ready.

To fetch and unpack an image is minutes of work on what a stranger wrote. In a process of its own
this work takes no time from the worker's loop, can be killed at any moment, and can be confined:
where the kernel has Landlock, it may write only into the stores and devices such as /dev/null.

The process reads one line of JSON, `{"image": ..., "settings": {...}}`, and answers with one line:
`{"folder": ..., "digest": ..., "env": [...], ...}` or `{"error": ..., "infeasible": ...}`. When its
input ends, its worker is dead, and the process ends too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import InvalidInput, TangramError
from ..sandbox.isolation import landlock, visible_paths
from ..start_module import module_command
from . import owner_namespace
from .pull import PullSettings, pull

_ABI_REFER = 2  # before, a confined process cannot rename or link between two folders


@dataclass(frozen=True)
class PullAnswer:
    """The result of a pull.

    Attributes:
        folder: the root file system; empty after an error.
        digest: the digest of the image; empty for a folder that was named as it is.
        env: variables that its programs expect, as NAME=VALUE.
        error: why the image could not be pulled, in one line; empty after a success.
        infeasible: whether another attempt would be useless.
        workdir: the directory in which its programs start; empty if the image names none.
        user: the user that the image names; empty for none.
    """

    folder: str = ""
    digest: str = ""
    env: tuple[str, ...] = ()
    error: str = ""
    infeasible: bool = False
    workdir: str = ""
    user: str = ""


class PullProcess:
    """One helper process; `answer` is called from a thread.

    Attributes:
        cancelled: whether nobody wants its answer.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.cancelled = False
        self._lock = threading.Lock()

    def answer(self, image: str, settings: PullSettings) -> PullAnswer:
        """Starts the process and waits for its answer, for as long as the pull takes."""
        with self._lock:
            if self.cancelled:
                return PullAnswer(error="image: nobody wants it any more")
            self._process = process = subprocess.Popen(
                module_command(__name__), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True)
        assert process.stdin is not None and process.stdout is not None
        assert process.stderr is not None
        with process:
            try:
                process.stdin.write(json.dumps(
                    {"image": image, "settings": asdict(settings)}).encode() + b"\n")
                process.stdin.flush()  # and it stays open: its end ends the process
            except BrokenPipeError:
                pass  # it died, and its output says why
            line = process.stdout.readline()
            said = b"" if line else process.stderr.read(1 << 16)
            _kill(process)
        return _read_answer(line, said)

    def cancel(self) -> None:
        """Kills the process; its draft is removed by the next one."""
        with self._lock:
            self.cancelled = True
            if self._process is not None:
                _kill(self._process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a pull with what it started, such as `unsquashfs`: it leads a process group."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _read_answer(line: bytes, said: bytes) -> PullAnswer:
    if line:
        record = json.loads(line)
        return PullAnswer(**{**record, "env": tuple(record.get("env", ()))})
    lines = said.decode(errors="replace").strip().splitlines()
    return PullAnswer(error="image: the process that unpacks it died"
                            + (f" ({lines[-1][:300]})" if lines else ""))


def _confine(settings: PullSettings) -> None:
    """Lets this process and its children write into the stores alone."""
    write = [settings.store, *([settings.job_share] if settings.job_share else [])]
    for folder in write:  # a rule holds for what is there now
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    if landlock.abi() >= _ABI_REFER:
        landlock.restrict(["/"], [*write, *visible_paths.devices()], network=True)


def _end_with_input() -> None:
    """Ends this process with what it started, when its worker has gone."""
    while os.read(0, 1 << 12):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Answers one request; returns the exit status."""
    line = b""
    while not line.endswith(b"\n") and (piece := os.read(0, 1)):
        line += piece
    request = json.loads(line)
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
              for name, value in request["settings"].items()}
    settings = PullSettings(**fields)
    os.umask(0o022)
    answer = PullAnswer()
    try:
        of = owner_namespace.users()
        if of is not None:  # before this process is confined: newuidmap has no effect afterwards
            owner_namespace.namespace(of)
        _confine(settings)
        threading.Thread(target=_end_with_input, daemon=True).start()
        tempfile.tempdir = settings.store
        done = pull(request["image"], settings, os.environ)
        answer = PullAnswer(done.folder, done.digest)
        if done.image is not None:
            image = done.image
            answer = replace(answer, env=image.env, workdir=image.working_dir, user=image.user)
    except InvalidInput as error:
        answer = PullAnswer(error=str(error), infeasible=True)
    except TangramError as error:
        answer = PullAnswer(error=str(error))
    except OSError as error:
        answer = PullAnswer(error=f"image: {error}")
    # a hostile image's names may be no Unicode, and the worker sends this text on
    text = answer.error.encode(errors="backslashreplace").decode()
    print(json.dumps(asdict(replace(answer, error=text))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
