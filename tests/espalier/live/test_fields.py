"""Fields of live items are kept as their columns would keep them, and what a column cannot keep is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from espalier.errors import InvalidInput
from espalier.items import ItemTable
from espalier.live.fields import Columns


@pytest.fixture
def columns() -> Columns:
    return Columns(
        ItemTable.build(
            pa.table(
                {
                    "id": ["a"],
                    "title": ["A"],
                    "price": pa.array([1.5], pa.float32()),
                    "year": pa.array([1990], pa.int16()),
                    "sold": [True],
                    "tags": [["x"]],
                }
            )
        )
    )


def test_values_are_those_of_the_columns_and_nulls_are_left_out(columns: Columns) -> None:
    given = {"title": "B", "price": 0.1, "year": 2026, "sold": False, "tags": ["y", "z"]}
    assert columns.typed(given) == given | {"price": float(np.float32(0.1))}
    assert columns.typed({"title": None, "price": 3}) == {"price": 3.0}
    assert columns.typed({}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("colour", "red"),
        ("id", "b"),
        ("title", 5),
        ("title", ["B"]),
        ("price", "5"),
        ("price", True),
        ("price", 1e39),
        ("year", 1.5),
        ("year", True),
        ("year", 1 << 20),
        ("sold", 1),
        ("tags", "x"),
        ("tags", [1]),
    ],
)
def test_what_a_column_cannot_keep_is_refused_by_name(columns: Columns, name: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=f"fields.{name}"):
        columns.typed({name: value})
    assert columns.fitting({name: value, "title": "B"} if name != "title" else {name: value, "sold": True}) in (
        {"title": "B"},
        {"sold": True},
    )
