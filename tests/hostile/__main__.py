"""Runs every attack that the tests have, and prints who attacked what and what held.

    cd tests && python -m hostile [--long] [--slurm] [--as-user] [--write]

It prints the table, the cells that are empty and why, what was skipped and why, and one JSON line.
The status is 1 if an attack did not fail as it must. Root and an ordinary user meet other limits,
so `make hostile` runs it as both: `--as-user` lets root run it as a user without privileges.
`--write` runs nothing, and puts the table of how many tests there are into `docs/SECURITY.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time

import pytest
from helpers.ordinary_user import ordinary_user

from .attack_table import CELLS, NO_WAY, TESTS, Counting, Counts, files, page, results

PAGE = TESTS.parent / "docs" / "SECURITY.md"
BEGIN, END = "<!-- attacks: written by `make hostile` -->\n", "<!-- end of attacks -->"
_USER_S = 3600.0


def _report(counts: Counts, seconds: float) -> None:
    print(results(counts))
    for attacker, asset in counts.empty():
        why = NO_WAY.get((attacker, asset), "not tried here")
        print(f"empty: {attacker} x {asset}: {why}")
    for why, count in counts.reasons.most_common():
        print(f"skipped {count}: {why}")
    for name in counts.failed:
        print(f"BROKEN: {name}")
    print(json.dumps({
        "uid": os.getuid(), "seconds": round(seconds), "cells": CELLS,
        "cells_tried": CELLS - len(counts.empty()),
        "attempts": sum(counts.held.values()) + sum(counts.broken.values()),
        "held": sum(counts.held.values()), "broken": sum(counts.broken.values()),
        "skipped": sum(counts.skipped.values()),
        "gaps": [f"{a} x {b}" for a, b in counts.empty() if (a, b) not in NO_WAY]}))


def _write() -> None:
    """Replaces the table of the page."""
    text, count = re.subn(re.escape(BEGIN) + ".*?" + re.escape(END),
                          lambda found: f"{BEGIN}{page()}\n{END}", PAGE.read_text(), flags=re.S)
    assert count == 1, f"{PAGE} has no place for the table"
    PAGE.write_text(text)


def _as_user(words: list[str]) -> int:
    """Runs this program as a user without privileges; returns its exit status."""
    with ordinary_user() as user:
        done = user.run("-m", "hostile", *words, timeout_s=_USER_S)
        print(done.stdout, done.stderr, sep="", end="")
        return done.returncode


def main() -> int:
    """Runs the attacks; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hostile", description="Runs all attacks of the tests.")
    parser.add_argument("--long", action="store_true", help="also those that take minutes")
    parser.add_argument("--slurm", action="store_true", help="also those that need a real Slurm")
    parser.add_argument("--write", action="store_true",
                        help="run nothing, and write the table of docs/SECURITY.md")
    parser.add_argument("--as-user", action="store_true",
                        help="as a user without privileges; for root")
    parser.add_argument("words", nargs="*", help="arguments for pytest")
    args = parser.parse_args()
    if args.write:
        if not args.as_user:
            _write()
        return 0
    if args.as_user:
        return _as_user([word for word in sys.argv[1:] if word != "--as-user"])
    chosen = " and ".join(["attack", *([] if args.long else ["not long"]),
                           *([] if args.slurm else ["not slurm"])])
    counting, began = Counting(), time.monotonic()
    named = any("::" in word or word.endswith(".py") for word in args.words)
    pytest.main(["-q", f"--rootdir={TESTS.parent}", "-p", "no:cacheprovider", "-m", chosen,
                 *args.words, *([] if named else map(str, files()))], plugins=[counting])
    _report(counting.counts, time.monotonic() - began)
    return 1 if counting.counts.failed or not counting.counts.held else 0


if __name__ == "__main__":
    sys.exit(main())
