"""`python -m training options`: the keys as the models that check them say; no number of any is infinite or NaN."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from tests.training.commands import command
from training.specification.models import SPECIFICATION
from training.specification.options import as_markdown, as_text, kinds, options, section_of
from training.specification.sections import sections_in

MODELS = ["otm-robust", "otm-sequence", "otm", "otm-no-bs", "otm-no-optest", "tdm", "plt", "hsm", "xr-linear", "xreg"]
ROOT = Path(__file__).parents[2]


def test_all_kinds_are_listed_with_a_line_and_another_is_refused() -> None:
    assert list(kinds()) == [*MODELS, "highway", "linear"]
    listed = command("options")
    assert listed.status == 0
    for kind in kinds():
        assert re.search(rf"^  {kind} +\w.*\.$", listed.out, re.MULTILINE), kind
        assert all(option.meaning and option.type for option in options(section_of(kind)))
    refused = command("options", "tmd")
    assert refused.status == 1
    assert "KIND: got 'tmd', expected one of otm-robust, otm" in refused.err


def test_keys_are_printed_with_type_default_and_meaning() -> None:
    out = command("options", "otm-robust").out
    assert "\nobjective.random_nodes = 50\n    integer, at least 1. random nodes" in out
    assert "\nscorer.node_dim = 128 (product)\n" in out
    assert "\nscorer.node_dim = 24 (mlp, attention)\n" in out
    assert "\ndata.log = required\n    path." in out
    assert "level_decay" not in as_text("otm")
    assert "\nobjective.random_nodes = 0\n" in as_text("otm")


@pytest.mark.parametrize("kind", MODELS)
def test_the_keys_of_a_kind_are_those_of_its_configuration_with_their_defaults(kind: str) -> None:
    data = {"format": "xmc", "train": "train.txt"} if kind in ("xr-linear", "xreg") else {"log": "log.csv"}
    plain = leaves(SPECIFICATION.checked({"kind": kind, "name": "any", "data": data}).model_dump(mode="json"))
    listed: dict[str, list[Any]] = {}
    for option in options(section_of(kind)):
        listed.setdefault(option.name, []).append(None if option.default is None else json.loads(option.default))
    required = {"kind", "name", "data.log", "data.train", "data.format", "text"}
    assert {name for name, value in plain.items() if value not in listed.get(name, ["no such key"])} <= required


def leaves(raw: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in raw.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def test_the_page_of_options_is_this_commands_output() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert page == as_markdown(), "python -m training options --markdown > docs/options.md"
    assert command("options", "--markdown").out == page
    for kind in kinds():
        for option in options(section_of(kind)):
            assert f"`{option.name}`" in page or option.name == "kind"


# -- numbers are finite -------------------------------------------------------------------------------------------------


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
