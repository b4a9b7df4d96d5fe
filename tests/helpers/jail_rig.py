"""A place with a sandbox's home and things outside it, and forked children that confine themselves,
as this user and, where the tests are root's, as nobody."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tangram_hpc.sandbox.files import modes
from tangram_hpc.sandbox.isolation import landlock, seccomp, visible_paths
from tangram_hpc.sandbox.process.mode_keeper import ModeKeeper

NOBODY = 65534
WHO = [os.getuid()] + ([NOBODY] if os.getuid() == 0 else [])
NAMES = {NOBODY: "nobody"}
PACKAGES = str(Path(pytest.__file__).parent.parent)  # for the system's Python, which nobody uses


@dataclass
class Place:
    """`home` is the sandbox's, `outside` another directory of the same user, `victim` a process
    of the same user outside."""

    uid: int
    home: Path
    outside: Path
    victim: subprocess.Popen[bytes]
    readable: list[str]

    @property
    def python(self) -> str:
        return sys.executable if self.uid == os.getuid() else "/usr/bin/python3"

    def env(self) -> dict[str, str]:
        return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.home), "LANG": "C.UTF-8",
                "TMPDIR": str(self.home), "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONPATH": PACKAGES}

    def run(self, work: Callable[[], Any], *confine: Callable[[], object]) -> Any:
        """What `work` returns in a forked child of that user, confined first. A keeper in this
        process changes the modes of files beneath `home` for a child that is `filtered`."""
        global _door
        into, out = os.pipe()
        keeper = ModeKeeper(lambda pid: str(self.home.parent))
        pid = os.fork()
        if pid == 0:
            try:
                os.close(into)
                _door = os.dup(keeper.door.fileno())
                if self.uid != os.getuid():
                    os.setgroups([])
                    os.setresgid(self.uid, self.uid, self.uid)
                    os.setresuid(self.uid, self.uid, self.uid)
                os.chdir(self.home)
                for step in confine:
                    step()
                answer = json.dumps(work()).encode()
            except BaseException as error:  # noqa: BLE001 - told to the test
                answer = json.dumps({"failed": repr(error)}).encode()
            with suppress(OSError), open(out, "wb") as file:
                file.write(answer)
            os._exit(0)
        os.close(out)
        text = b""
        while piece := _read(into, keeper):
            text += piece
        os.close(into)
        keeper.close()
        os.waitpid(pid, 0)
        answer = json.loads(text)
        assert not (isinstance(answer, dict) and "failed" in answer), answer
        return answer

    def program(self, argv: list[str], stdin: str = "") -> tuple[int, str, str]:
        """Runs a program under everything; how it ended, its output, its complaints."""
        env = self.env()

        def work() -> list[object]:
            done = subprocess.run(argv, input=stdin, env=env, capture_output=True, text=True,
                                  timeout=60, check=False)
            return [done.returncode, done.stdout, done.stderr]

        code, output, complaints = self.run(work, self.landlocked, filtered)
        return code, output, complaints

    def landlocked(self) -> object:
        return landlock.restrict([*self.readable, visible_paths.PROC],
                                 [str(self.home), *visible_paths.devices()],
                                 network=False, unlisted=[visible_paths.SHARED_MEMORY])


def _read(fd: int, keeper: ModeKeeper) -> bytes:
    """What comes next, while the keeper answers."""
    while True:
        ready = select.select([fd, keeper], [], [])[0]
        if keeper in ready:
            keeper.turn()
        if fd in ready:
            return os.read(fd, 1 << 16)


_door = -1


def filtered() -> None:
    modes.hand_over(_door, seccomp.restrict(namespaced=False, network=False))


def refused(work: Callable[[], object]) -> int:
    """The errno with which it is refused; 0 when it is done."""
    try:
        work()
    except OSError as error:
        return error.errno or -1
    return 0


@pytest.fixture(params=WHO, ids=lambda uid: NAMES.get(uid, "self"))
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    uid = request.param
    top = Path(tempfile.mkdtemp(prefix="jail-"))
    home, outside = top / "home", top / "outside"
    for folder in (home, outside, outside / ".tangram"):
        folder.mkdir()
    (outside / "secret").write_text("secret")
    (outside / ".tangram" / "key").write_text("key")
    for path in (top, *top.rglob("*")):
        os.chown(path, uid, -1)
    argv = [shutil.which("sleep") or "sleep", "300"]
    user = {} if uid == os.getuid() else {"user": uid, "group": uid, "extra_groups": []}
    victim = subprocess.Popen(argv, env={"TANGRAM_SECRET": "x"}, cwd=outside, **user)
    try:
        yield Place(uid, home, outside, victim, visible_paths.readable([PACKAGES]))
    finally:
        victim.kill()
        victim.wait()
        shutil.rmtree(top)
