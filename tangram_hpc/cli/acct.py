"""`tangram acct`: a row per action, with sacct's column names, folded from the job's journal."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any


def add(verbs: Any) -> None:
    """Adds the verb."""
    p = verbs.add_parser("acct", help="what every action of a job used (a row each)")
    p.add_argument("-j", "--jobs", default="", metavar="JOB", help="job id (default: the last run)")
    p.add_argument("-o", "--format", default="", help="columns, such as JobID%%20,State,MaxRSS")
    p.add_argument("-P", "--parsable2", action="store_true", help="columns divided by |")
    p.add_argument("-n", "--noheader", action="store_true", help="no header")
    p.add_argument("-s", "--state", default="", help="only these states, divided by commas")
    p.add_argument("--json", action="store_true", help='{"actions": [...]}')
    p.add_argument("-e", "--helpformat", action="store_true", help="the columns there are")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Folds the journal and prints."""
    from ..accounting.fields import DEFAULT, FIELDS, as_json, choose
    from ..accounting.record import fold
    from ..backends.journal import read_journals
    from ..backends.rundir import job_dir, last_job

    if args.helpformat:
        for f in FIELDS:
            print(f"{f.name:<14} {f.about}")
        return 0
    columns = choose(args.format or os.environ.get("TANGRAM_ACCT_FORMAT") or DEFAULT)
    job = args.jobs or last_job(os.environ)
    folded = fold(read_journals(job_dir(os.environ, job)))
    wanted = {s.strip().upper() for s in args.state.split(",") if s.strip()}
    rows = [r for r in folded.records.values() if not wanted or r.state.value in wanted]
    if args.json:
        print(json.dumps({"actions": [as_json(r) for r in rows]}))
        return 0
    if args.parsable2:
        if not args.noheader:
            print("|".join(f.name for f, _ in columns))
        for r in rows:
            print("|".join(f.text(r) for f, _ in columns))
        return 0
    if not args.noheader:
        print(" ".join(_fit(f.name, w) for f, w in columns))
        print(" ".join("-" * abs(w) for _, w in columns))
    for r in rows:
        print(" ".join(_fit(f.text(r), w) for f, w in columns))
    return 0


def _fit(text: str, width: int) -> str:
    """As sacct: right aligned, left for a negative width, a cut marked by +."""
    size = abs(width)
    if len(text) > size:
        text = text[: size - 1] + "+"
    return text.ljust(size) if width < 0 else text.rjust(size)
