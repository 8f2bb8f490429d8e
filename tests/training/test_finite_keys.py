"""No number of a configuration is infinite or NaN, whichever key and kind it is."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from espalier.errors import InvalidConfig
from training.specification.models import SPECIFICATION
from training.specification.options import kinds
from training.specification.sections import sections_in


def sections() -> list[type[BaseModel]]:
    """All sections of all kinds, inner ones included, each once."""
    found: dict[type[BaseModel], None] = {}
    waiting = list(kinds().values())
    while waiting:
        section = waiting.pop()
        if section not in found:
            found[section] = None
            waiting += [inner for field in section.model_fields.values() for inner in sections_in(field.annotation)]
    return list(found)


def takes_float(annotation: Any) -> bool:
    return annotation is float or (get_origin(annotation) is not Literal and any(map(takes_float, get_args(annotation))))


def number_keys() -> Iterator[tuple[type[BaseModel], str]]:
    for section in sections():
        for name, field in section.model_fields.items():
            if takes_float(field.annotation):
                yield section, name


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_every_number_has_to_be_finite(value: float) -> None:
    assert {name for _, name in number_keys()} >= {"learning_rate", "init_std", "weight", "dropout", "cost", "gamma", "unseen_items"}
    accepted = []
    for section, name in number_keys():
        try:
            section.model_validate({name: value})
        except ValidationError as error:
            if any(part["loc"][:1] == (name,) for part in error.errors()):
                continue
        accepted.append(f"{section.__name__}.{name}")
    assert accepted == []


@pytest.mark.parametrize(("table", "key"), [("optimiser", "learning_rate"), ("scorer", "init_std")])
def test_the_refusal_names_key_value_and_what_was_expected(table: str, key: str) -> None:
    raw = tomllib.loads(f'kind = "otm-sequence"\nname = "books"\n[data]\nlog = "log.csv"\n[{table}]\n{key} = inf\n')
    with pytest.raises(InvalidConfig) as caught:
        SPECIFICATION.checked(raw)
    assert (caught.value.field, caught.value.value, caught.value.expected) == (f"{table}.{key}", "inf", "a finite number")
