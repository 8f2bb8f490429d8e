"""Item neighbours against the formula on dense matrices, and how their options are chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from tests.training.logs import log_of
from tests.training.tasks import task_of
from training.baselines import methods
from training.neighbours import cooccurrence
from training.neighbours import fit as neighbours
from training.neighbours.cooccurrence import counted, lists_of
from training.neighbours.fit import WIDE, Counting, fading, neighbours_of, sample_of
from training.retrieval.tuning import Options
from training.specification.log_format import Order

Float64 = NDArray[np.float64]
OPTIONS: Options = {
    **{"recency": 0.7, "back": 0.3, "decay": 0.8, "column": 0.4, "row": 0.6, "power": 0.9, "user": 0.25, "shrink": 2.0},
    **{"window": 3, "longest": 4},
}


def some_lists(seed: int, items: int, users: int) -> list[list[int]]:
    """Lists with repeats, some of one event."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, items, rng.integers(1, 9)).tolist() for _ in range(users)]


def by_hand(lists: list[list[int]], items: int, window: int, decay: float, user: float) -> Float64:
    """`after` as its definition says."""
    after = np.zeros((items, items))
    for rows in lists:
        for p, a in enumerate(rows):
            for q in range(p + 1, min(p + window, len(rows) - 1) + 1):
                after[a, rows[q]] += len(rows) ** -user * decay ** (q - p - 1)
    return after


def dense(offset_I1: Any, item_N: Any, value_N: Any) -> Float64:
    matrix = np.zeros((len(offset_I1) - 1,) * 2)
    matrix[np.repeat(np.arange(len(matrix)), np.diff(offset_I1)), item_N] = value_N
    return matrix


@given(
    seed=st.integers(0, 2**32 - 1),
    window=st.integers(1, 10),
    decay=st.floats(0.3, 1),
    user=st.sampled_from([0.0, 0.5, 1.0]),
    block=st.integers(1, 100),
)
def test_counts_are_those_of_the_definition_in_blocks_of_any_size(seed: int, window: int, decay: float, user: float, block: int) -> None:
    lists = some_lists(seed, 8, 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cooccurrence, "BLOCK_PAIRS", block)
        counts = counted(lists_of(log_of(lists, items=9), np.arange(6)), fading(decay, window), user)
    after = by_hand(lists, 9, window, decay, user)
    assert_allclose(dense(counts.offset_I1, counts.item_N, counts.after_N), after, rtol=1e-5)
    assert_allclose(dense(counts.offset_I1, counts.item_N, counts.before_N), after.T, rtol=1e-5)


def test_only_the_given_users_are_counted() -> None:
    lists = lists_of(log_of([[0, 1], [1, 2], [2, 2, 0]]), np.array([0, 2]))
    assert lists.events_I.tolist() == [2, 1, 2]
    assert lists.item_E.tolist() == [0, 1, -1, 2, 2, 0, -1]
    counts = counted(lists, fading(1.0, 5))
    assert dense(counts.offset_I1, counts.item_N, counts.after_N).tolist() == [[0, 1, 0], [0, 0, 0], [2, 0, 1]]


def test_beyond_the_limit_of_memory_an_item_keeps_its_most_frequent_neighbours() -> None:
    lists = lists_of(log_of([[0, 1], [0, 1], [0, 1], [0, 2], [2, 0], [3, 0], [4, 0], [0, 4], [0, 4], [0, 4]]), np.arange(10))
    counts = counted(lists, fading(1.0, 5), most_pairs=9)
    assert len(counts.item_N) <= 9
    assert counts.item_N[: counts.offset_I1[1]].tolist() == [4, 1]
    assert np.diff(counts.offset_I1).tolist() == [2, 1, 1, 1, 1]


@given(seed=st.integers(0, 2**32 - 1), exclude_seen=st.booleans())
def test_answers_are_those_of_the_formula(seed: int, exclude_seen: bool) -> None:
    lists, items = some_lists(seed, 10, 12), 12
    rng = np.random.default_rng([seed, 1])
    histories = [rng.integers(-1, items, rng.integers(1, 8)) for _ in range(4)]
    fitted = Counting(lists_of(log_of(lists, items=items), np.arange(12))).fit(OPTIONS)
    found = fitted.rank(histories, 6, exclude_seen)

    after = by_hand(lists, items, 3, 0.8, 0.25)
    events = np.maximum(np.bincount(np.concatenate(lists), minlength=items), 1) + 2.0
    similarity = ((after + 0.3 * after.T) / np.outer(events**0.6, events**0.4)) ** 0.9
    for history, answer in zip(histories, found, strict=True):
        known = history[history >= 0]
        score = sum((0.7**d * similarity[item] for d, item in enumerate(known[::-1][:4])), np.zeros(items))
        if exclude_seen:
            score[known] = -1
        row = answer[answer >= 0]
        assert len(row) == min(6, items - len(set(known.tolist())) if exclude_seen else items)
        assert not exclude_seen or not set(row.tolist()) & set(known.tolist())
        assert_allclose(score[row], np.sort(score)[::-1][: len(row)], rtol=1e-4, atol=1e-9)


def test_equal_scores_come_by_the_lower_row_and_popular_items_fill_up() -> None:
    fitted = Counting(lists_of(log_of([[2, 1], [2, 0], [3, 4], [4, 3]]), np.arange(4))).fit({**OPTIONS, "power": 1.0})
    assert fitted.rank([np.array([2])], 5, exclude_seen=True).tolist() == [[0, 1, 3, 4, -1]]
    assert fitted.rank([np.array([], np.int64)], 3, exclude_seen=True).tolist() == [[2, 3, 4]]


def test_without_back_an_item_does_not_lead_to_what_came_before_it() -> None:
    counting = Counting(lists_of(log_of([[0, 1], [0, 2], [3], [3], [3]]), np.arange(5)))
    assert counting.fit({**OPTIONS, "back": 0.0}).rank([np.array([1])], 1, exclude_seen=True).tolist() == [[3]]
    assert counting.fit({**OPTIONS, "back": 0.1}).rank([np.array([1])], 1, exclude_seen=True).tolist() == [[0]]
    # Scores of 0 are no scores, however many of them a history has.
    assert counting.fit({**OPTIONS, "back": 0.0, "longest": 800}).rank([np.full(500, 1)], 1, exclude_seen=False).tolist() == [[3]]


def test_counts_that_are_kept_are_those_of_the_same_options() -> None:
    lists = lists_of(log_of(some_lists(1, 8, 12), items=8), np.arange(12))
    counting = Counting(lists)
    for change in ({}, {"user": 0.9}, {"window": 2}, {"decay": 0.5}, {"user": 0.9, "decay": 0.5}, {}):
        options = {**OPTIONS, **change}
        found, expected = counting.of(options), Counting(lists).of(options)
        assert found.after_N.tolist() == expected.after_N.tolist()
        assert len(counting.latest) <= 3


def test_weights_fade_to_nothing() -> None:
    assert_allclose(fading(0.5, 3), [1, 0.5, 0.25])
    assert len(fading(0.5, 1000)) == 20
    assert fading(1.0, 4).tolist() == [1, 1, 1, 1]


def planted(seed: int, order: Order) -> Any:
    """A walk of a circle of 30 items, with as many popular items in between that say nothing."""
    rng = np.random.default_rng(seed)
    lists = []
    for _ in range(200):
        walk = (rng.integers(30) + np.arange(8)) % 30
        lists.append(np.stack([walk, 30 + rng.integers(0, 3, 8)], axis=1).ravel().tolist())
    return log_of(lists, order=order)


def test_options_are_chosen_by_validation_queries_from_training_users() -> None:
    task = task_of(planted(1, "file"), list(range(150)), list(range(150, 200)), m=5)
    fitted = methods.METHODS["neighbours"](task)
    pairs = task.validation_pairs()
    assert task.measured(fitted.rank, pairs) == max(trial.figure for trial in fitted.trials)
    start = neighbours_of(Counting(lists_of(task.split.lists, task.split.train)).of(WIDE), np.ones(33, np.int64), WIDE)
    assert task.measured(fitted.rank, pairs) > task.measured(start.rank, pairs) + 0.1
    assert task.measured(fitted.rank, pairs) > task.measured(methods.METHODS["item-cf"](task).rank, pairs) + 0.1
    assert task.measured(methods.METHODS["item-cf"](task).rank, pairs) > task.measured(methods.METHODS["popularity"](task).rank, pairs)
    assert fitted.ended is None
    assert fitted.bytes > 0
    again = methods.METHODS["neighbours"](task)
    assert again.options == fitted.options
    assert [trial.figure for trial in again.trials] == [trial.figure for trial in fitted.trials]


def test_lists_without_an_order_have_no_distance_direction_or_recency() -> None:
    fitted = methods.METHODS["neighbours"](task_of(planted(2, "none"), list(range(150)), list(range(150, 200)), m=5))
    for trial in fitted.trials:
        assert [trial.options[name] for name in ("recency", "back", "decay", "window")] == [1.0, 1.0, 1.0, 2000]
    history = np.array([3, 4, 31, 9])
    assert fitted.rank([history], 9, True).tolist() == fitted.rank([history[::-1]], 9, True).tolist()


def test_a_deadline_that_is_over_gives_the_first_start() -> None:
    fitted = methods.METHODS["neighbours"](task_of(planted(1, "file"), list(range(150)), list(range(150, 200)), seconds=0.0))
    assert [trial.options for trial in fitted.trials] == [WIDE]
    assert fitted.ended == "the search's deadline left out trials, the first after 1"


def test_of_too_much_work_a_seeded_sample_of_users_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of([[0, 1, 2, 3]] * 40)  # 12 visits each, of 16 pairs of items together
    users = np.arange(5, 40)
    assert sample_of(log, users, 50, 12 * 35 + 16 * 16, seed=1) is users
    sample = sample_of(log, users, 50, 12 * 20 + 16 * 16, seed=1)
    assert len(sample) == 20
    assert sample.tolist() == sorted(set(sample.tolist()) & set(users.tolist()))
    assert sample.tolist() != sample_of(log, users, 50, 12 * 20 + 16 * 16, seed=2).tolist()
    assert len(sample_of(log, users, 1, 12 * 20 + 16 * 16, seed=1)) == 35  # 6 visits each within a window of 1
    assert len(sample_of(log, users, 50, 0, seed=1)) == 1
    monkeypatch.setattr(neighbours, "MOST_EVENTS", 40)
    assert len(sample_of(log, users, 50, 1 << 40, seed=1)) == 10


def test_a_sample_is_searched_with_and_all_users_count_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(planted(1, "file"), list(range(150)), list(range(150, 200)), m=5)
    monkeypatch.setattr(neighbours, "TUNING_WORK", 20_000 + 16 * 33**2)
    fitted = methods.METHODS["neighbours"](task)
    options = {name: value for name, value in fitted.options.items() if name != "kept"}
    whole = Counting(lists_of(task.split.lists, task.split.train)).fit(options)
    histories = [pair.history for pair in task.validation_pairs()]
    assert fitted.rank(histories, 10, True).tolist() == whole.rank(histories, 10, True).tolist()
    assert fitted.ended is None
    monkeypatch.setattr(neighbours, "FINAL_WORK", 20_000 + 16 * 33**2)
    assert "of 150 users" in str(methods.METHODS["neighbours"](task).ended)


def test_less_time_means_a_smaller_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    log, users = planted(1, "file"), list(range(150))
    assert neighbours.most_work(task_of(log, users, [150]), 1000, 10) == 1000
    monkeypatch.setattr(neighbours, "LEAST_WORK", 50)
    assert [neighbours.most_work(task_of(log, users, [150], seconds=seconds), 1000, 10) for seconds in (1.0, 20.0, 500.0)] == [
        50,
        200,
        1000,
    ]
    task = task_of(log, users, list(range(150, 200)), m=5, seconds=0.0)
    assert methods.METHODS["neighbours"](task).ended == "learned from 1 of 150 users, a limit of memory and time"


def test_the_fewest_neighbours_that_find_as_much_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "KEPT", (1, 2, 3, 9))
    log = log_of([*[[0, 1]] * 5, [0, 2], [0, 3], [0, 4], [5, 1], [5, 2], [0, 1]], items=6)
    fitted = methods.METHODS["neighbours"](task_of(log, list(range(10)), [10]))
    assert [trial.options["kept"] for trial in fitted.trials if "kept" in trial.options] == [3, 2, 1]  # no item has 9
    assert fitted.options["kept"] == 1
    assert fitted.bytes == 8 * 7 + 8 * 6 + 8 * 6  # where rows begin, one neighbour and its score an item, popularity


def test_neighbours_that_are_needed_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "KEPT", (1, 2, 12))
    fitted = methods.METHODS["neighbours"](task_of(planted(1, "file"), list(range(150)), list(range(150, 200)), m=5))
    assert [trial.options["kept"] for trial in fitted.trials if "kept" in trial.options] == [12]
    assert fitted.options["kept"] is None
