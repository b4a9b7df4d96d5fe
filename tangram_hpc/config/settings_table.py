"""What all tables of settings have in common: the rules for what a person may write into a field.

A table has no unknown fields and does not change. A number is a finite number: pydantic by itself
takes `cpus = true` for 1, and TOML knows `inf`, of which no duration or amount can be computed.
"""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

_NUMBERS = {int, float}


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
