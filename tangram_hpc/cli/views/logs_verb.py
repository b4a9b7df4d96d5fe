"""`tangram logs`: prints what an action wrote, from what the nodes of its job keep.

The setting `logs_mib` decides whether anything is kept, and how much. The files are read; the
broker is asked only by `--follow`, whether the action may still write.
"""

from __future__ import annotations

import argparse
import codecs
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..helpers import ids
from ..helpers.printable import printable
from ..helpers.running_job import connect_to

if TYPE_CHECKING:
    from ...client.client import Client
    from ...storage.output_log import KeptPiece, OutputReader

_POLL_S = 0.5  # between two reads of what the nodes keep
_ASK_S = 5.0  # of silence, before the broker is asked whether the action has ended
_LOST_S = 60.0  # without a broker, after which nothing more is waited for
_LATE_S = 1.0  # by which output may reach the folder after the action's end


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "logs", help="print what an action wrote",
        description="Prints the output of a command, standard output to stdout and standard error "
                    "to stderr. It is there if the job's setting `logs_mib` keeps outputs and "
                    "later output has not taken its place. On a terminal, control characters are "
                    "shown as escapes.")
    p.add_argument("action", metavar="ACTION", type=ids.action,
                   help="id of an action, such as 2.17 or 4711.2.17 (`queue` and `acct` print "
                        "ids)")
    p.add_argument("-j", "--job", type=ids.job,
                   help="job id (default: the last job)")
    p.add_argument("-f", "--follow", action="store_true",
                   help="go on with what is written, until the action has ended")
    p.add_argument("-n", "--tail", type=_count, default=None, metavar="LINES",
                   help="only the last lines of each stream (default: all)")
    which = p.add_mutually_exclusive_group()
    which.add_argument("--stdout", dest="streams", action="store_const", const=(1,),
                       help="only the standard output")
    which.add_argument("--stderr", dest="streams", action="store_const", const=(2,),
                       help="only the standard error")
    p.add_argument("--all-attempts", action="store_true",
                   help="what every attempt wrote (default: only the last that wrote anything)")
    p.set_defaults(go=go, streams=(1, 2))


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines of at least 0")
    return int(text)


def go(args: argparse.Namespace) -> int:
    """Prints what is kept, then what comes; returns the exit status."""
    from ...errors import InvalidInput
    from ...storage.output_log import OutputReader
    from ...storage.rundir import job_dir, last_job

    action = args.action.action
    job = args.job or args.action.job or last_job(os.environ)
    folder = job_dir(os.environ, job)
    reader = OutputReader(folder, args.action.number, _warn)
    printer = _Printer(args.streams)
    if reader.several and not args.follow:  # a later attempt may run on any node
        reader.nodes = _nodes_of(folder, args.action.number)
    pieces = list(reader.new())
    if not pieces and not args.follow:
        raise InvalidInput(f"ACTION: {_nothing(action, folder, reader)}")
    if pieces and not args.all_attempts:
        last = max(piece.lease for piece in pieces)
        pieces = [piece for piece in pieces if piece.lease == last]
    printer.show(pieces if args.tail is None else _last_lines(pieces, args.tail))
    if args.follow and not _follow(reader, printer, job, action) and not pieces:
        raise InvalidInput(f"ACTION: {_nothing(action, folder, reader)}")
    printer.end()
    return 0


def _nodes_of(folder: Path, action: int) -> set[str]:
    """Returns the nodes on which an action ran or was to run; none if the journal cannot be read.
    The logs of all nodes may be many times as large as the journal.
    """
    from ...domain import event as ev
    from ...errors import InvalidInput
    from ...storage.journal_segments import read_journals

    names, found = dict[int, str](), set[str]()
    try:
        for event in read_journals(folder):
            if type(event) is ev.NodeJoined:
                names[event.node] = event.spec.name
            elif type(event) is ev.LeaseGranted and event.action == action:
                found.add(names[event.node])
    except (InvalidInput, KeyError):  # KeyError: a repaired journal may lack the node
        return set()
    return found


def _warn(text: str) -> None:
    print(f"tangram: warning: {text}", file=sys.stderr)


def _nothing(action: str, folder: Path, reader: OutputReader) -> str:
    """Says why there is no output of an action, and what to do about it."""
    if not reader.kept:  # asked first, because it raises for a closed folder
        if not folder.is_dir():
            return f"job folder {folder} does not exist; name the job with -j"
        return (f"no output is kept of this job ({folder}); set `logs_mib` in tangram.toml before "
                "a job starts, such as `logs_mib = 256`")
    return (f"nothing is kept of action {action}: it has not run, it wrote nothing, it is a "
            "function or a call of a service, or later output has taken its place (`logs_mib`)")


def _follow(reader: OutputReader, printer: _Printer, job: str, action: str) -> bool:
    """Prints what comes, until the action has ended and its last output has had time to come.
    Returns whether anything came.
    """
    came, asking = False, _Asking(job, action)
    end_s, heard_s = float("inf"), time.monotonic() - _ASK_S
    try:
        while True:
            now = time.monotonic()
            pieces = list(reader.new())
            printer.show(pieces)
            if pieces:
                came, heard_s = True, now
            elif now > end_s:
                return came
            elif end_s == float("inf") and now - heard_s >= _ASK_S:
                heard_s = now
                if asking.is_over():
                    end_s = now + _LATE_S
            time.sleep(_POLL_S)
    finally:
        asking.close()


class _Asking:
    """Asks the broker whether an action has ended, as one client: the journal keeps each client.

    Args:
        job: id of the job.
        action: id of the action.
    """

    def __init__(self, job: str, action: str) -> None:
        self._job, self._action = job, action
        self._client: Client | None = None
        self._lost_s = 0.0  # when the broker first did not answer; 0 if it does

    def is_over(self) -> bool:
        """Whether the action can write nothing any more. A broker that does not answer may be
        followed by another, so it is asked again for a while.
        """
        from ...domain.states import ENDED
        from ...errors import AccessError, BrokerUnreachable

        try:
            if self._client is None:
                self._client = connect_to(self._job, "tangram logs")
            told = self._client.ask("explain", self._action)
        except AccessError:
            return True
        except BrokerUnreachable:
            self.close()
            self._lost_s = self._lost_s or time.monotonic()
            if lost := time.monotonic() - self._lost_s > _LOST_S:
                _warn("the job's broker does not answer; the action may still write")
            return lost
        self._lost_s = 0.0
        return "error" in told or told.get("state") in {state.value for state in ENDED}

    def close(self) -> None:
        """Leaves the job."""
        if self._client is not None:
            self._client.close()
            self._client = None


def _last_lines(pieces: list[KeptPiece], count: int) -> list[KeptPiece]:
    """Returns the last lines of each stream of each attempt, in the order in which they were
    written.
    """
    found: list[KeptPiece] = []
    left: dict[tuple[int, int], int] = {}  # line breaks that may still come before, by stream
    for piece in reversed(pieces):
        key = piece.lease, piece.stream
        first = key not in left
        budget = left.setdefault(key, count)
        if budget <= 0:
            continue
        body = piece.data[:-1] if first and piece.data.endswith(b"\n") else piece.data
        breaks = body.count(b"\n")
        if breaks >= budget:
            start = len(body)
            for _ in range(budget):
                start = body.rindex(b"\n", 0, start)
            piece = piece._replace(data=piece.data[start + 1:])
        left[key] = budget - breaks
        found.append(piece)
    return found[::-1]


class _Printer:
    """Writes pieces to stdout and stderr.

    Args:
        streams: the streams that are wanted.
    """

    def __init__(self, streams: tuple[int, ...]) -> None:
        self._streams = streams
        # for terminals: a character may begin in one piece and end in the next
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {stream: decoder("replace") for stream in streams}

    def show(self, pieces: Iterable[KeptPiece]) -> None:
        """Writes pieces as they are, or to a terminal so that they cannot change it."""
        from ...storage.output_log import DROPPED

        for piece in pieces:
            if piece.stream == DROPPED:
                _warn(f"{piece.data.decode()} bytes of this action's output before here were not "
                      "kept, as they could not be written fast enough")
            elif piece.stream in self._streams:
                self._emit(piece.stream, piece.data)
        sys.stdout.flush()
        sys.stderr.flush()

    def end(self) -> None:
        """Shows what stands in place of a character that has not ended."""
        for stream in self._streams:
            self._emit(stream, b"", final=True)

    def _emit(self, stream: int, data: bytes, final: bool = False) -> None:
        file: Any = sys.stdout if stream == 1 else sys.stderr
        if file.isatty():
            text = self._decoders[stream].decode(data, final)
            file.write("\t".join(printable(part, lines=True) for part in text.split("\t")))
        elif data:
            file.flush()
            file.buffer.write(data)
