"""Data frames as tables of Arrow, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from espalier.errors import InvalidInput
from espalier.frames import as_file, as_table
from espalier.logs.log_events import histories


class Pandas(dict[str, "np.ndarray[Any, Any]"]):
    """What is read of a data frame of pandas, which is not installed."""

    __module__ = "pandas"

    @property
    def columns(self) -> list[str]:
        return [*self]


def objects(*values: object) -> np.ndarray[Any, Any]:
    return np.array(values, object)


@pytest.mark.parametrize(
    ("values", "row"), [(objects(7, None, "7", 8), 2), (objects("7", "8", 9), 2), (objects(1, 2, 2**70), 2), (objects(2**70, 1), 0)]
)
def test_ids_of_several_types_are_shown_with_what_makes_them_one(values: np.ndarray[Any, Any], row: int) -> None:
    with pytest.raises(InvalidInput) as raised:
        as_table("data", Pandas(user=objects("a", "b"), item=values))
    assert (raised.value.field, raised.value.value) == (f"data['item'], row {row} (from 0)", values[row])
    assert raised.value.expected.endswith("""; data['item'].astype("string") makes all of them strings""")


def test_other_data_is_refused_with_its_argument(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="data: got 'list', expected a data frame"):
        as_table("data", [1, 2])
    with pytest.raises(InvalidInput, match=r"data: got .*nothing\.csv.*, expected a file that exists"):
        as_table("data", tmp_path / "nothing.csv")


def test_integers_that_pandas_holds_as_floats_are_ids(tmp_path: Path) -> None:
    frame = Pandas(user=np.array([7.0, 8.0, np.nan]), item=objects("a", "b", "c"))
    found = histories(as_file("data", frame, tmp_path), "user", "item")
    assert (found.lists, found.users.to_pylist()) == ({"7": ["a"], "8": ["b"]}, [7, 8])


def test_a_column_that_no_file_can_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"data: got .*'extra'.*, expected columns of types that Parquet can hold"):
        as_file("data", pa.table({"user": ["u"], "item": ["i"], "extra": [{}]}), tmp_path)


def test_a_column_of_polars_that_arrow_cannot_hold_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"^data\['item'\]: got 'Int128', expected columns of types that Parquet can hold"):
        as_table("data", pl.DataFrame({"user": ["u"], "item": [1]}, schema={"user": pl.String, "item": pl.Int128}))
