"""`tangram export FORMAT`: writes metrics, spans, tables and usage records for other programs.

Nothing is exported unless this verb is called. `metrics` is about a running job, and asks its
broker; the other formats are about the actions of jobs, and read their journals.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..helpers import acct_jobs, ids, running_job
from ..helpers.end_signals import ends_in_order

if TYPE_CHECKING:
    from ...accounting.record import ActionRecord
    from ...client.client import Client


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "export", help="write metrics, spans, tables or usage records for other programs",
        description="Writes what a job does, or what its actions used, in a format that other "
                    "programs read.")
    p.set_defaults(go=lambda args: args.act(args))
    acts = p.add_subparsers(metavar="FORMAT", required=True)
    _add_metrics(acts)
    act = acts.add_parser("grafana", help="a dashboard for Grafana that shows these metrics")
    _output(act)
    act.set_defaults(act=_grafana)
    act = _of_actions(acts, "otel", "spans of OpenTelemetry, sent to a collector", _otel)
    act.add_argument("--endpoint", default="", metavar="URL",
                     help="address of the collector, such as http://localhost:4318 (default: "
                          "OTEL_EXPORTER_OTLP_ENDPOINT)")
    _output(_of_actions(acts, "csv", "a table with a line for each action", _csv))
    act = _of_actions(acts, "parquet", "the same table as a Parquet file", _parquet)
    act.add_argument("-o", "--output", type=Path, metavar="FILE", required=True,
                     help="file to write")
    _output(_of_actions(acts, "usage-record", "usage records of the Open Grid Forum", _usage))


def _add_metrics(acts: Any) -> None:
    act = acts.add_parser("metrics", help="what a running job does, for Prometheus")
    act.add_argument("-j", "--job", type=ids.job,
                     help="job id (default: as for `tangram run`)")
    _output(act)
    act.add_argument("-i", "--iterate", type=running_job.seconds, default=None, metavar="SECONDS",
                     help="write the file again and again, until the job ends (default: once)")
    act.add_argument("--listen", type=Path, metavar="SOCKET",
                     help="answer scrapes on this Unix socket, until the job ends")
    act.set_defaults(act=_metrics)


def _of_actions(acts: Any, name: str, about: str, act: Callable[[argparse.Namespace], int]) -> Any:
    p = acts.add_parser(name, help=about)
    p.add_argument("-j", "--jobs", type=ids.jobs, default=[], metavar="ID[,ID...]",
                   help="ids of jobs, or of actions such as 4711.2.17 (default: the last job)")
    p.set_defaults(act=act)
    return p


def _output(act: Any) -> None:
    act.add_argument("-o", "--output", type=Path, metavar="FILE",
                     help="file to write (default: stdout)")


# ---- a running job -----------------------------------------------------------------------------


def _metrics(args: argparse.Namespace) -> int:
    from ...errors import InvalidInput
    from ...export.metrics import as_text, registry

    if args.listen is not None and (args.output is not None or args.iterate is not None):
        raise InvalidInput("--listen: the socket answers each scrape; leave -o and -i out")
    if args.iterate is not None and args.output is None:
        raise InvalidInput("--iterate: it writes a file; name it with -o")
    with running_job.connect_to(args.job, "tangram export") as client:
        metrics = registry(lambda: dict(running_job.answer_of(client, "top")))
        if args.iterate is None and args.listen is None:
            _write(args.output, as_text(metrics).decode())
            return 0
        with ends_in_order():
            _go_on(args, client, metrics)
    return 0


def _go_on(args: argparse.Namespace, client: Client, metrics: Any) -> None:
    """Answers scrapes or writes the file, until the job ends or a signal comes."""
    from ...errors import BrokerUnreachable, InvalidInput
    from ...export.metrics import as_text
    from ...export.metrics_socket import serve_on

    try:
        if args.listen is not None:
            serve_on(args.listen, metrics, lambda: client.failure is not None)
        written = False  # a path that never worked is wrong
        while True:
            try:
                _write(args.output, as_text(metrics).decode())
            except BrokerUnreachable as error:
                said = running_job.will_ask_again(client, error)
            except InvalidInput as error:  # the disk may be full for a while
                if not written:
                    raise
                said = f"tangram: {error}; trying again"
            else:
                written, said = True, ""
            if said:
                _take_away(args.output)  # what the file says is no longer so
                print(said, file=sys.stderr, flush=True)
            time.sleep(args.iterate)
    except BrokerUnreachable as error:
        print(f"tangram: the job has ended ({error})", file=sys.stderr)
    finally:
        if args.output is not None:  # figures of a job that is over would stay for ever
            _take_away(args.output)


def _take_away(path: Path) -> None:
    """Removes the file that was written, or empties it where it may not be removed. A device or a
    pipe stays, and so does a symbolic link to the file.
    """
    path = path.resolve()
    if path.is_file():
        try:
            path.unlink()
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, 0)


def _grafana(args: argparse.Namespace) -> int:
    from ...export.metrics import DASHBOARD

    _write(args.output, DASHBOARD.read_text())
    return 0


# ---- the actions of jobs -----------------------------------------------------------------------


def _records(args: argparse.Namespace) -> Iterable[ActionRecord]:
    """The records of the jobs that are named.

    Raises:
        InvalidInput: a job is not known; it is raised before anything is written.
    """
    records = _read_records(args)
    return chain(list(islice(records, 1)), records)


def _read_records(args: argparse.Namespace) -> Iterator[ActionRecord]:
    from ...accounting.selection import Selection

    named = args.jobs or acct_jobs.jobs_in_question(every=False)
    for job in acct_jobs.from_journals(named, False, False, Selection()):
        yield from job.attempts()


def _otel(args: argparse.Namespace) -> int:
    from ...export.spans import send, spans

    sent = send(spans(_records(args)), args.endpoint)
    print(f"tangram: {sent} spans were sent", file=sys.stderr)
    return 0


def _csv(args: argparse.Namespace) -> int:
    from ...export.tables import write_csv

    records = _records(args)
    with _file(args.output) as file:
        write_csv(records, file)
    return 0


def _parquet(args: argparse.Namespace) -> int:
    from ...export.tables import write_parquet

    records = _records(args)
    with _replaced(args.output) as temporary:
        write_parquet(records, temporary)
    return 0


def _usage(args: argparse.Namespace) -> int:
    from ...export.usage_record import write_usage_records

    records = _records(args)
    with _file(args.output) as file:
        write_usage_records(records, file, time.time_ns())
    return 0


# ---- writing -----------------------------------------------------------------------------------


def _write(path: Path | None, text: str) -> None:
    """Prints a text, or replaces a file by it in one step, so that no reader sees a part of it."""
    with _file(path) as file:
        file.write(text)


@contextlib.contextmanager
def _file(path: Path | None) -> Iterator[IO[str]]:
    """Stdout, or a file that is written as the records are read, and is complete when it appears.
    Both are UTF-8, as the readers of these formats expect, whatever the locale is.
    """
    if path is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")
        yield sys.stdout
        return
    with _replaced(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        yield file


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """A temporary file that takes the place of a file if no error is raised."""
    from ...atomic_file import replacing_output
    from ...errors import InvalidInput

    try:
        with ends_in_order(), replacing_output(path) as temporary:
            yield temporary
    except OSError as error:
        raise InvalidInput(f"--output {path}: {error.strerror or error}") from None
