"""`python -m golden [check | update --class frozen|listed]`: see `docs/GOLDEN.md`."""

from __future__ import annotations

import argparse
import sys

from . import check
from .renames import read_renames
from .shell import clean

_SHOWN = 8  # lines of a file


def main() -> int:
    """Checks or writes; status 1 when something differs, 2 for wrong words."""
    parser = argparse.ArgumentParser(prog="golden", description=__doc__)
    parser.add_argument("act", choices=("check", "update"), nargs="?", default="check")
    parser.add_argument("--class", dest="kind", choices=("frozen", "listed"),
                        help="which files to check (default: both) or to write")
    parser.add_argument("--cheap", action="store_true", help="check what takes little time")
    parser.add_argument("--rewrite-frozen", action="store_true",
                        help="say that what must never change shall be written anew all the same")
    args = parser.parse_args()
    if args.act == "update":
        return _update(parser, args)
    lines = []
    with clean():
        if args.kind != "listed":
            lines += check.frozen(read_renames(), args.cheap)
        if args.kind != "frozen":
            lines += check.listed(read_renames())
    by_file: dict[str, list[str]] = {}
    for line in lines:
        by_file.setdefault(line.partition(": ")[0], []).append(line)
    for file, told in by_file.items():
        print(*told[:_SHOWN], sep="\n")
        if len(told) > _SHOWN:
            print(f"{file}: ... and {len(told) - _SHOWN} more differences")
    print(f"golden: {len(lines)} differences" if lines else "golden: all is as it was")
    return 1 if lines else 0


def _update(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if args.kind is None:
        parser.error("update: name the class, --class frozen or --class listed")
    if args.kind == "frozen" and not args.rewrite_frozen and any(
            (check.DATA / "frozen").glob("*.json")):
        parser.error("update: the frozen class says what must not change; if its change is "
                     "decided, say --rewrite-frozen")
    with clean():
        for path in check.update(args.kind):
            print(path.relative_to(check.DATA))
    return 0


if __name__ == "__main__":
    sys.exit(main())
