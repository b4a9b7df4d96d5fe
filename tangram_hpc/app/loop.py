"""Helpers of asyncio drivers: a timer, the end on an error or a lost parent, rarer collections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import sys
import traceback
from collections.abc import Callable
from typing import Any

from ..errors import InvalidInput, ScratchLost
from ..storage.store import FILE_SIZE_REMEDY
from .restarts import BROKEN_STATUS


class LoopTimer:
    """Fills `ports.Timer` with a running asyncio loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def after(self, delay_s: float, call: Callable[[], None]) -> object:
        """Calls `call` once after `delay_s` seconds; with 0, on the next turn of the loop."""
        return self._loop.call_soon(call) if delay_s <= 0 else self._loop.call_later(delay_s, call)


def seldom_collect() -> None:
    """Makes the garbage collector run rarely. A driver keeps many records that form few cycles,
    and a collection after every 700 new records would cost more than the driver's own work. What
    was imported is never looked at again; a collection before it took 20 ms and found 70 objects.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


def no_more_processes(error: BaseException | None) -> str:
    """Says why no process or thread can be started, and the remedy; empty for any other error."""
    thread = isinstance(error, RuntimeError) and str(error).startswith("can't start new thread")
    # a full pipe is EAGAIN too, and says how much it took
    process = isinstance(error, BlockingIOError) and not hasattr(error, "characters_written")
    if not (thread or process):
        return ""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    shown = "unlimited" if limit == resource.RLIM_INFINITY else limit
    return (f"no {'thread' if thread else 'process'} can be started; end other programs of this "
            f"user on the node, or raise the limit: `ulimit -u` ({shown}) in the shell that starts "
            "the job, or that of a cgroup (`pids.max`), as of a container or a login node")


def die_on_broken_law(loop: asyncio.AbstractEventLoop, who: str,
                      last_words: Callable[[str], None] = lambda why: None,
                      where: str = "TANGRAM_HOME or scratch") -> None:
    """Ends the process at once on an exception that nobody expected.

    Going on with a state that broke an invariant could lose or repeat actions; the journal has all
    that was promised. A full disk, a limit of file sizes or a damaged file breaks no invariant:
    it ends the process too, with one line instead of a traceback.

    Args:
        loop: the process's loop.
        who: `broker` or `worker`, for the message.
        last_words: tells others why this process ends, if it cannot write its files. Another start
            would end in the same way, so nobody should wait for one.
        where: the folders in which the process writes, for the message.
    """

    def die(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _DISK:
            remedy = FILE_SIZE_REMEDY if error.errno == errno.EFBIG else "make room"
            why = (f"{error.strerror} where it writes ({where}); {remedy}, and "
                   "start the job again: its journal has what was promised")
            last_words(why)
            with contextlib.suppress(OSError):  # the log may be on the same disk
                print(f"tangram: {who}: error: {why}", file=sys.stderr, flush=True)
            os._exit(1)
        status = BROKEN_STATUS
        with contextlib.suppress(OSError):
            # such as a kept result that the disk has damaged
            if isinstance(error, (InvalidInput, ScratchLost)):
                status = error.exit_status
                print(f"tangram: {who}: error: {error}", file=sys.stderr, flush=True)
                os._exit(status)
            if why := no_more_processes(error):
                print(f"tangram: {who}: error: {why}", file=sys.stderr, flush=True)
                os._exit(status)
            print(f"tangram: {who}: broken: {context.get('message')}", file=sys.stderr)
            if error is not None:
                traceback.print_exception(type(error), error, error.__traceback__)
            sys.stderr.flush()
        os._exit(status)

    loop.set_exception_handler(die)


def watch_lifeline(loop: asyncio.AbstractEventLoop, fd: int, stop: Callable[[], None]) -> None:
    """Calls `stop` when the process that holds the other end of this pipe is gone."""

    def readable() -> None:
        if not os.read(fd, 1):
            loop.remove_reader(fd)
            stop()

    os.set_blocking(fd, False)
    loop.add_reader(fd, readable)
