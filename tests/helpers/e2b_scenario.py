"""A client of the E2B wire, as the SDK makes it: `python e2b_scenario.py`, in a virtual environment
that has the PyPI package `e2b`, with its variables `E2B_API_URL`, `E2B_SANDBOX_URL`, `E2B_API_KEY`.

It prints one JSON line for each step, with the step's name and what the SDK gave. Before each step
it names it to the recorder (`e2b_recorder`), if there is one.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

from e2b import PtySize, Sandbox, SandboxQuery


def plain(value: Any) -> Any:
    """Returns a value of the SDK as JSON can hold it."""
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("latin-1")
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, str | int | float | bool | None):
        return value
    return {key: plain(each) for key, each in vars(value).items()
            if isinstance(each, str | int | float | bool | bytes | dict | list | None)}


def step(name: str, work: Callable[[], Any]) -> Any:
    """Does one step, and prints what it gave or which exception it raised."""
    if "E2B_RECORDER" in os.environ:
        urllib.request.urlopen(f"{os.environ['E2B_RECORDER']}/_step/{name}").read()
    value, told = None, {}
    try:
        value = work()
        told = {"gave": plain(value)}
    except Exception as error:  # noqa: BLE001 - the exception is what the step tells
        told = {"raised": type(error).__name__, "text": str(error)[:300], "gave": plain(error)}
    print(json.dumps({"step": name, **told}), flush=True)
    return value


def commands(box: Sandbox) -> None:
    step("run", lambda: box.commands.run("echo hi $X $Y; echo err >&2; pwd", envs={"Y": "2"}))
    step("run-fails", lambda: box.commands.run("echo before; exit 3", user="root"))
    step("run-cwd", lambda: box.commands.run("pwd", cwd="/tmp"))
    step("run-no-cwd", lambda: box.commands.run("pwd", cwd="/nowhere"))
    step("run-timeout", lambda: box.commands.run("sleep 60", timeout=1))
    parts: list[str] = []
    step("run-streams", lambda: (box.commands.run(
        "echo 1; sleep 1; echo 2", on_stdout=parts.append), len(parts))[1])
    loop = step("background", lambda: box.commands.run(
        "for i in 1 2 3; do echo $i; sleep 0.4; done; exit 4", background=True))
    step("beside", lambda: box.commands.run("echo beside"))
    step("list", lambda: [(each.pid == loop.pid, each.args) for each in box.commands.list()])
    step("wait", loop.wait)
    server = step("server", lambda: box.commands.run("sleep 100 & sleep 101", background=True,
                                                     timeout=0))
    step("server-beside", lambda: box.commands.run("pgrep -cf '^sleep 10'"))
    step("server-connect", lambda: box.commands.connect(server.pid).pid == server.pid)
    step("server-kill", lambda: box.commands.kill(server.pid))
    step("server-wait", server.wait)
    step("server-gone", lambda: box.commands.run("pgrep -cf '^sleep 10'"))
    step("server-kill-again", lambda: box.commands.kill(server.pid))
    cat = step("cat", lambda: box.commands.run("cat; echo done", background=True, stdin=True))
    step("cat-send", lambda: box.commands.send_stdin(cat.pid, "hello\n"))
    step("cat-close", lambda: box.commands.close_stdin(cat.pid))
    step("cat-wait", cat.wait)


def files(box: Sandbox) -> None:
    step("write", lambda: box.files.write("/tmp/a/b.txt", "text"))
    step("read", lambda: box.files.read("/tmp/a/b.txt"))
    step("read-missing", lambda: box.files.read("/tmp/a/none"))
    step("write-relative", lambda: box.files.write("b.bin", b"\x00\xff\r\n--"))
    step("read-relative", lambda: box.files.read("b.bin", format="bytes"))
    step("write-two", lambda: box.files.write_files(
        [{"path": "/tmp/x1", "data": "1"}, {"path": "/tmp/ä 2", "data": b"2"}]))
    step("read-two", lambda: box.files.read("/tmp/ä 2"))
    step("write-gzip", lambda: box.files.write("/tmp/z", "z" * 1000, gzip=True))
    step("read-gzip", lambda: box.files.read("/tmp/z"))
    step("ls", lambda: [(e.name, e.type.value, e.size) for e in box.files.list("/tmp/a")])
    step("info", lambda: box.files.get_info("/tmp/x1").permissions)
    step("exists", lambda: [box.files.exists("/tmp/x1"), box.files.exists("/tmp/none")])
    step("mkdir", lambda: [box.files.make_dir("/tmp/m/n"), box.files.make_dir("/tmp/m/n")])
    step("rename", lambda: box.files.rename("/tmp/x1", "/tmp/m/x9").path)
    step("remove", lambda: box.files.remove("/tmp/m"))
    watcher = step("watch", lambda: box.files.watch_dir("/tmp/a"))
    step("write-new", lambda: box.files.write("/tmp/a/new", "1"))
    step("events", lambda: [(e.name, e.type.value) for e in watcher.get_new_events()])
    step("unwatch", watcher.stop)
    step("signed", lambda: urllib.request.urlopen(box.download_url("/tmp/a/new")).read())


def terminal(box: Sandbox) -> None:
    pty = step("pty", lambda: box.pty.create(PtySize(24, 80), timeout=60))
    step("pty-resize", lambda: box.pty.resize(pty.pid, PtySize(30, 90)))
    step("pty-input", lambda: box.pty.send_stdin(pty.pid, b"stty size; exit 5\n"))
    heard: list[bytes] = []
    step("pty-wait", lambda: pty.wait(on_pty=heard.append))
    step("pty-heard", lambda: b"30 90" in b"".join(heard))


def main() -> None:
    box = step("create", lambda: Sandbox.create(
        timeout=120, metadata={"task": "a b", "cpus": "1-2"}, envs={"X": "1"}))
    commands(box)
    files(box)
    terminal(box)
    step("get-info", box.get_info)
    step("set-timeout", lambda: box.set_timeout(200))
    step("is-running", box.is_running)
    step("listing", lambda: [each.sandbox_id == box.sandbox_id for each in Sandbox.list(
        query=SandboxQuery(metadata={"task": "a b"})).next_items()])
    step("listing-others", lambda: Sandbox.list(
        query=SandboxQuery(metadata={"task": "c"})).next_items())
    step("connect", lambda: Sandbox.connect(box.sandbox_id, timeout=300).commands.run(
        "cat /tmp/a/new").stdout)
    twin = step("fork", box.fork)
    step("fork-read", lambda: twin[0].files.read("/tmp/z")[:3])
    step("fork-kill", lambda: twin[0].kill())
    step("pause", box.pause)
    step("no-template", lambda: Sandbox.create("nothing"))
    step("kill", box.kill)
    step("kill-again", box.kill)
    step("run-after", lambda: box.commands.run("echo x"))
    step("is-running-after", box.is_running)


if __name__ == "__main__":
    if "E2B_API_URL" not in os.environ:
        sys.exit("set E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY")
    main()
