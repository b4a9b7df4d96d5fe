"""The Python side of the fast path (`_fast_path.c`), which serves plain commands without entering
Python.

The library learns a kind of order only after Python has served one, and forgets all kinds when
something has changed that they take for granted. It acts on no other order: what it hands back is
the init's to serve. Where the library was not built, or describes itself otherwise than expected,
there is no fast path and nothing else changes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import msgspec

from ...domain.outcome import Outcome
from ...domain.states import ActionState
from ...protocol.payload import KEEPS, ExecCall, encode
from ...protocol.process_frames import RECEIVE, RunAction, SandboxLimits
from .isolation_setup import SandboxIsolation

# Python takes over a command that takes longer: it checks the disk (`SandboxMeter`) after 500 ms,
# and memory and processes, where it has to, after 50 ms.
_PATIENCE_NS, _WATCHED_PATIENCE_NS = 400_000_000, 40_000_000
_VERSION = 10
_KNOWN = 16  # kinds of orders that it remembers
_OUTPUT = 1 << 14  # bytes of a stream
_OWN = 8  # the pause process and its children inside
_FOLDERS = 3
_MEASURED = 5  # fields of an outcome that it writes: exit_code to maxrss_kib


# an order's first byte says how many fields it has
_ORDER_HEAD = msgspec.msgpack.encode(RunAction(0, b"", "", 0, 0, 0, False, "", SandboxLimits()))[0]


class _Bytes(ctypes.Structure):
    _fields_ = [("at", ctypes.c_char_p), ("size", ctypes.c_uint64)]

    @classmethod
    def of(cls, data: bytes) -> _Bytes:
        return cls(data, len(data))


class _Known(ctypes.Structure):
    _fields_ = [("tail", _Bytes), ("envp", ctypes.POINTER(ctypes.c_char_p)),
                ("shared", ctypes.c_int32), ("processes", ctypes.c_int32),
                ("once", ctypes.c_int32)]


class _Struct(ctypes.Structure):
    """The same as `struct fast_path` in C."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in (
            "control", "wake", "cpus", "score", "devnull", "used", "gone", "outer",
            "helper")),
        ("own", ctypes.c_int32 * _OWN),
        *((name, ctypes.c_int32) for name in (
            "changed_count", "known_count", "order_head", "call_head")),
        ("changed", ctypes.POINTER(ctypes.c_int32)), ("patience_ns", ctypes.c_int64),
        ("output_max", ctypes.c_int64),
        ("call_tails", _Bytes * len(KEEPS)),
        *((name, _Bytes) for name in ("completed", "failed", "outcome_tail", "begin")),
        ("folders", _Bytes * _FOLDERS),
        ("known", _Known * _KNOWN),
        *((name, ctypes.c_int32) for name in (
            "pid", "out", "err", "status", "ended", "fell", "size")),
        *((name, ctypes.c_int64) for name in (
            "started_ns", "cpu_ns", "maxrss_kib", "hidden", "group_ns", "missed")),
        ("data", ctypes.c_uint8 * RECEIVE),
    ]  # fmt: skip


class ReturnCode(IntEnum):
    """Why the library returned."""

    LOOK = 0  # something else than an order has happened
    READ = 1  # `data` was read, and nothing was done about it
    RUNNING = 2  # `data` is an order whose command runs, or has ended
    GONE = 3  # the worker is gone
    FELL = 4  # the pause process has ended
    FRESHEN = 5  # `data` is an order without a session that was served; it left something


def _load() -> ctypes.CDLL | None:
    path = f"{os.path.dirname(__file__)}/_fast_path.so"
    if not os.path.exists(path):
        return None
    try:
        library = ctypes.CDLL(path)
        library.fast_path_size.restype = ctypes.c_uint
        same = library.fast_path_size() == ctypes.sizeof(_Struct)
        return library if same and library.fast_path_version() == _VERSION else None
    except (OSError, AttributeError):  # built for another machine or libc, or from other code
        return None


_library = _load()


def built() -> bool:
    """Whether the library was built for this machine."""
    return _library is not None


def serves(isolation: SandboxIsolation) -> bool:
    """Whether the library can serve a sandbox with this isolation."""
    return _library is not None and len(isolation.own) <= _OWN


class FastPath:
    """The fast path of one sandbox.

    Args:
        doors: descriptors of the control socket, of a pipe with a byte for every signal, of the
            `UnitsFile`, of `bootstrap.open_oom_score`, of /dev/null and of `GroupCpu`.
        changed: signals that a command gets back with their default action.
        isolation: the isolation of the sandbox.
        output_max: bytes of one output stream; Python serves a command that writes more.
        watch: whether Python checks the memory of commands.
        begin: the directory in which commands begin; empty for this process's own. A command may
            have removed it, or have made another one of its name.
        folders: the directories that an action without a session must leave empty, the sandbox's
            home first; at most 3.

    Attributes:
        patience_ns: Python takes over a command that takes longer.
        stands: the state on which all learned orders rely; None when none was learned.
    """

    def __init__(self, doors: tuple[int, int, int, int, int, int], changed: tuple[int, ...],
                 isolation: SandboxIsolation, output_max: int, watch: bool, begin: str = "",
                 folders: Sequence[str] = ()) -> None:
        assert _library is not None
        self._serve = _library.fast_path_serve
        self.patience_ns = _WATCHED_PATIENCE_NS if watch else _PATIENCE_NS
        head, failed, tail = _around(isolation.name)
        pause = isolation.pause
        gone, outer = (pause.gone_fd, pause.outer) if pause else (-1, 0)
        helper = isolation.helper.pid if isolation.helper else 0
        calls = [ExecCall(keep=keep) for keep in KEEPS]
        call_tails = tuple(encode(call)[-_rest(msgspec.structs.astuple(call)[2:]):]
                           for call in calls)
        numbers = (ctypes.c_int32 * len(changed))(*changed)
        self._kept = (head, failed, tail, call_tails, numbers)  # the struct points into them
        self._struct = _Struct(
            *doors, gone, outer, helper, tuple(sorted(isolation.own)), len(changed), 0,
            _ORDER_HEAD, encode(ExecCall())[0], numbers, self.patience_ns, min(output_max, _OUTPUT),
            tuple(map(_Bytes.of, call_tails)), _Bytes.of(head), _Bytes.of(failed), _Bytes.of(tail),
            _Bytes.of(os.fsencode(begin)),
            tuple(_Bytes.of(os.fsencode(folder)) for folder in folders))
        self._at = ctypes.byref(self._struct)
        self._learned: list[tuple[bytes, object]] = []  # by slot: the bytes to which `known` points
        self._next = 0
        self.stands: object = None

    def learn(self, run: RunAction, env: Mapping[str, str], shared: bool, processes: int,
              stands: object
              ) -> None:
        """Notes that Python has served such an order. Similar ones are plain for as long as
        `stands` is the same.

        Args:
            run: the order.
            env: the environment of its command.
            shared: whether the kernel shall kill the command before its init when memory runs out.
            processes: the limit of processes; 0 for none.
            stands: what such orders take for granted.
        """
        if stands != self.stands:
            self.forget()
            self.stands = stands
        rest = msgspec.msgpack.encode(msgspec.structs.astuple(run)[2:])[1:]
        if any(rest == kept for kept, _ in self._learned):
            return
        lines = [os.fsencode(f"{name}={value}") for name, value in env.items()]
        envp = (ctypes.c_char_p * (len(lines) + 1))(*lines, None)
        slot, self._next = self._next, (self._next + 1) % _KNOWN
        self._learned[slot:slot + 1] = [(rest, envp)]
        self._struct.known[slot] = _Known(_Bytes.of(rest), envp, shared, processes, not run.keep)
        self._struct.known_count = len(self._learned)

    def forget(self) -> None:
        """Forgets all orders that were learned."""
        self._struct.known_count = self._next = 0
        self._learned.clear()
        self.stands = None

    def serve(self) -> ReturnCode:
        """Serves plain orders until something else happens."""
        return ReturnCode(self._serve(self._at))

    @property
    def data(self) -> bytes:
        """The bytes read, after READ, RUNNING or FRESHEN. Empty after READ: the worker is gone."""
        return ctypes.string_at(self._struct.data, self._struct.size)

    @property
    def command(self) -> _Struct:
        """The running command, after RUNNING: its process id, pipes, start and what was measured.
        """
        return self._struct


def _rest(values: tuple[Any, ...]) -> int:
    """The encoded size of these values at the end of a list."""
    return sum(len(msgspec.msgpack.encode(value)) for value in values)


def _around(isolation: str) -> tuple[bytes, bytes, bytes]:
    """The encoded bytes before an outcome's measured fields, for COMPLETED and for FAILED, and the
    bytes after them.
    """
    heads = []
    for state in (ActionState.COMPLETED, ActionState.FAILED):
        outcome = Outcome(state, isolation=isolation)
        body = msgspec.msgpack.encode(outcome)
        size = _rest(msgspec.structs.astuple(outcome)[1 + _MEASURED:])
        heads.append(body[: -size - _MEASURED])
    return heads[0], heads[1], body[-size:]
