"""Describes the first error that pydantic found in what a person wrote, in one line.

Every module that checks such input uses this description, so that all of them word an error in the
same way: the field by its dotted path, what is wrong with it, and the value that it has.
"""

from __future__ import annotations

import difflib

from pydantic import BaseModel, ValidationError

_LONGEST = 200  # characters of a path or a value that an error quotes


def first_error(error: ValidationError, kind: type[BaseModel] | None = None, *,
                show_value: bool = True) -> tuple[str, str]:
    """Returns the path of the first wrong field, and what is wrong with it.

    An unknown field comes before all others, because a misspelt field is also missing elsewhere.

    Args:
        error: what pydantic raised.
        kind: the model that was checked; with it, a misspelt field gets a suggestion.
        show_value: whether to add the field's value; False where it may hold a secret.

    Returns:
        The dotted path, which is empty if the whole input is wrong, and the description.
    """
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    field = _in_one_line(".".join(map(str, first["loc"])))
    if first["type"] == "extra_forbidden":
        known = kind.model_fields if kind is not None else {}
        for part in first["loc"][:-1]:
            inner = known[str(part)].annotation if str(part) in known else None
            known = getattr(inner, "model_fields", {})
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        return field, "is not known" + (f"; did you mean `{near[0]}`?" if near else "")
    if first["type"] == "missing":
        return field, "is missing"
    said = first["msg"].removeprefix("Value error, ")
    return field, f"{said}, got {repr(first['input'])[:_LONGEST]}" if field and show_value else said


def shortened(text: str) -> str:
    """Returns a text of the user, cut to a length that people read."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _in_one_line(path: str) -> str:
    """Returns a path, cut if it is long, with line breaks and the like escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode()
                   for c in shortened(path))


def describe_first_error(error: ValidationError, kind: type[BaseModel] | None = None, *,
                         show_value: bool = True) -> str:
    """Returns the first wrong field and what is wrong with it as one text; see `first_error`."""
    field, said = first_error(error, kind, show_value=show_value)
    return f"{field}: {said}" if field else said
