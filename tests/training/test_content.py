"""Neighbours by content, against scikit-learn's vectors and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.testing import assert_allclose

from espalier.errors import InvalidData
from espalier.items import ItemTable
from tests.training.logs import log_of
from tests.training.tasks import task_of
from training.baselines import content as module
from training.baselines.content import Content, content, item_vectors
from training.neighbours.fit import fading


def table(**columns: Any) -> ItemTable:
    count = len(next(iter(columns.values())))
    return ItemTable.build(pa.table({"id": [f"i{row}" for row in range(count)], **columns}))


def test_items_are_alike_by_the_words_and_attributes_that_they_share() -> None:
    vectors = item_vectors(
        table(
            title=["Red shoe, red", "blue SHOE", "green hat", None, "unique"],
            tags=[["x", "y"], None, ["x"], ["shoe", None], []],
            price=[1.0, 1.0, 1.0, 1.0, 1.0],
        )
    ).toarray()
    assert vectors.shape == (5, 2)  # `shoe` and `tags=x`: all others are one item's
    likeness = vectors @ vectors.T
    assert_allclose(likeness[[0, 1, 2], [0, 1, 2]], 1, rtol=1e-6)
    assert likeness[0, 1] > 0 < likeness[0, 2]
    assert likeness[1, 2] == 0
    assert not vectors[3:].any()  # an attribute `shoe` is not the word


def test_rarer_words_weigh_more() -> None:
    vectors = item_vectors(table(title=["common rare", "common", "common", "common", "rare"])).toarray()
    likeness = vectors @ vectors.T
    assert likeness[0, 4] > likeness[0, 1] > 0


def test_answers_are_those_of_the_formula() -> None:
    vectors = item_vectors(table(title=["a b", "a c", "b c", "c", "d d", "d", "e", "a"]))
    fitted = Content(vectors, vectors.T.tocsr(), fading(0.5, 2), np.arange(8))
    history = np.array([4, 0, -1, 3])
    dense = vectors.toarray()
    expected = dense @ (dense[3] + 0.5 * dense[0])
    score = fitted.scores([history[history >= 0]])[0]
    assert_allclose(np.nan_to_num(score), expected, rtol=1e-6)
    order = [row for row in np.argsort(-expected, kind="stable").tolist() if expected[row] > 0]
    assert fitted.rank([history], 8, exclude_seen=False)[0].tolist() == [*order, *(row for row in range(8) if row not in order)]
    assert not set(fitted.rank([history], 8, exclude_seen=True)[0].tolist()) & {0, 3, 4}
    assert fitted.rank([np.array([6])], 3, exclude_seen=True).tolist() == [[0, 1, 2]]  # nothing like it: popular ones


def test_an_item_without_events_comes_back() -> None:
    # Item 9 is in no list, but shares its word with items 0 … 4.
    items = table(title=["rock"] * 5 + ["jazz"] * 4 + ["rock"])
    task = replace(task_of(log_of([[0, 1], [1, 2], [2, 3, 4, 0], [5, 6], [6, 7, 8, 5]], items=10), [0, 1, 3], [2, 4], m=5), items=items)
    fitted = content(task)
    assert 9 in fitted.rank([np.array([0, 1])], 4, exclude_seen=True)[0].tolist()
    assert task.measured(fitted.rank, task.validation_pairs()) == max(trial.figure for trial in fitted.trials) == 1
    assert fitted.bytes > 0
    assert content(task).options == fitted.options


def test_lists_without_an_order_have_no_recency() -> None:
    task = task_of(log_of([[0, 1], [1, 2], [2, 0]], order="none"), [0], [1, 2])
    assert content(replace(task, items=table(title=["a", "a", "a"]))).options == {"recency": 1.0}


@pytest.mark.parametrize("columns", [{}, {"price": [1.0, 2.0, 3.0]}, {"title": ["one", "two", None]}])
def test_a_table_without_content_is_refused(columns: dict[str, Any]) -> None:
    items = ItemTable.build(pa.table({"id": ["a", "b", "c"], **columns}))
    with pytest.raises(InvalidData, match=r"items: got .*, expected a column beside id with texts"):
        content(replace(task_of(log_of([[0, 1], [1, 2], [2, 0]]), [0], [1, 2]), items=items))


def test_of_very_many_words_an_items_first_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ENTRIES", 7)
    assert item_vectors(table(title=["a b c", "a b c", "a b c"])).shape == (3, 2)
