"""The best items of score rows, and what fills up short answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from espalier.errors import InvalidConfig
from training.retrieval import scores as module
from training.retrieval.scores import best_of_all, by_popularity, empty_rows, filled, keep_best

Int64 = NDArray[np.int64]


@given(
    scores=st.lists(st.sampled_from([-1.5, 0.0, 1.0, 2.0, 2.5, -np.inf, np.nan]), max_size=30),
    most=st.integers(1, 35),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_best_are_those_of_a_full_sort_ties_by_the_lower_row(scores: list[float], most: int, seed: int) -> None:
    items = np.random.default_rng(seed).permutation(len(scores) + 5)[: len(scores)]
    kept, kept_scores = np.full(most, -7), np.empty(most)
    count = keep_best(items, np.array(scores), len(scores), kept, kept_scores)
    expected = sorted((-score, item) for item, score in zip(items.tolist(), scores, strict=True) if score > -np.inf)[:most]
    assert [(-score, item) for item, score in zip(kept[:count].tolist(), kept_scores[:count].tolist(), strict=True)] == expected
    assert (kept[count:] == -7).all()


@given(block=st.integers(1, 7), most_scores=st.integers(1, 40))
def test_whole_rows_are_ranked_in_blocks_of_any_size(block: int, most_scores: int) -> None:
    score_BI = np.random.default_rng(1).normal(size=(6, 9)).astype(np.float32)
    score_BI[:, 4] = -np.inf
    histories = [np.array([b, -1, b + 3]) for b in range(6)]
    sizes = []

    def scores(part: Sequence[Int64]) -> NDArray[np.float32]:
        sizes.append(len(part))
        return score_BI[[history[0] for history in part]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        patch.setattr(module, "BLOCK_SCORES", most_scores)
        found = best_of_all(scores, 9, histories, 8, exclude_seen=True)
    assert max(sizes) <= max(1, min(block, most_scores // 9))
    for b, history in enumerate(histories):
        unseen = [item for item in np.argsort(-score_BI[b]).tolist() if item not in history and item != 4]
        assert found[b].tolist() == unseen + [-1] * (8 - len(unseen))


def test_popular_items_follow_what_was_found() -> None:
    rows = np.array([[3, -1, -1], [-1, -1, -1], [1, 0, 2]])
    histories = [np.array([1, 1]), np.array([], np.int64), np.array([3])]
    popular = by_popularity(np.array([5, 9, 9, 0]))
    assert popular.tolist() == [1, 2, 0, 3]
    assert filled(rows.copy(), histories, popular, exclude_seen=True).tolist() == [[3, 2, 0], [1, 2, 0], [1, 0, 2]]
    assert filled(rows.copy(), histories, popular, exclude_seen=False).tolist() == [[3, 1, 2], [1, 2, 0], [1, 0, 2]]


def test_an_answer_has_at_least_one_place() -> None:
    with pytest.raises(InvalidConfig, match="m: got 0"):
        empty_rows(2, 0)
