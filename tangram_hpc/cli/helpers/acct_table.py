"""Prints the rows of `tangram acct`: as a table like sacct's, with a delimiter, or as JSON.

With a delimiter and as JSON the rows are printed as they come, so that any number of them takes
little memory. A table needs all rows at first, since the column JobID is as wide as its longest
value: the id of an embedded run is long, and cutting it would remove the part that tells actions
apart.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from .printable import printable
from .table import fit

if TYPE_CHECKING:
    from ...accounting.fields import Field

    Text = Callable[[Field, Any], str]

_TIMES = {"Submit": "submit_ns", "Start": "start_ns", "End": "end_ns"}


def add(p: argparse.ArgumentParser) -> None:
    """Adds the options that say how rows are printed."""
    p.add_argument("-o", "--format", default="",
                   help="columns to print, such as JobID%%20,State,MaxRSS")
    p.add_argument("-b", "--brief", action="store_true", help="print JobID, State and ExitCode")
    p.add_argument("-l", "--long", action="store_true", help="print all columns")
    p.add_argument("-p", "--parsable", action="store_true",
                   help="separate the columns by |, and end each row with one")
    p.add_argument("-P", "--parsable2", action="store_true", help="separate the columns by |")
    p.add_argument("--delimiter", default="|", metavar="TEXT",
                   help="what separates the columns with -p and -P (default: |)")
    p.add_argument("-n", "--noheader", action="store_true", help="print no header")
    p.add_argument("--units", type=str.upper, choices=tuple("KMGTP"), metavar="K|M|G|T|P",
                   help="print all amounts of memory in this unit")
    p.add_argument("--noconvert", action="store_true",
                   help="change nothing: without --units amounts are printed as they were measured")


def text_of(args: argparse.Namespace) -> Text:
    """Returns the function that gives the text of a row in a column, as the options and
    SLURM_TIME_FORMAT want it.
    """
    from ...accounting.fields import as_sacct, in_unit
    from ...accounting.job_row import JobRow, text_of_job

    form = os.environ.get("SLURM_TIME_FORMAT", "")
    if not (args.units or args.sacct or args.allocations or "%" in form):
        return lambda field, row: field.text(row)  # there are millions of such cells

    def text(field: Field, row: Any) -> str:
        found = text_of_job(field, row) if isinstance(row, JobRow) else field.text(row)
        if args.units:
            found = in_unit(field, found, args.units)
        if "%" in form and field.name in _TIMES and found != "Unknown":
            ns = getattr(row, _TIMES[field.name], 0) or row.start_ns  # a job was submitted then
            return datetime.fromtimestamp(ns / 1e9).strftime(form)
        return as_sacct(field, found) if args.sacct else found

    return text


def print_rows(args: argparse.Namespace, columns: Sequence[tuple[Field, int]], rows: Iterable[Any]
               ) -> None:
    """Prints the rows as a table, or with a delimiter."""
    text = text_of(args)
    if not (args.parsable or args.parsable2):
        return _print_table(args, columns, list(rows), text)
    rows = _begun(rows)
    cut, end = args.delimiter, args.delimiter if args.parsable else ""
    escaped = "".join(f"\\x{ord(letter):02x}" for letter in cut)
    if not args.noheader:
        print(cut.join(f.name for f, _ in columns) + end)
    for row in rows:
        cells = [printable(text(f, row)) for f, _ in columns]
        print(cut.join(cell.replace(cut, escaped) if cut in cell else cell for cell in cells) + end)


def print_json(key: str, values: Iterable[Any], more: dict[str, Any] | None = None) -> None:
    """Prints one JSON object with the values in a list, as `json.dumps` would."""
    head = "".join(f"{json.dumps(name)}: {json.dumps(value)}, "
                   for name, value in (more or {}).items())
    values = _begun(values)
    print(f"{{{head}{json.dumps(key)}: [", end="")
    for number, value in enumerate(values):
        print(", " * bool(number) + json.dumps(value), end="")
    print("]}")


def _begun(values: Iterable[Any]) -> Iterable[Any]:
    """Reads the first value at once, so that an error in its reading comes before any output."""
    rest = iter(values)
    return chain(list(islice(rest, 1)), rest)


def _print_table(args: argparse.Namespace, columns: Sequence[tuple[Field, int]],
                 rows: Sequence[Any], text: Text) -> None:
    columns = [(f, max([w, *(len(text(f, row)) for row in rows)])
                if f.name in ("JobID", "Group") and w == f.width else w) for f, w in columns]
    if not args.noheader:
        print(" ".join(fit(f.name, w) for f, w in columns))
        print(" ".join("-" * abs(w) for _, w in columns))
    for row in rows:
        print(" ".join(fit(text(f, row), w) for f, w in columns))
