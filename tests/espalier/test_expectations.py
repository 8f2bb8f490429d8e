"""What pydantic refused is said in plain words, which go after “expected”."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from espalier.errors import expectation


def _refuse(_: str) -> str:
    raise ValueError("expected a colour")


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int, "many", "a valid integer"),
        (int, 1.5, "a valid integer"),
        (int, "9" * 5000, "an integer of fewer digits"),
        (float, "many", "a valid number"),
        (bool, "perhaps", "true or false"),
        (bool, [], "true or false"),
        (Path, 5, "a path"),
        (Literal["a", "b", "c"], "d", "'a', 'b' or 'c'"),
        (Annotated[int, Field(ge=1)], 0, "greater than or equal to 1"),
        (Annotated[list[int], Field(min_length=1)], [], "at least 1 value"),
        (Annotated[dict[str, int], Field(max_length=0)], {"a": 1}, "at most 0 values"),
        (Annotated[str, Field(min_length=2)], "a", "at least 2 characters"),
        (Annotated[str, Field(max_length=1)], "ab", "at most 1 character"),
        (Annotated[str, Field(pattern="^a+$")], "b", "text of the form ^a+$"),
        (Annotated[str, AfterValidator(_refuse)], "a", "a colour"),
    ],
)
def test_it_is_said_in_plain_words(kind: Any, value: object, expected: str) -> None:
    with pytest.raises(ValidationError) as error:
        TypeAdapter(kind).validate_python(value)
    assert expectation(error.value.errors()[0]) == expected
