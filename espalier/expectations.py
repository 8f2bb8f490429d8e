"""What was expected of a value that pydantic refused, in plain words. Knows pydantic's errors, no fields and no documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def expectation(error: Mapping[str, Any]) -> str:
    """What goes after “expected”, of an error as `ValidationError.errors()` lists it.

    A validator of our own raises ValueError with these words; an “expected” before them is left out.
    """
    kind, about, message = error["type"], error.get("ctx", {}), str(error["msg"])
    match kind:
        case "missing":
            return "a value; it is required"
        case "extra_forbidden":
            return "no such key"
        case "path_type":
            return "a path"
        case "string_pattern_mismatch":
            return f"text of the form {about['pattern']}"
        case "too_short" | "string_too_short":
            return f"at least {_count(about['min_length'], kind)}"
        case "too_long" | "string_too_long":
            return f"at most {_count(about['max_length'], kind)}"
        case "int_parsing_size":
            return "an integer of fewer digits"
        case "string_type":
            value = error.get("input")
            return f'a valid string: "{value}"' if isinstance(value, int | float) and not isinstance(value, bool) else "a valid string"
        case "bool_type" | "bool_parsing":
            return "true or false"
        case "int_parsing" | "float_parsing" | "int_from_float":
            message = message.partition(",")[0]  # how it was tried is said after it
    return message.removeprefix("Value error, ").removeprefix("expected ").removeprefix("Input should be ")


def _count(number: int, kind: str) -> str:
    """A number of characters, or of values in a list or an object."""
    one, many = ("character", "characters") if kind.startswith("string") else ("value", "values")
    return f"{number} {one if number == 1 else many}"
