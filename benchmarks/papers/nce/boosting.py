"""Gradient boosted trees as rank functions, by LightGBM: under the two models of choice (NCE's SGTB), and LambdaMART.

Knows ranking sets. Does not know networks. SGTB as in NCE §5.3.2: each tree is grown on a random half of the rows, its nodes split at
random thresholds of a random third of the features, down to nodes of 40 rows or 512 leaves; the rate is halved when a tree did not lower
the training loss. The paper fits trees to gradients; here a leaf's value is also divided by the summed curvature, a diagonal that is
above the Hessian, so that a step of rate 1 in one leaf cannot overshoot.

LightGBM is imported here alone.

Legend: R rows, Q queries, N places, F features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from espalier.arrays import Float32, Float64
from espalier.metrics import ndcg
from training.data.ranking_set import RankingSet
from training.rankers.choice_models import elimination_loss, plackett_luce_loss, random_order
from training.rankers.fit import padded
from training.specification.ranker import ChoiceModel

if TYPE_CHECKING:  # an extra, `boosting`, which only benchmarks have
    import lightgbm


@dataclass(frozen=True)
class BoostingConfig:
    """Loss and growth of the trees. The defaults are those of the paper's SGTB.

    loss           `elimination`, `plackett-luce`, or `lambdarank`: LambdaMART, LightGBM's own objective
    trees          at most so many; with validation queries, those up to the best NDCG on them count
    learning_rate  at first; halved when the training loss did not fall, but for lambdarank, which has none
    leaves, least_rows          of a tree, of a leaf
    row_share, feature_share    of a tree, of a node
    random_splits  whether a node's threshold on each feature is drawn, not searched
    l2             added to the curvature of a leaf
    patience       with validation queries: trees without a better NDCG on them after which no more are grown
    validate_at    k of that NDCG@k
    """

    loss: ChoiceModel | Literal["lambdarank"] = "elimination"
    trees: int = 300
    learning_rate: float = 0.1
    leaves: int = 512
    least_rows: int = 40
    row_share: float = 0.5
    feature_share: float = 1 / 3
    random_splits: bool = True
    l2: float = 0.0
    patience: int = 50
    validate_at: int = 10
    seed: int = 1
    threads: int = 1


@dataclass(frozen=True)
class BoostedTrees:
    """A trained ensemble: its first `trees` trees count. `validation` is their NDCG on validation queries."""

    booster: lightgbm.Booster
    trees: int
    validation: float | None

    def scores(self, features_RF: Float32) -> Float32:
        """float32[R], higher is better."""
        scores_R = self.booster.predict(features_RF, num_iteration=self.trees, raw_score=True)
        return np.asarray(scores_R, np.float32)


def fit_boosted_trees(train: RankingSet, valid: RankingSet | None, config: BoostingConfig) -> BoostedTrees:
    import lightgbm

    params = _params(config)
    booster = lightgbm.Booster(params, _dataset(train, params))
    if valid is not None:
        booster.add_valid(_dataset(valid, params, booster.train_set), "valid")
    choice = None if config.loss == "lambdarank" else _Choice(train, config)
    rate, best, best_trees = config.learning_rate, -math.inf, 0

    def measured(scores_R: Float64, _: lightgbm.Dataset) -> tuple[str, float, bool]:
        if valid is None:
            raise RuntimeError("no validation queries")
        return "ndcg", float(ndcg(scores_R, valid.grades_R, valid.query_offset, config.validate_at).mean()), True

    for tree in range(1, config.trees + 1):
        # A tree that finds no split leaves the scores as they are; the next one draws other rows and thresholds.
        booster.update() if choice is None else booster.update(fobj=choice.gradient_and_curvature)
        if valid is not None and (value := float(booster.eval_valid(measured)[0][2])) > best:
            best, best_trees = value, tree
        if valid is not None and tree - best_trees >= config.patience:
            break
        if choice is not None and choice.stalled:
            rate /= 2
            booster.reset_parameter({"learning_rate": rate})
    return BoostedTrees(booster, config.trees if valid is None else best_trees, None if valid is None else best)


def _params(config: BoostingConfig) -> dict[str, Any]:
    """The configuration in LightGBM's words."""
    return {
        "objective": "lambdarank" if config.loss == "lambdarank" else "none",
        "metric": "none",
        "learning_rate": config.learning_rate,
        "num_leaves": config.leaves,
        "min_data_in_leaf": config.least_rows,
        "bagging_fraction": config.row_share,
        "bagging_freq": 1,
        "feature_fraction_bynode": config.feature_share,
        "extra_trees": config.random_splits,
        "min_sum_hessian_in_leaf": 0.0,
        "lambda_l2": config.l2,
        "seed": config.seed,
        "num_threads": config.threads,
        "deterministic": True,
        "force_row_wise": True,
        "verbosity": -1,
    }


def _dataset(data: RankingSet, params: dict[str, Any], reference: lightgbm.Dataset | None = None) -> lightgbm.Dataset:
    import lightgbm

    sizes_Q = np.diff(data.query_offset)
    return lightgbm.Dataset(data.features_RF, data.grades_R, group=sizes_Q, reference=reference, params=params, free_raw_data=False)


class _Choice:
    """The gradient of a model of choice over all training queries, each divided by its items, ties in an order drawn for each tree."""

    def __init__(self, train: RankingSet, config: BoostingConfig) -> None:
        self.loss: ChoiceModel = "elimination" if config.loss == "elimination" else "plackett-luce"
        self.rows_QN, self.present_QN = padded(train.query_offset, np.arange(len(train)))
        self.grades_QN = torch.from_numpy(train.grades_R)[self.rows_QN]
        self.items_Q = self.present_QN.sum(-1)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.fixed_QN = random_order(self.grades_QN, self.present_QN, self.generator)
        self.before = math.inf
        self.stalled = False

    def gradient_and_curvature(self, scores_R: Float64, _: lightgbm.Dataset) -> tuple[Float64, Float64]:
        """LightGBM's custom objective; notes whether the last tree lowered the loss, by one order that stays the same."""
        scores_QN = torch.from_numpy(scores_R)[self.rows_QN]
        present_QN = self.present_QN.gather(-1, self.fixed_QN)
        value = elimination_loss if self.loss == "elimination" else plackett_luce_loss
        loss = float((value(scores_QN.gather(-1, self.fixed_QN), present_QN) / self.items_Q).mean())
        self.stalled, self.before = loss >= self.before, loss
        order_QN = random_order(self.grades_QN, self.present_QN, self.generator)
        ordered_QN, present_QN = scores_QN.gather(-1, order_QN), self.present_QN.gather(-1, order_QN)
        both = gradient_and_curvature(self.loss, ordered_QN, present_QN)
        gradient_R, curvature_R = (
            (part.new_zeros(part.shape).scatter(-1, order_QN, part) / self.items_Q[:, None])[self.present_QN].numpy() for part in both
        )
        return gradient_R, curvature_R


def gradient_and_curvature(loss: ChoiceModel, scores_BN: Tensor, present_BN: Tensor) -> tuple[Tensor, Tensor]:
    """∂ℓ/∂f_k, [B, N], and c_k, [B, N], such that Σ_k c_k d_k² is never less than dᵀ(∂²ℓ/∂f²)d; both 0 at padding.

    c_k is the sum of item k's shares p_k over the stages. A stage's Hessian is diag(p) − p pᵀ, and diag(p) is above it in every direction.
    The gradient is 1 − c_k under choice by elimination and c_k − 1 under Plackett–Luce.
    """
    value = elimination_loss if loss == "elimination" else plackett_luce_loss
    leaf_BN = scores_BN.detach().requires_grad_()
    (gradient_BN,) = torch.autograd.grad(value(leaf_BN, present_BN).sum(), leaf_BN)
    return gradient_BN, present_BN.to(scores_BN.dtype) + (-gradient_BN if loss == "elimination" else gradient_BN)
