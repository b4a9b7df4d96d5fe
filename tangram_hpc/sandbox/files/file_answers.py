"""Answers the calls by which a client reads and changes files of a sandbox from outside.

The init of the sandbox calls this after it was isolated, so a path reaches what a command of the
sandbox reaches (`confine`).
"""

from __future__ import annotations

from ...protocol.payload import FileCall, FileList, FileReturn, Payload
from . import confine


def answer(home: str, call: FileCall) -> Payload:
    """Carries out an operation on files. Raises PathRefused."""
    if call.op == "list":
        return FileList(tuple(confine.listing(home, call.path, call.depth)))
    if call.op == "stat":
        return FileList((confine.about(home, call.path),), one=True)
    if call.op == "mkdir":
        confine.mkdir(home, call.path)
    elif call.op == "remove":
        confine.remove(home, call.path)
    elif call.op == "move":
        confine.move(home, call.path, call.target)
    elif call.data is None:
        return FileReturn(*confine.read(home, call.path, call.offset, call.length))
    else:
        confine.write(home, call.path, call.data, call.mode, call.offset)
    return FileReturn()
