"""Fields of items become the features that training made of them, and nothing else is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.testing import assert_allclose

from espalier.arrays import Array, Float32
from espalier.content.features import ContentFeatures, value_hash
from espalier.content_info import ContentColumn, ContentInfo
from espalier.errors import BundleCorrupt, InvalidConfig, InvalidQuery
from espalier.items import ItemTable
from training.data.item_content import ItemContent, item_content
from training.specification.deep import ContentConfig

ITEMS: list[dict[str, Any]] = [
    {"title": "red shoe", "kind": ["shoe", "sale"], "price": 10.0, "brand": "acme"},
    {"title": "Blue shoe!", "kind": ["shoe", None], "price": 20.0, "brand": "acme"},
    {"title": "red hat", "kind": None, "price": 30.0, "brand": "other"},
    {"title": None, "kind": [], "price": None, "brand": None},
    {"title": "hat", "kind": ["sale"], "price": 20.0, "brand": "single"},
]


def content_of(items: list[dict[str, Any]] = ITEMS, **config: Any) -> ItemContent:
    table = pa.Table.from_pylist([{"id": f"i{i}"} | item for i, item in enumerate(items)])
    content = item_content(ItemTable.build(table), ContentConfig(columns="auto", **config))
    assert content is not None
    return content


def dense(content: ItemContent, fields: list[dict[str, Any]]) -> Float32:
    rows = ContentFeatures(content.info, content.arrays).of(fields)
    rows.check()
    out = np.zeros((len(rows), rows.width), np.float32)
    for i in range(len(rows)):
        indices, values = rows.row(i)
        out[i, indices] = values
    return out


def test_an_item_has_what_it_shares_with_others() -> None:
    content = content_of()
    rows = dense(content, ITEMS)
    # Of values: shoe, sale and acme; of words: red, shoe, hat and acme. All others are one item's.
    assert content.info.features == rows.shape[1] == 1 + 1 + 3 + 4
    assert_allclose(rows[:, 0], 1)
    assert_allclose(rows[:, 1], (np.array([10, 20, 30, 20, 20]) - 20) / np.sqrt(50), rtol=1e-6)
    assert_allclose(np.linalg.norm(rows[:, 2:5], axis=1), [1, 1, 0, 0, 1], rtol=1e-6)
    assert_allclose(np.linalg.norm(rows[:, 5:], axis=1), [1, 1, 1, 0, 1], rtol=1e-6)
    assert np.count_nonzero(dense(content, [{"brand": "acme"}])[0, 2:5]) == 1  # a string's whole value, besides its words
    likeness = rows[:, 2:] @ rows[:, 2:].T
    assert likeness[0, 1] > likeness[0, 2] > 0 == likeness[1, 2]


def test_a_later_item_has_the_features_of_a_trained_one_with_its_fields() -> None:
    content = content_of()
    for item, row in zip(ITEMS, dense(content, ITEMS), strict=True):
        assert_allclose(dense(content, [item])[0], row, rtol=0)
    unknown = dense(content, [{"title": "zebra", "kind": ["new"], "brand": "new", "weight": 3}, {}])
    assert (unknown[:, 0] == 1).all()
    assert not unknown[:, 1:].any()


def test_a_value_of_all_items_says_nothing_of_one() -> None:
    items = [{"currency": "EUR", "tags": ["all", f"t{i % 2}"] if i else ["all"]} for i in range(9)]
    content = content_of(items)
    assert content.known_I.tolist() == [False] + [True] * 8
    features = ContentFeatures(content.info, content.arrays)
    assert [features.knows(fields) for fields in (items[1], items[0], {"currency": "EUR"})] == [True, False, False]


def test_a_value_of_one_column_is_none_of_another() -> None:
    content = content_of([{"a": "x", "b": "y"}] * 3 + [{"a": "z", "b": "x"}] * 3 + [{"a": "v", "b": "w"}] * 2)
    one, other = dense(content, [{"a": "x"}, {"b": "x"}])
    shared = (one != 0) & (other != 0)
    assert shared.sum() == 2  # what every item has, and the word
    assert value_hash("a", "x") != value_hash("b", "x")


def test_a_number_far_away_counts_as_three_scales() -> None:
    content = content_of()
    assert dense(content, [{"price": 1e300}, {"price": -1e300}])[:, 1].tolist() == [3, -3]


def test_a_number_that_is_none_or_infinite_counts_as_missing() -> None:
    content = content_of()
    assert dense(content, [{"price": float(number)} for number in ("nan", "inf", "-inf")])[:, 1].tolist() == [0, 0, 0]
    features = ContentFeatures(content.info, content.arrays)
    assert [features.knows({"price": price}) for price in (20.0, float("inf"))] == [True, False]


def test_numbers_of_any_size_have_a_scale_and_equal_ones_say_nothing() -> None:
    numbers = [{"far": 1e300 * (i % 3 - 1), "equal": 1 / 3, "kind": ["a"]} for i in range(3213)]
    assert np.std(np.full(len(numbers), 1 / 3, np.longdouble)) > 0
    (far,) = (column for column in content_of(numbers).info.columns if column.kind == "number")
    assert (far.name, far.mean) == ("far", 0.0)
    assert far.scale == pytest.approx(1e300 * (2 / 3) ** 0.5)


def test_a_column_that_is_named_twice_counts_once_and_too_many_are_refused() -> None:
    table = ItemTable.build(pa.Table.from_pylist([{"id": f"i{i}", "title": f"word{i % 2}"} for i in range(4)]))
    content = item_content(table, ContentConfig(columns=("title", "title")))
    assert content is not None
    assert [column.name for column in content.info.columns] == ["title"]
    wide = pa.table({"id": ["a", "b"]} | {f"c{number}": [0.0, 1.0] for number in range(1025)})
    with pytest.raises(InvalidConfig, match=r"content\.columns: got '1,025 columns', expected at most 1,024"):
        item_content(ItemTable.build(wide), ContentConfig(columns="auto"))


def test_of_many_features_the_heaviest_count() -> None:
    content = content_of()
    short = content.info.model_copy(update={"entries": 2})
    rows = ContentFeatures(short, content.arrays).of(ITEMS[:1])
    whole = dense(content, ITEMS[:1])[0]
    kept = np.argsort(-np.abs(whole), kind="stable")[:2]
    assert rows.indices.tolist() == sorted(kept.tolist())


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("title", 3, "a string"),
        ("kind", "shoe", "a list of strings"),
        ("kind", ["shoe", 1], "a list of strings"),
        ("price", "10", "a finite number"),
        pytest.param("price", -(10**400), "a finite number", id="no float holds it"),
    ],
)
def test_a_field_of_another_kind_is_named(field: str, value: object, expected: str) -> None:
    content = content_of()
    with pytest.raises(InvalidQuery, match=rf"items\[1\]\.{field}: .*{expected}"):
        ContentFeatures(content.info, content.arrays).of([{}, {field: value}])


def damaged(arrays: dict[str, Array], name: str, **changes: Any) -> dict[str, Array]:
    array = arrays[name].copy()
    for place, value in changes.items():
        array[int(place.removeprefix("at"))] = value
    return arrays | {name: array}


def test_arrays_that_do_not_fit_are_refused() -> None:
    content = content_of()
    good, info = content.arrays, content.info
    assert len(ContentFeatures(info, good).of(ITEMS)) == 5
    hashes = good["value_hash"]
    bad = [
        damaged(good, "value_hash", at0=hashes[1]),
        damaged(good, "value_weight", at0=np.nan),
        damaged(good, "value_weight", at1=-1),
        damaged(good, "value_weight", at1=1e9),
        good | {"value_hash": hashes.astype(np.int64)},
        good | {"value_weight": good["value_weight"][:-1]},
        good | {"more": hashes},
        {name: array for name, array in good.items() if name != "value_hash"},
        {name: array for name, array in good.items() if name != "text.idf"},
        damaged(good, "text.idf", at0=np.inf),
    ]
    for arrays in bad:
        with pytest.raises(BundleCorrupt):
            ContentFeatures(info, arrays)
    for change in ({"features": info.features + 1}, {"values": info.values + 1}, {"blocks": ()}):
        with pytest.raises(BundleCorrupt):
            ContentFeatures(info.model_copy(update=change), good)


def test_columns_are_checked() -> None:
    for wrong in ({"kind": "number"}, {"kind": "string", "mean": 1.0, "scale": 1.0}, {"kind": "number", "mean": 0.0, "scale": 0.0}):
        with pytest.raises(ValueError, match=r"mean and scale|greater than 0"):
            ContentColumn(name="x", **wrong)
    column = ContentColumn(name="x", kind="string")
    with pytest.raises(ValueError, match="each column once"):
        ContentInfo(columns=(column, column), values=0, features=1, entries=1)
