"""Long sequences of lines in little room: enough to find the first line that differs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any


def digest(lines: Sequence[str]) -> dict[str, Any]:
    """The number of lines, a hash of all, and four bits of hash for each line."""
    marks = "".join(hashlib.sha256(line.encode()).hexdigest()[0] for line in lines)
    whole = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return {"lines": len(lines), "sha256": whole, "marks": marks}


def first_difference(golden: dict[str, Any], lines: Sequence[str]) -> str:
    """Says which line is the first that differs, and how it reads now; empty when none does. Of
    sixteen lines that differ one has the same mark by chance, and then a later one is named."""
    now = digest(lines)
    if now == golden:
        return ""
    was, is_now = golden["marks"], now["marks"]
    at = next((i for i in range(min(golden["lines"], len(lines)))
               if was[i] != is_now[i]),
              min(golden["lines"], len(lines)))
    if at >= len(lines):
        return f"line {at + 1} of {golden['lines']}: is gone"
    if at >= golden["lines"]:
        return f"line {at + 1}: is new: {lines[at]}"
    return f"line {at + 1} of {golden['lines']}: differs, is {lines[at]}"
