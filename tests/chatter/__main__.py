"""Plays seeds under each placer, and tells each failure once and how often it came.

    python -m chatter 0:100 elastic,paper

It is run in the folder `tests`, and takes all placers unless some are named. The exit status is 1
if anything failed.
"""

from __future__ import annotations

import sys
from collections import Counter

from chatter.run import PLACERS, play


def main() -> int:
    """Plays the seeds that were asked for."""
    first, _, last = sys.argv[1].partition(":")
    placers = sys.argv[2].split(",") if len(sys.argv) > 2 else PLACERS
    failures: Counter[str] = Counter()
    for seed in range(int(first), int(last or int(first) + 1)):
        for placer in placers:
            found = play(seed, placer)
            if found.law and not failures[found.law]:
                print(f"play({seed}, {placer!r}): {found.text}", flush=True)
            failures.update([found.law] if found.law else ())
    print(dict(failures))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
