"""The search over options on figures that are written down, and the best items of rows of scores."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from espalier.errors import InvalidConfig
from training.retrieval import scores as scores_module
from training.retrieval.scores import best_of_all, by_popularity, empty_rows, filled, keep_best
from training.retrieval.task import Deadline
from training.retrieval.tuning import Option, Options, Remembered, search

NEVER = Deadline(None)


def test_it_finds_the_top_of_a_hill_and_measures_nothing_twice() -> None:
    grid = [Option("a", (1, 2, 3, 4)), Option("b", (1, 2, 3, 4)), Option("c", ("x", "y", "z"), ordered=False)]
    found = search(lambda o: -2 * (o["a"] - 4) ** 2 - (o["b"] - o["a"]) ** 2 + (o["c"] == "z"), [{"a": 1, "b": 1, "c": "x"}], grid, NEVER)
    assert found.best.options == {"a": 4, "b": 4, "c": "z"}
    tried = [tuple(trial.options.values()) for trial in found.trials]
    assert len(tried) == len(set(tried)) < 4 * 4 * 3
    assert found.ended is None


def test_equal_figures_keep_the_start() -> None:
    start = {"a": 2, "b": "y"}
    found = search(lambda _: 0.5, [start], [Option("a", (1, 2, 3)), Option("b", ("x", "y"), ordered=False)], NEVER)
    assert found.best.options == start
    assert len(found.trials) == 4


@pytest.mark.parametrize(
    ("option", "start", "wanted", "expected"),
    [
        (Option("a", (0.1, 0.2), add=0.1, most=0.5), 0.1, 9.0, 0.5),
        (Option("a", (0.1, 0.2), add=0.1, least=-0.2), 0.2, -9.0, -0.2),
        (Option("a", (10, 20), times=2, most=100), 10, 70.0, 80),
        (Option("a", (10, 20), times=2, least=2), 20, 0.0, 2),
        (Option("a", (1.0, 2.0)), 1.0, 9.0, 2.0),
    ],
)
def test_it_goes_on_beyond_the_grid_by_its_step_within_limits(option: Option, start: float, wanted: float, expected: float) -> None:
    found = search(lambda o: -abs(o["a"] - wanted), [{"a": start}], [option], NEVER)
    assert found.best.options == {"a": expected}
    assert isinstance(found.best.options["a"], type(start))


def test_from_beyond_the_grid_the_way_back_is_the_same() -> None:
    option = Option("a", (1, 2), times=3)
    assert [option.beside(6, direction) for direction in (1, -1)] == [18, 2]
    assert option.beside(18, -1) == 2  # the largest of the grid
    assert option.beside(2, -1) == 1


def test_it_climbs_from_the_best_start() -> None:
    found = search(lambda o: float(o["a"] ** 2), [{"a": 1}, {"a": -2}, {"a": 0}], [Option("a", (-3, -2, -1, 0, 1, 2))], NEVER)
    assert found.best.options == {"a": -3}


def test_a_deadline_ends_it_with_the_best_so_far() -> None:
    now_s = [100.0]

    def slow(options: Options) -> float:
        now_s[0] += 1
        return float(options["a"])

    found = search(slow, [{"a": 1}], [Option("a", (1, 2), add=1)], Deadline(104.5, lambda: now_s[0]))
    assert [trial.options["a"] for trial in found.trials] == [1, 2, 3, 4, 5]
    assert found.best is found.trials[-1]
    assert "deadline" in str(found.ended)
    over = search(slow, [{"a": 1}, {"a": 5}], [Option("a", (1, 2))], Deadline(0, lambda: now_s[0]))
    assert [trial.options for trial in over.trials] == [{"a": 1}]


def test_what_would_take_too_long_is_left_out_and_the_rest_goes_on() -> None:
    grid = [Option("a", (1, 2, 3)), Option("b", (1, 2, 3))]
    found = search(
        lambda o: o["a"] + o["b"], [{"a": 1, "b": 1}], grid, Deadline(time.monotonic() + 50), cost_s=lambda o: 100 * (o["a"] > 2)
    )
    assert found.best.options == {"a": 2, "b": 3}
    assert "deadline" in str(found.ended)


def test_the_best_and_the_latest_of_what_is_costly_are_held() -> None:
    made = []

    def make(options: Options) -> int:
        made.append(options["a"])
        return int(options["a"])

    remembered = Remembered(make, ("a",))
    figure = remembered.watched(lambda options: -abs(remembered.of(options) - 3) + options["b"] / 10)
    for a, b in ((1, 0), (3, 0), (5, 0), (3, 1), (3, 2), (6, 0), (3, 3)):
        assert figure({"a": a, "b": b}) == -abs(a - 3) + b / 10
        assert len(remembered.held) <= 2
    assert made == [1, 3, 5, 6]
    assert remembered.has({"a": 3})
    assert not remembered.has({"a": 5})


def test_the_number_of_trials_is_limited() -> None:
    found = search(lambda o: float(o["a"]), [{"a": 1}], [Option("a", (1, 2), add=1)], NEVER, most_trials=5)
    assert [trial.figure for trial in found.trials] == [1, 2, 3, 4, 5]
    assert found.ended == "the search's limit left out trials, the first after 5"


def test_a_grid_says_what_it_tries_and_is_checked() -> None:
    assert str(Option("a", (1, 2), times=2)) == "a: 1, 2 then ×÷2"
    for values in ((), (2, 1), (1, 1)):
        with pytest.raises(InvalidConfig, match=r"grid\.a"):
            Option("a", values)
    with pytest.raises(InvalidConfig, match=r"start\.a"):
        search(lambda _: 0.0, [{}], [Option("a", (1,))], NEVER)


# -- the best items of rows of scores -----------------------------------------------------------------------------------


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
        patch.setattr(scores_module, "BLOCK", block)
        patch.setattr(scores_module, "BLOCK_SCORES", most_scores)
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
