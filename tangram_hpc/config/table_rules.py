"""The rules that all tables of settings have in common, and how a table is checked by its model.

A table has no unknown fields and does not change. A number is a finite number: pydantic by itself
takes `cpus = true` for 1, and TOML knows `inf`, of which no duration or amount can be computed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from ..errors import InvalidInput
from .first_error import describe_first_error

_NUMBERS = {int, float}
_M = TypeVar("_M", bound=BaseModel)


class SettingsTable(BaseModel):
    """The root of all models of settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[info.field_name or ""].annotation
        kinds = {kind, *get_args(kind)}
        given = value if isinstance(value, list | tuple) else (value,)
        if kinds & _NUMBERS and bool not in kinds and any(isinstance(one, bool) for one in given):
            raise ValueError("must be a number")
        return value


def absolute_path(value: str, reader: str) -> str:
    """Returns a path with the home folder in place of a leading `~`.

    Args:
        value: the path.
        reader: the process that opens it in another working directory, such as `the broker`.

    Raises:
        ValueError: the path is relative, so that `reader` would look for it somewhere else.
    """
    path = os.path.expanduser(value)
    if not os.path.isabs(path):
        raise ValueError(f"{value!r} must be an absolute path: {reader} has another working "
                         "directory")
    return path


def check_name(what: str, name: object) -> None:
    """Checks the name that a table has, such as that of a service.

    Args:
        what: what the table is, such as `service`, for the error.

    Raises:
        InvalidInput: it is not one word.
    """
    if not isinstance(name, str) or not name or any(c.isspace() for c in name):
        raise InvalidInput(f"{what} name: {name!r} must be one word")


def checked_table(kind: type[_M], what: str, wanted: _M | Mapping[str, Any]) -> _M:
    """Returns a table of fields as its model; a model that is given is returned as it is.

    Args:
        kind: the model.
        what: what the table is, such as `endpoint search`, for errors.
        wanted: the fields by name.

    Raises:
        InvalidInput: a field is wrong; the text names it.
    """
    if isinstance(wanted, kind):
        return wanted
    if not isinstance(wanted, Mapping) or not all(isinstance(name, str) for name in wanted):
        raise InvalidInput(f"{what}: {wanted!r} is not a table of fields")
    try:
        return kind(**wanted)
    except ValidationError as error:
        raise InvalidInput(f"{what}: {describe_first_error(error, kind)}") from None
