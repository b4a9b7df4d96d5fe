"""`tangram journal`: checks the journals and the kept results of a job, and repairs damaged ones.

`check` only reads, and may run while a broker serves the job. `repair` refuses then. Neither
deletes anything.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from ..helpers import ids

if TYPE_CHECKING:
    from ...storage.journal_check import FileReport, JobReport


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser("journal", help="check and repair a job's journals and kept results")
    subs = p.add_subparsers(dest="journal_verb", metavar="VERB", required=True)
    subs.add_parser("check", help="read all journals and kept results, and compare them; the "
                                  "status is 1 if something is damaged or lost")
    subs.add_parser("repair", help="move damaged files into the folder `damaged`, put what can "
                                   "be read in their place, and say what is lost")
    for each in subs.choices.values():
        each.add_argument("-j", "--job", type=ids.job,
                          help="job id (default: the job whose journal was written to last)")
        each.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Checks or repairs, and prints the report; returns the exit status."""
    from ...storage.journal_check import check_job
    from ...storage.journal_repair import repair_job
    from ...storage.rundir import job_dir, last_job

    folder = job_dir(os.environ, args.job or last_job(os.environ))
    if args.journal_verb == "check":
        report = check_job(folder)
        if args.json:
            print(json.dumps(report.to_json()))
        else:
            _print(report)
        return 1 if report.problems else 0
    done = repair_job(folder)
    if args.json:
        print(json.dumps(done.to_json()))
        return 0
    for line in done.lines or ["nothing to repair: all files are whole, or only torn at the end"]:
        print(line)
    for before, after in done.moved.items():
        print(f"{before}: the old file is now {folder / after}")
    return 0


def _print(report: JobReport) -> None:
    print(f"{'File':<14} {'Version':>7} {'Bytes':>12} {'Records':>9} {'Events':>9} {'Torn':>6}  "
          "State")
    for f in report.files:
        version = "?" if f.version < 0 else "-" if not f.version else str(f.version)
        print(f"{f.name:<14} {version:>7} {f.size:>12} {f.records:>9} {f.events or '-':>9} "
              f"{f.torn or '-':>6}  {_state(f)}")
    print(f"{report.kept} results are kept, and {report.calls} calls without a result"
          + (f"; {report.gone} names were forgotten, or belong to work that is over"
             if report.gone else ""))
    for line in report.problems:
        print(f"PROBLEM  {line}")
    if any(file.other_release for file in report.files):
        print("REMEDY   use the release that wrote these files")
    elif report.problems:
        print(f"REMEDY   put back copies of the files; or run `tangram journal repair -j "
              f"{report.job}`, which deletes nothing and says what is lost")


def _state(file: FileReport) -> str:
    if file.problem:
        return f"DAMAGED at byte {file.damaged_at}" if file.damaged_at >= 0 else "NOT USABLE"
    return "torn at its end" if file.torn else "whole"
