"""Queries become arrays: the newest known items on the right, padding in front, and errors that name the field, in plain words.

And the example with which the library begins.
"""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

import espalier
from espalier.errors import InvalidQuery, expectation
from espalier.items import ItemTable
from espalier.queries import (
    PADDING,
    FeaturesKind,
    HistoryKind,
    QueryBatch,
    VectorKind,
    encode_features,
    encode_histories,
    encode_vectors,
    pad_histories,
)
from tests import ROOT

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


def test_vectors_become_32_bit_rows_up_to_the_largest_numbers() -> None:
    largest = float(np.finfo(np.float32).max)
    batch = encode_vectors(VectorKind(width=2), [[1, 2.5], [-3.0, 1e-3], [largest, -largest]])
    assert batch.array.dtype == np.float32
    assert_array_equal(batch.array, np.array([[1, 2.5], [-3, 1e-3], [largest, -largest]], np.float32))
    assert batch.take(np.array([2, 0])).array[:, 0].tolist() == [largest, 1]
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


def test_features_are_checked_and_sorted() -> None:
    kind = FeaturesKind(width=5)
    rows = encode_features(kind, [([3, 0], [1.0, 2.0]), ([], [])]).features
    assert (rows.indptr.tolist(), rows.indices.tolist(), rows.values.tolist()) == ([0, 2, 2], [0, 3], [2.0, 1.0])
    unit = encode_features(FeaturesKind(width=5, unit=True), [([3, 0], [3.0, 4.0]), ([], [])]).features
    assert_array_equal(unit.values, np.array([0.8, 0.6], np.float32))
    for indices, values, message in (
        ([1, 2], [1.0], r"queries\[0\].features.values: got '1 numbers', expected 2, one for each index"),
        ([1, 5], [1.0, 1.0], r"queries\[0\].features.indices: got 5, expected feature numbers from 0 to 4"),
        ([-1, 2], [1.0, 1.0], r"queries\[0\].features.indices: got -1, expected feature numbers from 0 to 4"),
        ([1, 10**30], [1.0, 1.0], r"queries\[0\].features.indices: got 1000000000000000000000000000000, expected feature numbers from 0"),
        ([-(10**30), 2], [1.0, 1.0], r"queries\[0\].features.indices: got -1000000000000000000000000000000, expected feature numbers"),
        ([2, 2], [1.0, 1.0], r"queries\[0\].features.indices: got 2, expected each feature number once"),
        ([1, 2], [1.0, 1e39], r"queries\[0\].features.values: got 1e\+39, expected finite 32-bit numbers"),
    ):
        with pytest.raises(InvalidQuery, match=message):
            encode_features(kind, [(indices, values)])


# -- what pydantic refused, in plain words, which go after “expected” ---------------------------------------------------


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


# -- the example --------------------------------------------------------------------------------------------------------


def test_the_example_of_the_library_finds_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert doctest.testmod(espalier, raise_on_error=True) == (0, 4)
