"""What rankers are compared with: Rank SVM and boosted trees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.papers.nce.boosting import BoostingConfig, fit_boosted_trees
from benchmarks.papers.nce.rank_svm import better_and_worse, fit_rank_svm
from tests.training.test_rankers import quality, synthetic
from training.rankers.export import ranker_onnx
from training.rankers.fit import new_ranker
from training.specification.ranker import HighwayConfig

TREES = BoostingConfig(trees=40, leaves=8, least_rows=5, feature_share=1.0)


def test_pairs_are_of_one_query_and_of_different_grades() -> None:
    data = synthetic(1, 10)
    pairs = better_and_worse(data)
    query = np.repeat(np.arange(len(data)), np.diff(data.query_offset))
    assert (query[pairs[:, 0]] == query[pairs[:, 1]]).all()
    assert (data.grades_R[pairs[:, 0]] > data.grades_R[pairs[:, 1]]).all()
    expected = sum(int((data.grades_R[data.rows_of(q)][:, None] > data.grades_R[data.rows_of(q)]).sum()) for q in range(len(data)))
    assert len(pairs) == len({tuple(pair) for pair in pairs.tolist()}) == expected


def test_rank_svm_finds_the_minimum_of_its_objective() -> None:
    data = synthetic(1, 30, curved=False)
    ranker = fit_rank_svm(data, 2.0)
    x = ranker.standardise(torch.from_numpy(data.features_RF)).double()
    better, worse = torch.from_numpy(better_and_worse(data)).T

    def gradient(weight: torch.Tensor) -> torch.Tensor:
        w = weight.detach().double().requires_grad_()
        value = 0.5 * w.square().sum() + 2.0 / len(data) * (1 - (x[better] - x[worse]) @ w).clamp(min=0).square().sum()
        return torch.autograd.grad(value, w)[0]

    found = next(ranker.function.parameters())
    assert gradient(found).norm() < 1e-3 * gradient(torch.zeros_like(found)).norm()
    assert quality(ranker, synthetic(2, 30, curved=False)) > 0.95
    assert len(ranker_onnx(ranker)) > 0


@pytest.mark.parametrize("loss", ["elimination", "plackett-luce", "lambdarank"])
def test_boosted_trees_learn_and_keep_the_best_number_of_trees(loss: Any) -> None:
    train, valid, test = synthetic(1, 120), synthetic(3, 40), synthetic(2, 60)
    found = fit_boosted_trees(train, valid, replace(TREES, loss=loss))

    class Scores:
        def scores(self, features: np.ndarray) -> np.ndarray:
            return found.scores(features)

    assert quality(Scores(), test) > 0.9  # type: ignore[arg-type]  # scores are all that is asked of it
    assert quality(new_ranker(train, HighwayConfig(hidden=10, dropout=0.3)).eval(), test) < 0.8
    assert 1 <= found.trees <= 40
    assert found.validation is not None
    assert found.validation > 0.8
    ended = fit_boosted_trees(train, valid, replace(TREES, loss=loss, patience=1))
    assert ended.booster.num_trees() == ended.trees + 1 < 40
    again = fit_boosted_trees(train, valid, replace(TREES, loss=loss))
    assert np.array_equal(again.scores(test.features_RF), found.scores(test.features_RF))
