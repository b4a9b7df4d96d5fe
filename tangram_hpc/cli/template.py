"""`tangram template`: the batch scripts that come with the package - list, show, render, check.

Law: text in, text out. A key is documented at the head of its template (`#: key=default  about`)
and stands in it as `<KEY>`; a directive whose key is empty is removed; what stays open is told.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidInput

_KEY = re.compile(r"^#: ([a-z_]+)(=(\S*))?\s+(\S.*)$", re.MULTILINE)
_OPEN = re.compile(r"<([A-Z][A-Z_]+)>")


def add(verbs: Any) -> None:
    """Adds the verb."""
    p = verbs.add_parser("template", help="batch scripts: list, show, render, check")
    p.set_defaults(go=lambda args: args.act(args))
    acts = p.add_subparsers(metavar="ACT", required=True)
    listing = acts.add_parser("list", help="what there is, a line each")
    listing.set_defaults(act=_list)
    show = acts.add_parser("show", help="one template as it is")
    show.add_argument("name")
    show.set_defaults(act=_show)
    fill = acts.add_parser("render", help="one template filled in")
    fill.add_argument("name")
    fill.add_argument("-o", "--option", action="append", default=[], metavar="KEY=VALUE")
    fill.add_argument("--output", type=Path, help="file to write (default: stdout)")
    fill.add_argument("--strict", action="store_true", help="open keys are an error")
    fill.set_defaults(act=_render)
    check = acts.add_parser("check", help="whether a script has placeholders left (status 2)")
    check.add_argument("file", type=Path)
    check.set_defaults(act=_check)


@dataclass(frozen=True)
class Template:
    """A template's text and its keys: name -> (default or None, about)."""

    name: str
    text: str
    about: str
    keys: Mapping[str, tuple[str | None, str]]


def folder() -> Path:
    """Where the templates lie: beside a checkout's package, or in the environment's share."""
    checkout = Path(__file__).resolve().parents[2] / "sbatch_templates"
    shared = Path(sysconfig.get_path("data")) / "share" / "tangram_hpc" / "sbatch_templates"
    return checkout if checkout.is_dir() else shared


def load(name: str) -> Template:
    """A template by name.

    Raises:
        InvalidInput: there is none; names those there are.
    """
    path = folder() / f"{name}.sbatch"
    if "/" in name or not path.is_file():
        there = ", ".join(sorted(p.stem for p in folder().glob("*.sbatch"))) or "none"
        raise InvalidInput(f"template: {name!r} is not known; there is {there}")
    text = path.read_text()
    about = re.search(r"^#: [a-z-]+: (.+)$", text, re.MULTILINE)
    keys = {m[1]: (m[3] if m[2] else None, m[4]) for m in _KEY.finditer(text)}
    return Template(name, text, about[1] if about else "", keys)


def render(template: Template, given: Mapping[str, str]) -> str:
    """The template filled in; keys without a value stay open.

    Raises:
        InvalidInput: a key is not the template's.
    """
    for key in given:
        if key not in template.keys:
            near = difflib.get_close_matches(key, template.keys, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidInput(f"--option: {key!r} is not a key of {template.name}{hint}")
    values = {k: given.get(k, default) for k, (default, _) in template.keys.items()}
    ranks = values.get("ranks")
    if ranks is not None:
        if not ranks.isdigit() or ranks == "0":
            raise InvalidInput(f"--option: ranks={ranks!r} is not a whole number of at least 1")
        values["tasks_trainer"] = str(int(ranks) + 1)  # the gateway is one rank more
    lines = []
    for line in template.text.splitlines(keepends=True):
        empty = any(values.get(k.lower()) == "" for k in _OPEN.findall(line))
        if line.startswith("#SBATCH") and empty:
            continue
        lines.append(_OPEN.sub(lambda m: _filled(m, values), line))
    return "".join(lines)


def _filled(match: re.Match[str], values: Mapping[str, str | None]) -> str:
    value = values.get(match[1].lower())
    return match[0] if value is None else value


def left_open(text: str) -> list[str]:
    """The placeholders in a script's directives and commands (not in its comments)."""
    live = [line for line in text.splitlines()
            if not line.startswith("#") or line.startswith("#SBATCH")]
    return sorted({m[0] for line in live for m in _OPEN.finditer(line)})


def _list(args: argparse.Namespace) -> int:
    for path in sorted(folder().glob("*.sbatch")):
        print(f"{path.stem:<16} {load(path.stem).about}")
    return 0


def _show(args: argparse.Namespace) -> int:
    sys.stdout.write(load(args.name).text)
    return 0


def _render(args: argparse.Namespace) -> int:
    given = {}
    for option in args.option:
        key, equals, value = option.partition("=")
        if not equals:
            raise InvalidInput(f"--option: {option!r} is not KEY=VALUE")
        given[key] = value
    text = render(load(args.name), given)
    still = left_open(text)
    if still and args.strict:
        raise InvalidInput(f"template {args.name}: no value for {', '.join(still)}")
    if still:
        print(f"tangram: still to be filled in: {', '.join(still)}", file=sys.stderr)
    if args.output is None:
        sys.stdout.write(text)
    else:
        args.output.write_text(text)
    return 0


def _check(args: argparse.Namespace) -> int:
    try:
        text = args.file.read_text()
    except OSError as error:
        raise InvalidInput(f"script {args.file}: {error.strerror}") from None
    still = left_open(text)
    if still:
        raise InvalidInput(f"script {args.file}: placeholders are left: {', '.join(still)}; fill "
                           "them in with `tangram template render -o KEY=VALUE`")
    return 0
