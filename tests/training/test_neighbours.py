"""The search over options on figures that are written down; item neighbours against the formula on dense matrices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.optimize import nnls
from scipy.sparse import csr_array

from espalier.arrays import Float32, Float64, Int64
from tests.training.logs import log_of, task_of
from training.baselines import methods
from training.data.splits import EvaluationPair
from training.neighbours import cooccurrence
from training.neighbours import fit as neighbours
from training.neighbours import near_items as near_module
from training.neighbours import slim as slim_module
from training.neighbours.cooccurrence import Counts, Lists, count_pairs, lists_of
from training.neighbours.fit import WIDE, Neighbours, count, fading, neighbours_of
from training.neighbours.near_items import near_items, nearest
from training.neighbours.neighbour_lists import Pairs
from training.neighbours.slim import slim
from training.retrieval import scores as scores_module
from training.retrieval.scores import best_of_all, keep_best
from training.retrieval.task import Deadline, Task, Trial
from training.retrieval.tuning import Option, Options, Remembered, search
from training.specification.log_format import Order
from training.trees.embeddings import item_embeddings

NEVER = Deadline(None)


def test_it_finds_the_top_of_a_hill_and_measures_nothing_twice() -> None:
    grid = [Option("a", (1, 2, 3, 4)), Option("b", (1, 2, 3, 4)), Option("c", ("x", "y", "z"), ordered=False)]
    found = search(lambda o: -2 * (o["a"] - 4) ** 2 - (o["b"] - o["a"]) ** 2 + (o["c"] == "z"), [{"a": 1, "b": 1, "c": "x"}], grid, NEVER)
    assert found.best.options == {"a": 4, "b": 4, "c": "z"}
    tried = [tuple(trial.options.values()) for trial in found.trials]
    assert len(tried) == len(set(tried)) < 4 * 4 * 3
    assert found.ended is None


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
        assert len(remembered.results) <= 2
    assert made == [1, 3, 5, 6]
    assert remembered.has({"a": 3})
    assert not remembered.has({"a": 5})


def test_the_number_of_trials_is_limited() -> None:
    found = search(lambda o: float(o["a"]), [{"a": 1}], [Option("a", (1, 2), add=1)], NEVER, most_trials=5)
    assert [trial.figure for trial in found.trials] == [1, 2, 3, 4, 5]
    assert found.ended == "the search reached its limit; trials: 5"


# -- the best items of rows of scores -----------------------------------------------------------------------------------


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

    def scores(part: Sequence[Int64]) -> Float32:
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


# -- item neighbours ------------------------------------------------------------------------------------------------------


OPTIONS: Options = {
    **{
        "recency": 0.7,
        "back": 0.3,
        "decay": 0.8,
        "near": 0.0,
        "slim": 0.0,
        "l2": 1.0,
        "column": 0.4,
        "row": 0.6,
        "power": 0.9,
        "user": 0.25,
        "shrink": 2.0,
    },
    **{"window": 3, "longest": 4},
}


def some_lists(seed: int, items: int, users: int) -> list[list[int]]:
    """Lists with repeats, some of one event."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, items, rng.integers(1, 9)).tolist() for _ in range(users)]


def fitted_on(lists: list[list[int]], options: Options, items: int | None = None) -> Neighbours:
    """Neighbours by these options, of all users."""
    log, users = log_of(lists, items=items), np.arange(len(lists))
    copied = lists_of(log, users)
    counts = count(copied, options)
    near, regressed = partial(near_items, log, users, seed=1), partial(slim, counts, options["l2"])
    return neighbours_of(counts, near, regressed, copied.events_I, options)


def no_cosines() -> Any:
    raise AssertionError("cosines are made only where they count")


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
        patch.setattr(cooccurrence, "BLOCK_VISITS", block)
        counts = count_pairs(lists_of(log_of(lists, items=9), np.arange(6)), fading(decay, window), user)
    after = by_hand(lists, 9, window, decay, user)
    assert_allclose(dense(counts.offset_I1, counts.item_N, counts.after_N), after, rtol=1e-5)
    assert_allclose(dense(counts.offset_I1, counts.item_N, counts.before_N), after.T, rtol=1e-5)


def test_users_without_events_count_nothing() -> None:
    counts = count_pairs(lists_of(log_of([[1, 2], [], [2, 1]], items=3), np.arange(3)), fading(1.0, 5), 0.5)
    assert_allclose(dense(counts.offset_I1, counts.item_N, counts.after_N), by_hand([[1, 2], [2, 1]], 3, 5, 1.0, 0.5), rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "users", "distinct", "copied", "events"),
    [
        ([[0, 1], [1, 2], [2, 2, 0]], [0, 2], False, [0, 1, -1, 2, 2, 0, -1], [2, 1, 2]),
        ([[4, 0, 1, 1], [2, 0, 2], [3]], [0, 1, 2], False, [0, 1, 1, -1, 2, 0, 2, -1, 3, -1], [2, 2, 2, 1, 0]),
        ([[1, 1, 0], [1, 0, 0]], [0, 1], True, [1, 0, -1, 1, 0, -1], [2, 2]),
    ],
    ids=["only the given users", "of a long list the newest events", "an item once a list"],
)
def test_lists_that_count(
    monkeypatch: pytest.MonkeyPatch, rows: list[list[int]], users: list[int], distinct: bool, copied: list[int], events: list[int]
) -> None:
    monkeypatch.setattr(cooccurrence, "LONGEST", 3)
    lists = lists_of(log_of(rows), np.array(users), distinct)
    assert (lists.item_E.tolist(), lists.events_I.tolist()) == (copied, events)
    assert lists.length_U.sum() + len(users) == len(copied)


def test_beyond_the_limit_of_memory_an_item_keeps_its_likest_neighbours() -> None:
    lists = lists_of(log_of([[0, 1], [0, 1], [0, 1], [0, 2], [2, 0], [3, 0], [4, 0], [0, 4], [0, 4], [0, 4]]), np.arange(10))
    counts = count_pairs(lists, fading(1.0, 5), most_pairs=9)
    assert len(counts.item_N) <= 9
    assert counts.item_N[: counts.offset_I1[1]].tolist() == [4, 1]
    assert np.diff(counts.offset_I1).tolist() == [2, 1, 1, 1, 1]
    popular = lists_of(log_of([[0, 1], [0, 1], [0, 2], [1], [1], [1]]), np.arange(6))
    assert count_pairs(popular, fading(1.0, 5), damping=0.5, most_pairs=3).item_N[0] == 2, "1 / √1 is above 2 / √5"
    assert count_pairs(popular, fading(1.0, 5), damping=0.4, most_pairs=3).item_N[0] == 1


@given(seed=st.integers(0, 2**32 - 1), exclude_seen=st.booleans(), near=st.sampled_from([0.0, 0.4]), weight=st.sampled_from([0.0, 0.5]))
def test_answers_are_those_of_the_formula(seed: int, exclude_seen: bool, near: float, weight: float) -> None:
    lists, items = some_lists(seed, 10, 12), 12
    rng = np.random.default_rng([seed, 1])
    histories = [rng.integers(-1, items, rng.integers(1, 8)) for _ in range(4)]
    fitted = fitted_on(lists, OPTIONS | {"near": near, "slim": weight}, items)
    found = fitted.rank(histories, 6, exclude_seen)

    after = by_hand(lists, items, 3, 0.8, 0.25)
    events = np.maximum(np.bincount(np.concatenate(lists), minlength=items), 1) + 2.0
    similarity = ((after + 0.3 * after.T) / np.outer(events**0.6, events**0.4)) ** 0.9
    has_row = (after + after.T).any(1)
    unit = similarity[has_row].max(1).mean() if has_row.any() else 1.0
    if near and has_row.any():
        cosine = cosines(item_embeddings(log_of(lists, items=items), np.arange(len(lists)), min(items, len(lists)) - 1, seed=1))
        similarity += near * unit * np.maximum(cosine, 0) ** 2
    if weight:
        similarity += weight * unit * dense(*slim(fitted.counts, OPTIONS["l2"]))
    for history, answer in zip(histories, found, strict=True):
        known = history[history >= 0]
        score = sum((0.7**d * similarity[item] for d, item in enumerate(known[::-1][:4])), np.zeros(items))
        if exclude_seen:
            score[known] = -1
        row = answer[answer >= 0]
        assert len(row) == min(6, items - len(set(known.tolist())) if exclude_seen else items)
        assert not exclude_seen or not set(row.tolist()) & set(known.tolist())
        assert_allclose(score[row], np.sort(score)[::-1][: len(row)], rtol=1e-4, atol=1e-9)


def regression(lists: list[list[int]], items: int, user: float, l2: float) -> Float64:
    """w_b[a], by a solver of dense problems, over all items."""
    X = np.zeros((len(lists), items))
    for u, row in enumerate(lists):
        np.add.at(X[u], row, len(row) ** (-user / 2))
    total = np.array([sum(row.count(item) * len(row) ** -user for row in lists) for item in range(items)])
    weights = np.zeros((items, items))
    for b in range(items):
        others = np.flatnonzero((np.arange(items) != b) & (total > 0))
        penalty = np.sqrt(l2 * total[total > 0].mean()) * np.eye(len(others))
        weights[others, b] = nnls(np.vstack([X[:, others], penalty]), np.append(X[:, b], np.zeros(len(others))))[0]
    return weights


@given(seed=st.integers(0, 2**32 - 1), user=st.sampled_from([0.0, 0.7]), l2=st.sampled_from([0.1, 1.0, 10.0]))
def test_an_item_is_regressed_on_the_others(seed: int, user: float, l2: float) -> None:
    lists, items = some_lists(seed, 8, 20), 9
    counts = count(lists_of(log_of(lists, items=items), np.arange(len(lists))), neighbours.WITHOUT_ORDER | {"user": user})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slim_module, "BLOCK", 4)
        found, expected = dense(*slim(counts, l2)), regression(lists, items, user, l2)
    largest = expected.max(1)
    expected /= largest[largest > 0].mean()
    assert_allclose(found, expected, atol=0.05 * expected.max(), rtol=0.05)


def test_what_two_items_say_together_does_not_count_twice() -> None:
    lists = [[0, 1, 2]] * 20 + [[3, 2]] * 20 + [[0, 1]] * 5 + [[3]] * 5
    counts = count(lists_of(log_of(lists), np.arange(len(lists))), neighbours.WITHOUT_ORDER | {"user": 0.0})
    weight = dense(*slim(counts, 0.01))[:, 2]
    assert weight[0] + weight[1] == pytest.approx(weight[3], rel=0.05)


def test_only_the_likest_items_are_regressed_on_and_pairs_may_be_missing() -> None:
    most = slim_module.CANDIDATES
    # An item is in ever fewer lists of item 0. The one that is in most of them is in 5,000 other lists, too.
    lists = [[0, *range(1, 1 + length)] for length in range(1, most + 30)] + [[1]] * 5000
    copied = lists_of(log_of(lists), np.arange(len(lists)))
    weight = dense(*slim(count(copied, neighbours.WITHOUT_ORDER), 1000.0))[:, 0]
    assert weight[1] == 0, "129 / √5129 is below 28 / √28"
    assert (weight[2 : most + 2] > 0).all()
    assert not weight[most + 2 :].any(), "they are in fewer of its lists"
    some = slim(count_pairs(copied, fading(1.0, 2000), most_pairs=5 * len(copied.events_I)), 1.0)
    assert (some.score_N > 0).all()
    assert np.isfinite(some.score_N).all()


def test_rows_of_items_that_occur_with_nearly_all_others_are_searched() -> None:
    """Item 0 occurs with more than LONG others. With a pair of them and it, the regression is that of a log of these three."""
    parts = np.array_split(np.arange(3, slim_module.LONG + 10), 3)
    lists = [[0, *part[::-1].tolist()] for part in parts] + [[0, 1, 2]] * 6 + [[1, 2]] * 3 + [[0, 2]] * 2
    counts = count(lists_of(log_of(lists), np.arange(len(lists))), neighbours.WITHOUT_ORDER | {"user": 0.0})
    gram = np.array([[11, 6], [6, 9]]) + 1e-3 * counts.total_I.mean() * np.eye(2)
    expected = np.linalg.solve(gram, [8, 9])
    weight = csr_array(slim(counts, 1e-3)[::-1])[[0, 1], [2, 2]]
    assert weight[0] / weight[1] == pytest.approx(expected[0] / expected[1], rel=0.05)


def test_a_regression_is_made_anew_where_counts_or_the_penalty_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[float, float]] = []

    def watched(counts: Counts, l2: float) -> Pairs:
        made.append((l2, float(counts.total_I.sum())))
        return slim(counts, l2)

    monkeypatch.setattr(neighbours, "slim", watched)
    monkeypatch.setattr(neighbours, "WITHOUT_ORDER", neighbours.REGRESSED)
    monkeypatch.setattr(neighbours, "GRID_WITHOUT_ORDER", (neighbours.L2, Option("user", (0.0, 0.25, 0.5, 0.75, 1.0))))
    fitted = methods.METHODS["neighbours"](planted_task("none", seed=3))
    tried = [trial.options for trial in fitted.trials if trial.options["slim"]]
    for values in ({options["l2"] for options in tried}, {options["user"] for options in tried}):
        assert len(values) > 1
    assert {l2 for l2, _ in made} == {options["l2"] for options in tried}
    assert len({total for _, total in made}) == len({options["user"] for options in tried})
    source = fitted.source
    assert isinstance(source, Neighbours)
    assert_allclose(source.regressed().score_N, slim(source.counts, fitted.options["l2"]).score_N)


def test_without_events_nothing_is_regressed() -> None:
    none = slim(count(lists_of(log_of([[0], [1]], items=3), np.arange(0)), neighbours.WITHOUT_ORDER), 1.0)
    assert none.offset_I1.tolist() == [0, 0, 0, 0]


def cosines(embeddings_ID: Any) -> Float64:
    """float64[I, I]: −1 of an item with itself, and of one without an embedding."""
    length_I1 = np.linalg.norm(embeddings_ID, axis=1, keepdims=True)
    unit_ID = embeddings_ID / np.where(length_I1 > 0, length_I1, np.nan)
    cosine_II: Float64 = np.nan_to_num((unit_ID @ unit_ID.T).astype(np.float64), nan=-1.0)
    np.fill_diagonal(cosine_II, -1)
    return cosine_II


@pytest.mark.parametrize("most_pairs", [1 << 25, 20 * 300])
def test_the_nearest_items_are_those_with_the_largest_cosines(monkeypatch: pytest.MonkeyPatch, most_pairs: int) -> None:
    monkeypatch.setattr(near_module, "MOST_PAIRS", most_pairs)
    embeddings_ID = np.random.default_rng(3).standard_normal((300, 8)).astype(np.float32)
    embeddings_ID[[5, 17]] = 0
    embeddings_ID[9] = 2 * embeddings_ID[4]
    found = nearest(embeddings_ID, seed=1)
    cosine_II, most = cosines(embeddings_ID), min(near_module.NEAREST, most_pairs // 300)
    for a in range(300):
        row = slice(found.offset_I1[a], found.offset_I1[a + 1])
        expected = np.sort(cosine_II[a][cosine_II[a] > 0])[::-1][:most]
        assert_allclose(found.score_N[row], expected**2, rtol=1e-4, atol=1e-6)
        assert_allclose(cosine_II[a, found.item_N[row]], expected, rtol=1e-4, atol=1e-6)
    assert np.diff(found.offset_I1)[[5, 17]].tolist() == [0, 0]
    assert found.item_N[found.offset_I1[4]] == 9


def test_of_many_items_those_of_a_group_and_of_the_groups_beside_it_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_module, "GROUP", 20)
    monkeypatch.setattr(near_module, "PROBED", 4)
    monkeypatch.setattr(near_module, "NEAREST", 10)
    rng = np.random.default_rng(4)
    embeddings_ID = (rng.standard_normal((30, 16))[rng.integers(30, size=900)] + 0.6 * rng.standard_normal((900, 16))).astype(np.float32)
    embeddings_ID[7] = 0
    exact = nearest(embeddings_ID, seed=1)
    monkeypatch.setattr(near_module, "EXACT", 100)
    found = nearest(embeddings_ID, seed=1)
    rows = [[set(one.item_N[one.offset_I1[a] : one.offset_I1[a + 1]].tolist()) for a in range(900)] for one in (exact, found)]
    kept = [len(ours & theirs) / len(ours) for ours, theirs in zip(*rows, strict=True) if ours]
    assert 0.9 < np.mean(kept) < 1
    assert all(a not in row for a, row in enumerate(rows[1]))
    assert not rows[1][7]
    assert all(np.all(np.diff(found.score_N[found.offset_I1[a] : found.offset_I1[a + 1]]) <= 0) for a in range(900))


def test_of_one_user_nothing_is_near() -> None:
    near = near_items(log_of([[0, 1, 2], [2, 3]]), np.arange(1), seed=1)
    assert len(near.item_N) == 0
    assert near.offset_I1.tolist() == [0] * 5


def test_equal_scores_come_by_the_lower_row_and_popular_items_fill_up() -> None:
    fitted = fitted_on([[2, 1], [2, 0], [3, 4], [4, 3]], {**OPTIONS, "power": 1.0})
    assert fitted.rank([np.array([2])], 5, exclude_seen=True).tolist() == [[0, 1, 3, 4, -1]]
    assert fitted.rank([np.array([], np.int64)], 3, exclude_seen=True).tolist() == [[2, 3, 4]]


def test_without_back_an_item_does_not_lead_to_what_came_before_it() -> None:
    lists = [[0, 1], [0, 2], [3], [3], [3]]
    assert fitted_on(lists, {**OPTIONS, "back": 0.0}).rank([np.array([1])], 1, exclude_seen=True).tolist() == [[3]]
    assert fitted_on(lists, {**OPTIONS, "back": 0.1}).rank([np.array([1])], 1, exclude_seen=True).tolist() == [[0]]
    # Scores of 0 are no scores, however many of them a history has.
    alone = fitted_on(lists, {**OPTIONS, "back": 0.0, "longest": 800})
    assert alone.rank([np.full(500, 1)], 1, exclude_seen=False).tolist() == [[3]]


def test_weights_fade_to_nothing() -> None:
    assert_allclose(fading(0.5, 3), [1, 0.5, 0.25])
    assert len(fading(0.5, 1000)) == 20
    assert fading(1.0, 4).tolist() == [1, 1, 1, 1]


def planted_task(order: Order, seed: int = 1, seconds: float | None = None) -> Task:
    """A walk of a circle of 30 items, with as many popular items in between that say nothing; 150 users train, 50 validate."""
    rng = np.random.default_rng(seed)
    lists = []
    for _ in range(200):
        walk = (rng.integers(30) + np.arange(8)) % 30
        lists.append(np.stack([walk, 30 + rng.integers(0, 3, 8)], axis=1).ravel().tolist())
    return task_of(log_of(lists, order=order), list(range(150)), list(range(150, 200)), m=5, seconds=seconds)


def test_options_are_chosen_by_validation_queries_from_training_users() -> None:
    task = planted_task("file")
    fitted = methods.METHODS["neighbours"](task)
    pairs = task.validation_pairs()
    assert task.measured(fitted.rank, pairs) == max(trial.figure for trial in fitted.trials)
    counts = count(lists_of(task.split.lists, task.split.train), WIDE)
    start = neighbours_of(counts, no_cosines, no_cosines, np.ones(33, np.int64), WIDE)
    assert task.measured(fitted.rank, pairs) > task.measured(start.rank, pairs) + 0.1
    assert task.measured(fitted.rank, pairs) > task.measured(methods.METHODS["item-cf"](task).rank, pairs) + 0.1
    assert task.measured(methods.METHODS["item-cf"](task).rank, pairs) > task.measured(methods.METHODS["popularity"](task).rank, pairs)
    assert not any(trial.options["slim"] for trial in fitted.trials), "lists with an order are not regressed"
    assert fitted.ended is None
    assert fitted.bytes > 0
    again = methods.METHODS["neighbours"](task)
    assert again.options == fitted.options
    assert [trial.figure for trial in again.trials] == [trial.figure for trial in fitted.trials]


def test_lists_without_an_order_start_with_and_without_a_regression_and_have_no_distance_direction_or_recency() -> None:
    fitted = methods.METHODS["neighbours"](planted_task("none", seed=3))
    assert [trial.options for trial in fitted.trials[:2]] == [neighbours.WITHOUT_ORDER, neighbours.REGRESSED]
    assert {trial.options["l2"] for trial in fitted.trials if not trial.options["slim"]} == {10.0}, "a penalty of nothing"
    for trial in fitted.trials:
        assert [trial.options[name] for name in ("recency", "back", "decay", "window")] == [1.0, 1.0, 1.0, 2000]
    history = np.array([3, 4, 31, 9])
    assert fitted.rank([history], 9, True).tolist() == fitted.rank([history[::-1]], 9, True).tolist()


def test_a_deadline_that_is_over_gives_the_first_start() -> None:
    fitted = methods.METHODS["neighbours"](planted_task("file", seconds=0.0))
    assert [trial.options for trial in fitted.trials] == [WIDE]
    assert fitted.ended == "the search reached its deadline; trials: 1"


def options_counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is counted from now on: users, window, decay, weight by length."""
    counts: list[tuple[Any, ...]] = []

    def watched(lists: Lists, weight_W: Float64, user_exponent: float) -> Counts:
        counts.append((len(lists.length_U), len(weight_W), weight_W[:2].tolist(), user_exponent))
        return count_pairs(lists, weight_W, user_exponent)

    monkeypatch.setattr(neighbours, "count_pairs", watched)
    return counts


@pytest.mark.parametrize(("order", "seconds"), [("file", 100.0), ("file", 0.0), ("none", None), ("none", 0.0)])
def test_all_training_users_count_and_options_that_weigh_counts_anew_take_none(
    order: Order, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = options_counted(monkeypatch)
    task = planted_task(order, seconds=seconds)
    fitted = methods.METHODS["neighbours"](task)
    assert counts[0][0] == 0, "loads what is compiled"
    assert {users for users, *_ in counts[1:]} == {150}
    best, others = fitted.trials[0], 1
    for trial in fitted.trials:
        others += any(trial.options[name] != best.options[name] for name in neighbours.COUNTED)
        best = max(best, trial, key=lambda trial: trial.figure)
    assert len(counts) - 1 <= others


def test_with_little_time_options_are_tried_that_weigh_the_same_counts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = options_counted(monkeypatch)
    monkeypatch.setattr(neighbours, "COUNTS_LEFT", 1e9)
    fitted = methods.METHODS["neighbours"](planted_task("file", seconds=100.0))
    assert len(counts) == 2
    assert {tuple(trial.options[name] for name in neighbours.COUNTED) for trial in fitted.trials} == {(50, 0.95, 0.0)}
    for name in ("recency", "back", "column", "row", "power", "shrink", "longest"):
        assert len({trial.options[name] for trial in fitted.trials}) > 1, name
    assert fitted.ended == "the search reached its deadline; trials: 1"


@pytest.mark.parametrize(("cost", "is_tried"), [(1e9, False), (0.0, True)])
@pytest.mark.parametrize(("name", "order", "costs"), [("near", "file", "NEAR_COUNTS"), ("slim", "none", "STEP_S")])
def test_what_takes_longer_than_there_is_time_is_not_made(
    name: str, order: Order, costs: str, cost: float, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, costs, cost)
    fitted = methods.METHODS["neighbours"](planted_task(order, seconds=100.0))
    assert any(trial.options[name] for trial in fitted.trials) == is_tried


def test_the_fewest_neighbours_that_find_as_much_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "NEIGHBOUR_LIMITS", (1, 2, 3, 9))
    log = log_of([*[[0, 1]] * 5, [0, 2], [0, 3], [0, 4], [5, 1], [5, 2], [0, 1]], items=6)
    fitted = methods.METHODS["neighbours"](task_of(log, list(range(10)), [10]))
    assert [trial.options["kept"] for trial in fitted.trials if "kept" in trial.options] == [3, 2, 1]  # no item has 9
    assert fitted.options["kept"] == 1
    assert fitted.bytes == 8 * 7 + 8 * 6 + 8 * 6  # where rows begin, one neighbour and its score an item, popularity


def test_neighbours_that_are_needed_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "NEIGHBOUR_LIMITS", (1, 2, 12))
    fitted = methods.METHODS["neighbours"](planted_task("file"))
    assert [trial.options["kept"] for trial in fitted.trials if "kept" in trial.options] == [12]
    assert fitted.options["kept"] is None


@pytest.mark.parametrize(("share", "stays"), [(1.0, True), (0.02, False)])
def test_near_items_stay_where_they_gain_over_a_standard_error(share: float, stays: bool) -> None:
    """Queries of two kinds: of some the second item is found with near items alone."""
    pairs = [EvaluationPair(user, np.array([0]), np.array([1 if user < 100 * share else 2])) for user in range(100)]
    log = log_of([[0, 2]] * 3, items=3)
    task = replace(task_of(log, [0, 1, 2], [0], m=1), exclude_seen=True)

    def fitted(options: Options) -> Any:
        row = [1 if options["near"] else 2]
        return SimpleNamespace(rank=lambda queries, m, exclude_seen: np.array([row if share == 1 else [2]] * len(queries)))

    best = Trial({"near": 0.3, "row": 1.0}, 1.0)
    found = neighbours._without_near(task, pairs, fitted, best)
    assert (found is best) == stays
    assert found.options == {"near": 0.3 if stays else 0.0, "row": 1.0}
    assert neighbours._without_near(task, pairs, fitted, Trial({"near": 0.0}, 0.5)).options == {"near": 0.0}
