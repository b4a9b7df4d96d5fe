"""Inputs for the fuzz targets in `tests/fuzz/`: real files and values with a few edits.

Every input is drawn by Hypothesis. So the same target runs some hundred drawn inputs in the short
suite, shrinks what fails, and is driven by a coverage-guided fuzzer in `make fuzz`, which draws
the same inputs from the bytes that it mutates (`tests/fuzz/run.py`).
"""

from __future__ import annotations

import atexit
import enum
import random
import re
import shutil
import tempfile
import types
import typing
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tangram_hpc.domain.ids import mint

# the same inputs in every run, and nothing is shrunk: `make fuzz` shows what fails, and how
SHORT = settings(max_examples=60, derandomize=True, database=None, deadline=None,
                 phases=[Phase.explicit, Phase.generate],
                 suppress_health_check=list(HealthCheck))
NUMBERS = (-1 << 63, -(1 << 31), -1, 0, 1, 2, 3, 7, 64, 255, 1 << 16, 1 << 31, 1 << 32, 1 << 60,
           (1 << 63) - 1, (1 << 64) - 1, mint(1, 1), mint(1, 2), mint(2, 1))
TEXTS = ("", "a", "b", "cpu", "service:a", "endpoint:a", "x" * 5000, "\0", "a\nb", "🦆", "../a",
         "1+0", "f" * 64)
_NUMBER = st.integers(-3, 9) | st.sampled_from(NUMBERS)
_TEXT = st.sampled_from(TEXTS)
_DATA = st.sampled_from([b"", b"a", b"\0" * 9, b"\xff\xfe", b"x" * 5000]) | st.binary(max_size=12)
LEAVES: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | _NUMBER | _TEXT | _DATA | st.just([]) | st.just({})
    | st.sampled_from([0.5, 1e308, float("inf"), float("nan"), [[[[]]]], {"a": 1}, [1, 1]]))
# what a person, or a program with a mistake, could write in a TOML or JSON file
WORDS = [word.encode() for word in (
    "-1", "0", "1", "2", "0.5", "1e400", "-1e400", "inf", "nan", "NaN", "Infinity", "1e-300",
    "1" * 20, "1" * 5000, "true", "false", "null", '""', '"a"', '"a b"', r'"a\nb"', r'"\ud800"',
    '"' + "x" * 5000 + '"', "[]", "{}", "[1, 1]", "[" * 3000, '{"a":' * 3000, "a", "=", "\n", "#",
    '"', ",", "{", "}", "[[", "]]", "[a]", "a.b", "\0", "1979-05-27T07:32:00Z", "0x10", "é")
    ] + [b"\xff", b"\xc3", b"\xef\xbb\xbf"]
_AT, _SIZE = st.integers(0, 1 << 16), st.integers(1, 40)
_EDIT = st.tuples(st.sampled_from(["put", "replace", "drop", "cut", "copy", "flip"]), _AT, _SIZE,
                  _AT)


@cache
def scratch() -> Path:
    """A folder of this process, which is removed at its end."""
    folder = tempfile.mkdtemp(prefix="tangram-fuzz-")
    atexit.register(shutil.rmtree, folder, True)
    return Path(folder)


def _edited(units: list[bytes], edits: Sequence[tuple[Any, ...]], data: Sequence[bytes]) -> bytes:
    """What a few edits make of a file, of which `units` are the parts that are edited."""
    for number, (what, at, size, other) in enumerate(edits):
        at %= len(units) + 1
        size = min(size, len(units) - at)
        if what == "put":
            units[at:at] = [data[number % len(data)]]
        elif what == "replace":
            units[at : at + 1] = [data[number % len(data)]]
        elif what == "drop":
            del units[at : at + size]
        elif what == "cut":
            del units[at:]
        elif what == "copy":
            other %= len(units) + 1
            units[other:other] = units[at : at + size]
        elif what == "flip" and at < len(units) and units[at]:
            first = units[at][0] ^ 1 << other % 8
            units[at] = bytes((first,)) + units[at][1:]
    return b"".join(units)


def edited_bytes(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """One of these files with up to four edits of bytes."""
    return st.builds(
        lambda seed, edits, data: _edited([bytes((b,)) for b in seed], edits, data),
        st.sampled_from(seeds), st.lists(_EDIT, max_size=4),
        st.lists(_DATA, min_size=1, max_size=2))


def edited_text(seeds: Sequence[str]) -> st.SearchStrategy[bytes]:
    """One of these texts with up to four edits of its words; what is put in are words of it, of
    another one, or `WORDS`."""
    units = {seed: [word.encode() for word in re.findall(r"[\w.+-]+|\"[^\"\n]*\"|\s+|.", seed)]
             for seed in seeds}
    own = sorted({word for words in units.values() for word in words if word.strip()})
    return st.builds(
        lambda seed, edits, data: _edited(list(units[seed]), edits, data),
        st.sampled_from(seeds), st.lists(_EDIT, max_size=4),
        st.lists(st.sampled_from(own) | st.sampled_from(WORDS), min_size=1, max_size=3))


def edited_tree(tree: Any, steps: Sequence[int], leaf: Any) -> Any:
    """A value made of lists and dicts, with one of its parts replaced; `steps` lead to the part."""
    if not steps or not isinstance(tree, list | dict) or not tree:
        return leaf
    if isinstance(tree, dict):
        key = list(tree)[steps[0] % len(tree)]
        return {**tree, key: edited_tree(tree[key], steps[1:], leaf)}
    at = steps[0] % (len(tree) + 1)  # one more than there are: an element is added
    return [*tree[:at], edited_tree(tree[at] if at < len(tree) else None, steps[1:], leaf),
            *tree[at + 1 :]]


STEPS = st.lists(st.tuples(st.lists(st.integers(0, 20), max_size=5), LEAVES), max_size=3)


def packed(tree: Any, edits: Sequence[tuple[Sequence[int], Any]]) -> bytes:
    """A value with these edits as msgpack."""
    for steps, leaf in edits:
        tree = edited_tree(tree, steps, leaf)
    return msgspec.msgpack.encode(tree)


# ---- any value of a type -------------------------------------------------------------------------


@cache
def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type, absurd ones among them, as the types of fields of messages are written."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    plain = {int: _NUMBER, str: _TEXT, bytes: _DATA, bool: st.booleans(), type(None): st.none(),
             float: st.sampled_from([0.0, 1.5, -1.0, 1e308, float("inf"), float("nan")]),
             Any: LEAVES}
    if kind in plain:
        return plain[kind]
    if origin in (typing.Union, types.UnionType):
        return st.one_of([any_of(arg) for arg in args])
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple and args[-1] is not ...:
        return st.tuples(*map(any_of, args))
    if origin in (tuple, list, frozenset):
        return st.lists(any_of(args[0]), max_size=3).map(origin)
    if origin is dict:
        return st.dictionaries(any_of(args[0]), any_of(args[1]), max_size=2)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(list(kind))
    return st.deferred(lambda: st.builds(
        kind, **{field.name: any_of(field.type) if field.required
                 else st.just(_default(field)) | any_of(field.type)
                 for field in msgspec.structs.fields(kind)}))


def _default(field: Any) -> Any:
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def members(*unions: Any) -> list[type]:
    """The classes of these unions."""
    return [member for union in unions for member in typing.get_args(union)]


@cache
def samples(kind: Any, count: int = 2) -> list[Any]:
    """A few values of a class, the same ones in every run, as lists and dicts."""
    rng, made = random.Random(kind.__name__), []
    for full in (True, False)[:count]:
        made.append(msgspec.to_builtins(_one(kind, rng, full), builtin_types=(bytes,)))
    return made


def _one(kind: Any, rng: random.Random, full: bool) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    plain: dict[Any, Callable[[], Any]] = {
        int: lambda: rng.randrange(1, 5), str: lambda: rng.choice(("a", "b")), bytes: lambda: b"x",
        bool: lambda: rng.random() < 0.5, type(None): lambda: None, float: lambda: 0.5,
        Any: lambda: 1}
    if kind in plain:
        return plain[kind]()
    if origin in (typing.Union, types.UnionType):
        return _one(args[0], rng, full)
    if origin is typing.Literal:
        return args[0]
    if origin is tuple and args[-1] is not ...:
        return tuple(_one(arg, rng, full) for arg in args)
    if origin in (tuple, list, frozenset):
        return origin([_one(args[0], rng, full)])
    if origin is dict:
        return {_one(args[0], rng, full): _one(args[1], rng, full)}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    return kind(**{field.name: _one(field.type, rng, full)
                   for field in msgspec.structs.fields(kind) if full or field.required})
