"""Queries become arrays: the newest known items on the right, padding in front, and errors that name the field."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from pydantic import ValidationError

from espalier.errors import InvalidQuery
from espalier.items import ItemTable
from espalier.queries import (
    PADDING,
    FeaturesKind,
    HistoryKind,
    QueryBatch,
    TextKind,
    VectorKind,
    encode_histories,
    encode_vectors,
    pad_histories,
)
from espalier.text.blocks import TextBlock
from espalier.text.sparse_rows import MAX_FEATURES

IDS = ["apple", "pear", "né", "梨"]


@given(st.lists(st.lists(st.integers(-1, 9), max_size=9), max_size=5), st.integers(1, 6))
def test_a_history_keeps_its_last_known_items_at_the_right(histories: list[list[int]], length: int) -> None:
    kind = HistoryKind(length=length)
    batch = pad_histories(kind, [np.array(history, np.int64) for history in histories])
    assert batch.kind == kind
    expected = []
    for history in histories:
        last = [item for item in history if item >= 0][-length:]
        expected.append([PADDING] * (length - len(last)) + last)
    assert batch.array.tolist() == expected
    assert batch.array.shape == (len(histories), length)
    assert batch.array.dtype == np.int64
    assert len(batch) == len(histories)


@given(st.lists(st.lists(st.sampled_from([*IDS, "unknown", ""]), max_size=6), max_size=4))
def test_unknown_ids_are_skipped_and_reported_as_minus_one(histories: list[list[str]]) -> None:
    table = ItemTable.build(pa.table({"id": IDS}))
    batch, rows = encode_histories(HistoryKind(length=3), table, histories)
    assert [row.tolist() for row in rows] == [[IDS.index(name) if name in IDS else -1 for name in history] for history in histories]
    assert_array_equal(batch.array, pad_histories(HistoryKind(length=3), rows).array)


def test_vectors_become_32_bit_rows() -> None:
    batch = encode_vectors(VectorKind(width=2), [[1, 2.5], [-3.0, 1e-3]])
    assert batch.array.dtype == np.float32
    assert_array_equal(batch.array, np.array([[1, 2.5], [-3, 1e-3]], np.float32))
    assert encode_vectors(VectorKind(width=2), []).array.shape == (0, 2)


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ([1.0], r"queries\[1\].vector: got '1 numbers', expected 2 numbers"),
        ([1.0, 2.0, 3.0], r"queries\[1\].vector: got '3 numbers', expected 2 numbers"),
        ([0.0, float("nan")], r"queries\[1\].vector: got nan, expected finite 32-bit numbers"),
        ([float("-inf"), 0.0], r"queries\[1\].vector: got -inf, expected finite"),
        ([0.0, 1e39], r"queries\[1\].vector: got 1e\+39, expected finite"),
        ([0.0, -1e39], r"queries\[1\].vector: got -1e\+39, expected finite"),
    ],
)
def test_a_bad_vector_is_named_with_its_place_and_value(vector: list[float], message: str) -> None:
    with pytest.raises(InvalidQuery, match=message) as caught:
        encode_vectors(VectorKind(width=2), [[0.0, 0.0], vector])
    assert caught.value.field == "queries[1].vector"


def test_the_largest_32_bit_numbers_are_no_error() -> None:
    largest = float(np.finfo(np.float32).max)
    assert_array_equal(encode_vectors(VectorKind(width=2), [[largest, -largest]]).array, np.array([[largest, -largest]], np.float32))


@pytest.mark.parametrize(
    ("kind", "array", "expected"),
    [
        (HistoryKind(length=3), np.zeros((2, 4), np.int64), r"got 'int64\[2, 4\]', expected int64\[B, 3\]"),
        (HistoryKind(length=3), np.zeros((2, 3), np.int32), r"got 'int32\[2, 3\]', expected int64\[B, 3\]"),
        (HistoryKind(length=3), np.zeros(3, np.int64), r"got 'int64\[3\]', expected int64\[B, 3\]"),
        (VectorKind(width=3), np.zeros((2, 3)), r"got 'float64\[2, 3\]', expected float32\[B, 3\]"),
        (VectorKind(width=3), np.zeros((2, 2), np.float32), r"got 'float32\[2, 2\]', expected float32\[B, 3\]"),
    ],
)
def test_an_array_of_another_form_is_no_batch(kind: HistoryKind | VectorKind, array: np.ndarray, expected: str) -> None:
    with pytest.raises(InvalidQuery, match=f"queries: {expected}"):
        QueryBatch(kind, array)


def test_features_are_at_most_so_many_that_an_array_of_them_fits_into_memory() -> None:
    assert FeaturesKind(width=MAX_FEATURES).width == 67_108_864
    with pytest.raises(ValidationError, match="less than or equal to 67108864"):
        FeaturesKind(width=MAX_FEATURES + 1)
    block = TextBlock(unit="word", n=1, unknown=MAX_FEATURES)
    assert TextKind(width=MAX_FEATURES, blocks=(block,)).width == MAX_FEATURES
    with pytest.raises(ValidationError, match="less than or equal to 67108864"):
        TextKind(width=MAX_FEATURES + 1, blocks=(block,))
    with pytest.raises(ValidationError, match="less than or equal to 67108864"):
        TextBlock(unit="word", n=1, unknown=MAX_FEATURES + 1)


def test_taking_some_queries_keeps_their_order() -> None:
    batch = pad_histories(HistoryKind(length=1), [np.array([i]) for i in range(4)])
    assert batch.take(np.array([2, 0])).array.tolist() == [[2], [0]]
