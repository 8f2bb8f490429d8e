"""Which columns of an item table become features."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from espalier.errors import InvalidConfig
from espalier.items import ItemTable
from training.data import item_content as module
from training.data.item_content import item_content
from training.specification.content import ContentConfig


def table(**columns: Any) -> ItemTable:
    count = len(next(iter(columns.values()), []))
    return ItemTable.build(pa.table({"id": [f"i{row}" for row in range(count or 3)], **columns}))


def names(items: ItemTable, **config: Any) -> list[str]:
    content = item_content(items, ContentConfig(**({"columns": "auto"} | config)))
    return [] if content is None else [column.name for column in content.info.columns]


def test_auto_takes_what_it_can_use() -> None:
    items = table(
        title=["a", "a", "b"],
        tags=[["x"], ["x"], None],
        year=[1, 2, None],
        same=[4, 4, 4],
        when=pa.array([0, 1, 2], pa.timestamp("s")),
        counts=[[1], [2], []],
        infinite=[np.inf, 1.0, 2.0],
    )
    assert names(items) == ["title", "tags", "year", "infinite"]
    assert names(items, columns=("year",)) == ["year"]
    assert names(items, columns=()) == []


def test_nothing_shared_is_no_content() -> None:
    assert names(table()) == []
    assert names(table(title=["a", "b", "c"])) == []


def test_whole_numbers_that_no_float_holds_are_rounded() -> None:
    """Such as times in nanoseconds."""
    content = item_content(table(when=[2**60 + 1, 2**60 + 2**40, 2**60 + 2**41]), ContentConfig(columns="auto"))
    assert content is not None
    assert content.rows.values.reshape(3, 2)[:, 1].tolist() == pytest.approx([-1.2247, 0, 1.2247], abs=1e-3)


@pytest.mark.parametrize("column", ["id", "nothing", "when"])
def test_a_column_that_cannot_be_used_is_named(column: str) -> None:
    items = table(title=["a", "a", "b"], when=pa.array([0, 1, 2], pa.timestamp("s")))
    with pytest.raises(InvalidConfig, match=rf"content\.columns: got '{column}'"):
        item_content(items, ContentConfig(columns=(column,)))


def test_features_have_a_limit_values_before_words() -> None:
    items = table(tags=[[f"t{i % 20}" for i in range(row, row + 9)] for row in range(60)], title=["one two three four five six"] * 60)
    small, large = (item_content(items, ContentConfig(columns="auto", features=features)) for features in (16, 64))
    assert small is not None
    assert large is not None
    assert (small.info.features, small.info.values, small.info.blocks) == (16, 15, ())
    assert large.info.values == 21  # twenty tags, and the title as a whole
    assert (large.rows.width, small.rows.width) == (large.info.features, 16)


def test_blocks_of_items_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    items = table(title=[f"w{row % 7} v{row % 3}" for row in range(50)], price=[float(row) for row in range(50)])
    whole = item_content(items, ContentConfig(columns="auto"))
    monkeypatch.setattr(module, "BLOCK", 3)
    parts = item_content(items, ContentConfig(columns="auto"))
    assert whole is not None
    assert parts is not None
    for name in ("indptr", "indices", "values"):
        np.testing.assert_array_equal(getattr(whole.rows, name), getattr(parts.rows, name))
