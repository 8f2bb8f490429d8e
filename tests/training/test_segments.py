"""Figures for whom and of what, on answers whose figures are known."""

from __future__ import annotations

import numpy as np
import pytest

from espalier.errors import InvalidConfig
from espalier.search import NO_ITEM
from training.compare.segments import segments_of
from training.data.splits import EvaluationPair
from training.retrieval.task import MOST_M, Metric


def pair(user: int, length: int, relevant: list[int]) -> EvaluationPair:
    return EvaluationPair(user, np.zeros(length, np.int64), np.array(relevant))


def test_figures_by_length_of_the_history_and_by_popularity() -> None:
    """Three queries, of which the longest history is answered wrongly; item 0 is everybody's, items 4 and 5 nobody's but one's."""
    users_I = np.array([90, 20, 20, 3, 1, 1, 0, 0])
    pairs = [pair(0, 1, [0, 4]), pair(1, 5, [0, 1]), pair(2, 9, [5])]
    found_BM = np.array([[0, 4, 7], [0, 3, 6], [0, 1, NO_ITEM]])
    found = segments_of(found_BM, pairs, Metric("recall", 2), users_I)
    assert [(part["of"], part["queries"], part["mean"]) for part in found["users"]] == [
        ("a history of 1", 1, 1.0), ("a history of 5", 1, 0.5), ("a history of 9", 1, 0.0),
    ]  # fmt: skip
    assert [(part["of"], part["queries"], part["mean"]) for part in found["items"]] == [
        ("items of 1 training user", 2, 0.5), ("items of 20 training users", 1, 0.0), ("items of 90 training users", 2, 1.0),
    ]  # fmt: skip
    assert found["coverage"] == 4 / 8  # of the first two answers each: 0, 4, 3, 1
    assert found["popularity"] == pytest.approx(((90 + 1 + 90 + 3 + 90 + 20) / 6) / ((90 + 1 + 90 + 20 + 1) / 5))


def test_items_of_vectors_have_training_vectors() -> None:
    found = segments_of(np.array([[0], [1]]), [pair(0, 0, [0]), pair(1, 0, [1])], Metric("recall", 1), np.array([1, 4]))
    assert [part["of"] for part in found["items"]] == ["items of 1 training vector", "items of 4 training vectors"]


def test_where_all_are_alike_there_are_no_segments() -> None:
    found = segments_of(np.array([[0], [1]]), [pair(0, 3, [0]), pair(1, 3, [0])], Metric("recall", 1), np.array([4, 4]))
    assert (found["users"], found["items"], found["coverage"], found["popularity"]) == ([], [], 1.0, 1.0)
    nobodys = segments_of(np.array([[NO_ITEM]]), [pair(0, 3, [0])], Metric("recall", 1), np.array([0, 0]))
    assert (nobodys["coverage"], nobodys["popularity"]) == (0, None)


def test_metrics_by_name() -> None:
    found_BM, pairs = np.array([[3, 1, 2], [4, 5, 6], [7, 8, 0]]), [pair(0, 1, [1, 9]), pair(1, 1, [0]), pair(2, 1, [7])]
    expected = {"recall@2": [0.5, 0, 1], "hr@2": [1, 0, 1], "mrr@2": [0.5, 0, 1], "mrr@1": [0, 0, 1], "hr@1": [0, 0, 1]}
    assert {name: Metric.named("--metrics", name).of(found_BM, pairs).tolist() for name in expected} == expected


@pytest.mark.parametrize(
    "text", ["", "recall", "recall@", "recall@0", "recall@-1", f"recall@{MOST_M + 1}", "map@10", "hr@1.5", "recall @5"]
)
def test_what_is_no_metric_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="--metrics"):
        Metric.named("--metrics", text)
