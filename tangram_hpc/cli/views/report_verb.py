"""`tangram report`: writes one HTML page about a job: figures, advice, plots, savings.

Everything is computed from the job's journal, during the job and after it. No broker is asked.
"""

from __future__ import annotations

import argparse
import gc
import glob
import json
import os
import stat
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..helpers import ids
from ..helpers.next_verb import hint

if TYPE_CHECKING:
    from ...accounting.record import ActionRecord
    from ...report.lanes import Window
    from ...report.reported_job import ReportedJob


_OUTPUT_MAX = 4096  # bytes of what a slow action wrote that stand on the page


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "report", help="write a page with figures, advice and plots of a job",
        description="Writes one HTML file about a job that opens in any browser without a network, "
                    "and says what the same actions would have needed with one reservation for "
                    "each trajectory, first come first served, and on a smaller allocation.")
    p.add_argument("job", nargs="?", type=ids.job, metavar="JOB",
                   help="the job (default: the last one)")
    p.add_argument("-o", "--output", type=Path, metavar="FILE",
                   help="file to write (default: report-JOB.html)")
    p.add_argument("--json", action="store_true",
                   help="print the figures as one JSON object instead; this needs no Plotly")
    for kind in ("png", "svg"):
        p.add_argument(f"--{kind}", type=Path, metavar="FOLDER",
                       help=f"write each plot into this folder too, as {kind.upper()}; this needs "
                            "Kaleido and Chrome or Chromium")
    p.add_argument("--window", type=_window, metavar="FROM:TO",
                   help="part of the job that the timeline shows, in seconds from its beginning "
                        "(default: all of it)")
    p.add_argument("--static", type=int, default=0, metavar="K",
                   help="CPUs of a trajectory's reservation in the comparison (default: what its "
                        "actions need, up to 4 if they can use them)")
    p.add_argument("--simulate", type=int, metavar="N",
                   help="simulate N actions at most for the comparison, those of the trajectories "
                        "that began first; 0: no comparison (default: 2000)")
    p.set_defaults(go=go)


def _window(text: str) -> tuple[float, float]:
    since, colon, until = text.partition(":")
    try:
        found = float(since or 0), float(until)
    except ValueError:
        found = 1.0, 0.0
    if not colon or not 0 <= found[0] < found[1] < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be FROM:TO in seconds, such as 60:90")
    return found


def go(args: argparse.Namespace) -> int:
    """Writes the page, or prints the figures; returns the exit status."""
    from ...storage.rundir import last_job

    _refuse_early(args)
    job = args.job or last_job(os.environ)
    report = _report(job, args)
    if args.json:
        from ...report.contents import contents
        from ...report.series import time_series

        print(json.dumps(contents(report, time_series(report))))
        return 0
    _draw(report, args, args.output or _default_file(job, report))
    hint(f"`tangram acct -j {job}` prints each action, `tangram logs ACTION` what it wrote")
    return 0


def _refuse_early(args: argparse.Namespace) -> None:
    """Raises InvalidInput for what can be refused before the job is read."""
    from ...atomic_file import check_output
    from ...errors import InvalidInput
    from ...report.figures import graph_objects

    if args.static < 0:
        raise InvalidInput(f"--static {args.static}: must be a number of CPUs")
    if args.simulate is not None and args.simulate < 0:
        raise InvalidInput(f"--simulate {args.simulate}: must be a number of actions, 0 for no "
                           "comparison")
    if not args.json:
        check_output("--output", args.output or Path("report.html"))
        graph_objects()


def _default_file(job: str, report: ReportedJob) -> Path:
    """Returns the file that is written by default. Its name contains the cluster if jobs of several
    clusters have this id, since the page of one would replace the page of another.
    """
    from ...storage.rundir import job_dir

    folder = job_dir(os.environ, job)
    bare = folder.name.partition("@")[0]
    others = [p for p in folder.parent.glob(f"{glob.escape(bare)}@*")
              if "~" not in p.name and p.name != folder.name]
    return Path(f"report-{folder.name if others else report.row.job or job}.html")


def _report(job: str, args: argparse.Namespace) -> ReportedJob:
    """Reads the job, and simulates what else it could have been."""
    import time

    from ...errors import InvalidInput
    from ...report.reported_job import gather
    from ...storage.job_folders import is_served
    from ...storage.journal_segments import read_journals
    from ...storage.output_log import last_output
    from ...storage.rundir import job_dir

    folder = job_dir(os.environ, job)
    report = gather(read_journals(folder), is_served(folder), time.time_ns())
    if not (report.folded.job or report.folded.records):  # nothing says when it began, either
        raise InvalidInput(f"job {job}: its journal has no event yet; its broker has just begun, "
                           "or was killed before it wrote one")
    gc.freeze()  # the records stay until the end; each collection would walk all of them again
    _compare(report, args)
    if not args.json:
        slow = report.slowest
        outputs = last_output(folder, {r.action.id for r in slow}, _OUTPUT_MAX, _nodes(slow))
        report.outputs = {action: data.decode(errors="replace")
                          for action, data in outputs.items()}
    return report


def _nodes(records: Iterable[ActionRecord]) -> set[str]:
    """Returns the nodes on which an attempt of these actions was; none, which means all, if the
    journal does not say it of every attempt, as a repaired one.
    """
    nodes = [attempt.node for r in records for attempt in r.attempts if attempt.start_ns]
    return set() if None in nodes else {node.name for node in nodes if node is not None}


def _compare(report: ReportedJob, args: argparse.Namespace) -> None:
    from ..helpers.job_savings import compare, say_progress

    if args.simulate == 0:
        report.why_no_savings = "--simulate 0 left it out"
        return
    report.savings, report.why_no_savings = compare(
        report.folded, report.row, report.witness, partial(say_progress, "report"), args.static,
        args.simulate)


def _chosen(window: tuple[float, float] | None, report: ReportedJob) -> Window | None:
    """Returns the window within the job.

    Raises:
        InvalidInput: The window begins after the job's end.
    """
    from ...errors import InvalidInput
    from ...report.lanes import Window

    if window is None:
        return None
    end_s = (report.until_ns - report.since_ns) / 1e9
    if window[0] >= end_s:
        raise InvalidInput(f"--window {window[0]:g}:{window[1]:g}: the job lasted {end_s:.1f} s")
    return Window(window[0], min(window[1], end_s))


def _draw(report: ReportedJob, args: argparse.Namespace, path: Path) -> None:
    """Writes the page and the pictures, and says in a line for each file what was written."""
    from ...report.figures import all_plots, write_pictures
    from ...report.lanes import lanes
    from ...report.page import page
    from ...report.series import time_series

    series, grid = time_series(report), lanes(report, _chosen(args.window, report))
    plots = all_plots(report, series, grid)
    _write(report, path, page(report, series, grid, plots).encode())
    for kind in ("png", "svg"):
        if folder := getattr(args, kind):
            for picture in write_pictures(plots, folder, kind):
                print(picture)


def _write(report: ReportedJob, path: Path, data: bytes) -> None:
    """Writes the page, and says in one line how large it is."""
    from ...atomic_file import replacing_output
    from ...errors import InvalidInput

    try:
        with replacing_output(path) as target:
            if report.outputs:
                _write_private(target, data)
            else:
                target.write_bytes(data)
    except OSError as error:
        raise InvalidInput(f"--output {path}: {error.strerror}") from None
    print(f"{path}: {len(report.folded.records)} actions, {len(data) / 2**20:.1f} MiB; open it in "
          "a browser")


def _write_private(path: Path, data: bytes) -> None:
    """Writes a file that only its owner can read, as the job's folder keeps outputs. An existing
    file gets this mode before anything is written; a pipe or a device keeps its own.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fchmod(file.fileno(), 0o600)
            os.ftruncate(file.fileno(), 0)
        file.write(data)
