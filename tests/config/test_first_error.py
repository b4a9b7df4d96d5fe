"""The first error of an input is told in one line of bounded length."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from tangram_hpc.config.first_error import describe_first_error
from tangram_hpc.config.table_rules import checked_table
from tangram_hpc.errors import InvalidInput


class Input(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: int = 1


def told(**fields: object) -> str:
    try:
        Input(**fields)
    except ValidationError as error:
        return describe_first_error(error, Input)
    raise AssertionError("it was accepted")


def test_a_misspelt_field_gets_a_suggestion() -> None:
    assert told(sise=3) == "sise: is not known; did you mean `size`?"


def test_what_is_no_table_of_fields_is_refused_in_one_line() -> None:
    for wrong in ([1], "size", {1: 2}):
        with pytest.raises(InvalidInput, match=r"^input x: .* is not a table of fields$"):
            checked_table(Input, "input x", wrong)
    assert checked_table(Input, "input x", {"size": 3}).size == 3
    with pytest.raises(InvalidInput, match=r"^input x: sise: is not known"):
        checked_table(Input, "input x", {"sise": 3})


def test_a_long_name_and_a_long_value_are_cut() -> None:
    assert told(**{"1" * 5000: 3}) == f"{'1' * 200}...: is not known"
    assert told(**{"a\nb\x1b": 3}) == "a\\nb\\x1b: is not known"
    said = told(size="x" * 5000)
    assert said.startswith("size: ") and "got 'xxx" in said and len(said) < 400
