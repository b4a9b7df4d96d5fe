"""Listed: every text that people can read, collected from the source and from the parsers.

A text is a string of the source, not a docstring, with at least two words; what an f-string puts in
is shown as `{}` with its conversion and format. Where a text stands and which function says it does
not matter.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator

from . import walk, where

_TEXT = re.compile(r"[A-Za-z]{2,}.*\s.*[A-Za-z]{2,}", re.DOTALL)


def messages() -> dict[str, str]:
    """Each text, and whether it is help of the command line or another text."""
    found = {}
    for _, tree in walk.trees():
        for text in texts(tree):
            found[text] = "text"
    for text in _helps(where.find("parser")()):
        found[text] = "help"
    return dict(sorted(found.items()))


def texts(tree: ast.AST) -> Iterator[str]:
    """The texts of one module."""
    skipped = {id(node) for node in _docstrings(tree)}
    for parent in ast.walk(tree):
        if isinstance(parent, ast.JoinedStr):  # its parts are no texts of their own
            skipped |= {id(part) for part in parent.values if isinstance(part, ast.Constant)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            text = _template(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if _TEXT.search(text.replace("{}", "")):
            yield text


def _template(node: ast.JoinedStr) -> str:
    parts = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
        elif isinstance(part, ast.FormattedValue):
            how = f"!{chr(part.conversion)}" if part.conversion > 0 else ""
            spec = part.format_spec
            shape = f":{_template(spec)}" if isinstance(spec, ast.JoinedStr) else ""
            parts.append(f"{{{how}{shape}}}")
    return "".join(parts)


def _docstrings(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.value


def _helps(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from filter(None, (parser.description, parser.epilog))
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue  # argparse's own words differ from version to version
        if action.help and action.help is not argparse.SUPPRESS:
            yield action.help
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                if choice.help:
                    yield choice.help
            for inner in action.choices.values():
                yield from _helps(inner)
