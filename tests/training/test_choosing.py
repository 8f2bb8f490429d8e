"""C and γ of linear scorers are chosen on held-out training points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from training.data.csr import Csr, normalised
from training.data.xmc import LabelledPoints
from training.linear import choosing
from training.linear.choosing import COSTS, GAMMAS, Shape, Trial, choose
from training.linear.label_features import pifa
from training.specification.linear import LinearOptions, LinearTree

SHAPE = Shape(branching=4, max_leaf=4)


def clusters(count: int, noise: float, seed: int = 0) -> LabelledPoints:
    """Points of 40 features around the centres of their labels, of which there are 30."""
    rng = np.random.default_rng(seed)
    centres = rng.random((30, 40)) * (rng.random((30, 40)) < 0.2)
    own = np.array([rng.permutation(30)[:2] for _ in range(count)])
    dense = centres[own].sum(1) + noise * rng.random((count, 40)) * (rng.random((count, 40)) < 0.3)
    labels = np.zeros((count, 30), np.float32)
    np.put_along_axis(labels, own, 1, axis=1)
    return LabelledPoints(normalised(csr_array(dense.astype(np.float32))), csr_array(labels))


def features(points: LabelledPoints) -> tuple[Csr, Csr]:
    rows = pifa(points)
    return rows, rows


def test_a_gamma_with_which_quality_falls_is_not_taken() -> None:
    trial = Trial(1.0, 0.5, np.array([[0.8, 0.5], [0.7, 0.6]]))
    assert trial.quality == pytest.approx((0.7 * 0.5) ** (1 / 2)), "that of the worse beam"
    assert trial.fall == pytest.approx(np.log((0.8 * 0.5) / (0.7 * 0.6)) / 2)
    assert trial.row()["at_wide_beam"] == {"ndcg@5": 0.7, "recall@10": 0.6}
    falls = Trial(1.0, 0.0, np.array([[0.9, 0.9], [0.85, 0.9]]))
    steady = Trial(1.0, 0.7, np.full((2, 2), 0.8))
    assert falls.quality > steady.quality
    assert choosing._best([falls, steady]) is steady
    worse = Trial(1.0, 1.0, np.array([[0.9, 0.9], [0.5, 0.9]]))
    assert choosing._best([worse, falls]) is falls  # where all fall, the one that falls least
    equal = Trial(1.0, 0.85, np.full((2, 2), 0.8))
    assert choosing._best([steady, equal]) is equal  # of equal ones the nearest to probabilities


def test_the_options_are_those_that_find_most() -> None:
    """And what is tried is in the report, the same at every run and with any number of threads."""
    data = clusters(600, 0.8)
    one, two = (choose(data, features, SHAPE, LinearOptions(), 2, threads) for threads in (1, 2))
    assert one == two
    assert one.report is not None
    trials = one.report["trials"]
    assert {trial["gamma"] for trial in trials} == set(GAMMAS)
    costs = list(dict.fromkeys(trial["cost"] for trial in trials))
    assert len(costs) >= 2
    assert set(costs) <= set(COSTS.values)
    chosen = next(trial for trial in trials if (trial["cost"], trial["gamma"]) == (one.options.cost, one.options.gamma))
    steady = [trial["quality"] for trial in trials if falls_by(trial) <= choosing.FALL]
    assert chosen["quality"] == max(steady)
    assert one.report["held_out"] == 600  # each quarter in turn
    assert one.report["beams"] == [2, 10]


def falls_by(trial: dict[str, Any]) -> float:
    names = "ndcg@5", "recall@10"
    return float(np.mean([np.log(trial["at_beam"][name] / trial["at_wide_beam"][name]) for name in names]))


def test_configured_numbers_are_kept_and_without_inner_nodes_there_is_no_gamma_to_try() -> None:
    data, known = clusters(600, 0.8), LinearOptions(cost=2.0, gamma=0.4)
    assert choose(data, features, SHAPE, known, 2).options is known
    only_gamma = choose(data, features, SHAPE, LinearOptions(cost=2.0), 2)
    flat = choose(data, features, Shape(4, 30), LinearOptions(), 2)
    assert only_gamma.options.cost == 2.0
    for found, name, values in ((only_gamma, "cost", {2.0}), (flat, "gamma", {1.0})):
        assert found.report is not None
        assert {trial[name] for trial in found.report["trials"]} == values
    assert choose(data, features, SHAPE, LinearOptions(gamma=0.4), 2).options.gamma == 0.4


def test_too_few_points_that_the_tree_has_not_seen_choose_nothing() -> None:
    data, unseen_B = clusters(600, 0.8), np.zeros(600, np.bool_)
    unseen_B[:199] = True
    none = data.take(np.empty(0, np.int64))
    for some, unseen in ((none, None), (clusters(5, 0.8), None), (clusters(199, 0.8), None), (data, unseen_B)):
        found = choose(some, features, SHAPE, LinearOptions(), 2, unseen_B=unseen)
        assert found.report is None
        assert (found.options.cost, found.options.gamma) == (1.0, 0.5)
    unseen_B[:400] = True
    enough = choose(data, features, SHAPE, LinearOptions(), 2, unseen_B=unseen_B)
    assert enough.report is not None
    assert enough.report["held_out"] == 400


def test_the_climb_goes_on_while_quality_rises() -> None:
    def with_best(best: float) -> tuple[list[float], Callable[[float], list[Trial]]]:
        costs: list[float] = []

        def tried(cost: float) -> list[Trial]:
            costs.append(cost)
            return [Trial(cost, 1.0, np.full((2, 2), 1 - abs(np.log(cost / best)) / 10))]

        return costs, tried

    for best, expected in ((3.0, [0.3, 1.0, 3.0]), (1.0, [0.3, 1.0, 3.0]), (0.3, [0.3, 1.0, 0.1]), (0.03, [0.3, 1.0, 0.1, 0.03])):
        costs, tried = with_best(best)
        assert list(choosing._climbed(tried, None)) == costs == expected
    costs, tried = with_best(3.0)
    assert list(choosing._climbed(tried, 0.5)) == costs == [0.5]


def test_a_trial_learns_from_a_limited_part(monkeypatch: pytest.MonkeyPatch) -> None:
    data = clusters(600, 0.8)
    monkeypatch.setattr(choosing, "MOST_VALUES", data.points.nnz // 2)
    part = data.take(choosing._most_values(data.points, 0))
    assert data.points.nnz // 2 - 40 < part.points.nnz <= data.points.nnz // 2
    assert 250 < len(part) < 350


def test_folds_hold_out_each_point_once_at_most() -> None:
    unseen = np.arange(0, 2000, 4)
    for held, learned in choosing._folds(unseen, 2000, 3):
        assert np.isin(held, unseen).all()
        assert sorted([*held, *learned]) == list(range(2000))
    folds = list(choosing._folds(np.arange(1200), 1200, 3))
    assert len(folds) == 4
    assert sorted(np.concatenate([held for held, _ in folds])) == list(range(1200))
    for held, learned in folds:
        assert sorted([*held, *learned]) == list(range(1200))


def test_a_trial_of_many_points_learns_from_a_quarter_and_from_all_texts_of_items() -> None:
    ((held, learned),) = choosing._folds(np.arange(50_000, 101_000), 101_000, 3)
    assert len(held) == len(set(held)) == 1000
    assert (np.diff(learned) > 0).all()
    assert not np.isin(held, learned).any()
    assert (learned < 50_000).sum() == 50_000
    assert (learned >= 50_000).sum() == 12_500
    ((_, learned),) = choosing._folds(np.arange(10_000), 10_000, 3)
    assert len(learned) == choosing.LEAST_LEARNED


def test_few_items_are_one_node() -> None:
    """Unless its dense weights would be too large, or a forest would hold the same node several times."""
    assert LinearTree().leaf_of(1024, 1 << 16) == 1024
    assert LinearTree().leaf_of(1024, (1 << 16) + 1) == 32
    assert LinearTree().leaf_of(1025, 10) == 32
    assert LinearTree(count=2).leaf_of(1024, 10) == 32
    assert LinearTree(max_leaf=7).leaf_of(5, 10) == 7
