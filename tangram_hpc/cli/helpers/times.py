"""Parses times in Slurm's formats. Pure: the present time is handed in.

Points in time are written as for `sacct -S` and `-E`: dates, times of the day, and words such as
`now-2hours`. Time limits of actions are written in seconds, or as for `srun -t`. Slurm's own
`-t 30` means 30 minutes. Here a number alone has always been seconds, since most actions take
seconds, so it stays so; every form with a `:` or a `-` is read as srun reads it.
"""

from __future__ import annotations

import argparse
import re
from datetime import datetime, timedelta

from ...errors import InvalidInput

_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
_WORD = re.compile(r"(now|today|midnight|noon|fika|teatime)"
                   r"(?:([+-])(\d+)(second|minute|hour|day|week)?s?)?")
_HOURS = {"today": 0, "midnight": 0, "noon": 12, "fika": 15, "teatime": 16}
# a form without a year comes before the one with it, which would take a digit of the day for it
_DATES = ("%Y-%m-%d", "%m/%d", "%m/%d/%y", "%m/%d/%Y", "%d.%m", "%d.%m.%y", "%d.%m.%Y", "%m%d",
          "%m%d%y")
_TIMES = ("%H:%M", "%H:%M:%S", "%H:%M:%S.%f")  # the last as `tangram acct` prints times
_SECONDS = re.compile(r"\d+(\.\d*)?|\.\d+", re.ASCII)


def parse_time(option: str, text: str, now: datetime) -> int:
    """Returns the time that a text means, in ns since the epoch, local time.

    Args:
        option: the option that has the text, for the error message.
        text: a word, a date, a time of the day, or a date and a time with `T` or `-` between them.
        now: the present time.

    Raises:
        InvalidInput: the text is no time.
    """
    try:
        found = _parsed(text.strip(), now)
        if found is not None:
            return round(found.timestamp() * 10**6) * 1000
    except (OverflowError, ValueError, OSError):
        pass  # no clock shows it
    raise InvalidInput(f"{option}: {text!r} is not a time; write one as 2026-11-26T14:30, 14:30, "
                       "now-2hours, today or midnight")


def _parsed(text: str, now: datetime) -> datetime | None:
    word = _WORD.fullmatch(text.lower())
    if word is not None:
        name, sign, count, unit = word.groups()
        base = now if name == "now" else now.replace(hour=_HOURS[name], minute=0, second=0,
                                                     microsecond=0)
        seconds = int(count or 0) * _UNITS[unit or "second"]
        if sign == "-":
            seconds = -seconds
        if name == "now":  # hours of the clock are not hours that pass, on a day that changes it
            return datetime.fromtimestamp(base.timestamp() + seconds)
        return base + timedelta(seconds=seconds)
    for date in _DATES:
        for form in (date, *(f"{date}{cut}{time}" for time in _TIMES for cut in "T-")):
            if (found := _read(text, form, now)) is not None:
                return found
    for time in (*_TIMES, "%I:%M%p", "%I:%M:%S%p", "%I:%M %p", "%I:%M:%S %p"):
        if (at := _read(text, time, now)) is not None:
            return now.replace(hour=at.hour, minute=at.minute, second=at.second,
                               microsecond=at.microsecond)
    return None


def _read(text: str, form: str, now: datetime) -> datetime | None:
    """Returns what a text means in one form; a date without a year is one of this year."""
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    if form.startswith("%m%d") and len(digits) not in (4, 6):
        return None  # strptime would take one digit for a month or a day
    try:
        if "%Y" in form or "%y" in form or "%d" not in form:
            return datetime.strptime(text, form)
        return datetime.strptime(f"{now.year} {text}", f"%Y {form}")
    except ValueError:
        return None


def time_limit(text: str) -> float:
    """Returns a time limit in seconds. It is used as `type=` of an argument.

    Args:
        text: seconds, or one of `MIN:SEC`, `H:MIN:SEC`, `DAYS-H`, `DAYS-H:MIN`, `DAYS-H:MIN:SEC`.
    """
    if _SECONDS.fullmatch(text):
        return float(text)
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    counts = len(parts) in ((1, 2, 3) if dash else (2, 3))
    if not counts or not all(part.isascii() and part.isdecimal() for part in (
            *parts, *([days] if dash else []))):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time limit; write seconds (90), MIN:SEC (1:30), H:MIN:SEC, DAYS-H, "
            "DAYS-H:MIN or DAYS-H:MIN:SEC")
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return int(days) * 86400 + hours * 3600 + minutes * 60 + seconds
    hours, minutes, seconds = (0, *numbers)[-3:]
    return hours * 3600 + minutes * 60 + seconds
