"""Training a ranker: a rank function under a model of choice, with the standardisation of its features inside.

Knows ranking sets and `RankerConfig`. Does not know where features come from. As in NCE §5.2: gradient descent over batches of queries, a
query's loss divided by its items, a learning rate that is halved when an epoch's training loss is no better than the best before. With
validation queries, the result has the weights of the epoch with the best NDCG on them; without, those of the last epoch.

A fit is a function of configuration and data: order of queries, dropout and ties of epoch e are drawn from generators seeded with
(seed, e), on the CPU and in fixed order.

Legend: R rows, F features, Q queries, B queries of a batch, N positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from espalier.arrays import Float32, Int64
from espalier.errors import InvalidData
from espalier.metrics import ndcg

from ..data.ranking_set import RankingSet
from ..rankers.choice_models import elimination_loss, plackett_luce_loss, random_order, tied_elimination_loss, tied_plackett_luce_loss
from ..rankers.rank_functions import HighwayFunction, LinearFunction
from ..rankers.standardise import Standardise, in_blocks
from ..specification.ranker import HighwayConfig, RankerConfig

LAYERS = 3
"""Layers of the highway network, as in the paper."""
INIT_STD = 0.1
"""Standard deviation of the first weights; the paper says "small"."""
VALIDATE_AT = 10
"""k of the NDCG@k that chooses the epoch."""


@dataclass(frozen=True)
class Descent:
    """How weights are fitted, whatever the rank function. The defaults were chosen on validation users (benchmarks/results, reranking).

    batch_queries  queries of a step; the loss is the mean over them of each one's mean over its items
    max_norm       highway: the longest that a unit's incoming weights may be; None: no limit
    average        the result is a running mean of the weights over about so many epochs
    least_rate     training ends when the learning rate falls below
    """

    batch_queries: int = 16
    max_norm: float | None = 1.0
    average: float = 1.0
    least_rate: float = 1e-4


CHOSEN = Descent()


@dataclass(frozen=True)
class Epoch:
    """The figures of an epoch. `validation` is the NDCG on validation queries, or None without them."""

    number: int
    loss: float
    learning_rate: float
    validation: float | None


class Ranker(nn.Module):
    """Raw features [… , F], NaN where missing → scores […], higher is better.

    feature_names  of its inputs, in order
    """

    def __init__(self, feature_names: tuple[str, ...], standardise: Standardise, function: LinearFunction | HighwayFunction) -> None:
        super().__init__()
        self.feature_names = feature_names
        self.standardise = standardise
        self.function = function

    def forward(self, features: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """`generator` is that of dropout; without one, as in serving, nothing is dropped."""
        scores: Tensor = self.function(self.standardise(features), generator)
        return scores

    @torch.no_grad()
    def scores(self, features_RF: Float32) -> Float32:
        """float32[R]. Raises InvalidData if the number of features is not that of the training."""
        if features_RF.ndim != 2 or features_RF.shape[1] != len(self.feature_names):
            raise InvalidData("features_RF", list(features_RF.shape), f"[R, {len(self.feature_names)}]")
        scores_R: Float32 = in_blocks(self, torch.from_numpy(features_RF).to(self.standardise.mean.device)).cpu().numpy()
        return scores_R


def fit_ranker(
    train: RankingSet,
    valid: RankingSet | None,
    config: RankerConfig,
    progress: Callable[[Epoch], None] | None = None,
    device: torch.device | None = None,
    descent: Descent = CHOSEN,
) -> Ranker:
    """Train a ranker. `progress` is called after each epoch; the ranker is on the CPU.

    Raises InvalidData where no training query has items of different grades, or validation queries have other features;
    FloatingPointError if the loss or the validation NDCG is not finite.
    """
    if valid is not None and valid.feature_names != train.feature_names:
        raise InvalidData("valid.feature_names", valid.feature_names[:8], f"those of the training queries, {train.feature_names[:8]}")
    informative = _with_different_grades(train)
    if len(informative) == 0:
        raise InvalidData("train.grades_R", "equal grades in every query", "a query with items of different grades")
    run = _Run(train, informative, config, descent, device or torch.device("cpu"))
    best_loss, best_ndcg, best_state, epochs_since_best = np.inf, -np.inf, run.averaged.function.state_dict(), 0
    for number in range(1, config.max_epochs + 1):
        rate, loss = run.rate, run.epoch(number)
        value = None if valid is None else _ndcg(run.averaged, valid)
        if value is not None and not np.isfinite(value):
            raise FloatingPointError(f"the validation NDCG of epoch {number} is {value}; expected a finite number")
        if progress is not None:
            progress(Epoch(number, loss, rate, value))
        epochs_since_best += 1
        if value is None or value > best_ndcg:
            best_ndcg, epochs_since_best = -np.inf if value is None else value, 0
            best_state = copy.deepcopy(run.averaged.function.state_dict())
        if loss >= best_loss:
            run.halve_rate()
        best_loss = min(best_loss, loss)
        if run.rate < descent.least_rate or (valid is not None and config.patience is not None and epochs_since_best >= config.patience):
            break
    run.averaged.function.load_state_dict(best_state)
    return run.averaged.cpu().eval()


class _Run:
    """A training run. `averaged` has the weights of the result: those of the last step, or their running mean."""

    def __init__(self, train: RankingSet, queries: Int64, config: RankerConfig, descent: Descent, device: torch.device) -> None:
        self.config, self.descent, self.query_offset, self.queries, self.device = config, descent, train.query_offset, queries, device
        self.ranker = new_ranker(train, config).to(device)
        self.averaged = copy.deepcopy(self.ranker)
        self.rate = config.learning_rate
        self._optimizer = torch.optim.Adam(self.ranker.function.parameters(), lr=config.learning_rate)
        self._step_share = 1 / max(descent.average * -(-len(queries) // descent.batch_queries), 1.0)
        with torch.no_grad():
            self._inputs_RF = in_blocks(self.ranker.standardise, torch.from_numpy(train.features_RF).to(device))
        self._grades_R = torch.from_numpy(train.grades_R).to(device)

    def epoch(self, number: int) -> float:
        """One pass over the queries; returns the mean loss. Raises FloatingPointError where it is not finite."""
        rng = np.random.default_rng((self.config.seed, number))
        generator = torch.Generator(self.device).manual_seed(int(rng.integers(2**63)))
        total = self._inputs_RF.new_zeros((), dtype=torch.float64)
        order = rng.permutation(self.queries)
        for start in range(0, len(order), self.descent.batch_queries):
            total += self._step(order[start : start + self.descent.batch_queries], generator)
        loss = float(total) / len(order)
        if not np.isfinite(loss):
            raise FloatingPointError(
                f"the loss of epoch {number} is {loss}; lower the learning rate, or leave out features of huge numbers"
            )
        return loss

    def halve_rate(self) -> None:
        self.rate /= 2
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate

    def _step(self, queries: Int64, generator: torch.Generator) -> Tensor:
        """One update; returns the sum of the queries' losses."""
        rows_BN, present_BN = (array.to(self.device) for array in padded(self.query_offset, queries))
        loss_B = self._losses(rows_BN, present_BN, generator)
        self._optimizer.zero_grad()
        loss_B.mean().backward()
        self._optimizer.step()
        if self.descent.max_norm is not None and isinstance(self.ranker.function, HighwayFunction):
            self.ranker.function.limit_norms(self.descent.max_norm)
        with torch.no_grad():
            for mean, new in zip(self.averaged.function.parameters(), self.ranker.function.parameters(), strict=True):
                mean.lerp_(new, self._step_share)
        return loss_B.detach().sum()

    def _losses(self, rows_BN: Tensor, present_BN: Tensor, generator: torch.Generator) -> Tensor:
        """[B]: each query's loss divided by its number of items."""
        scores_R = self.ranker.function(self._inputs_RF[rows_BN[present_BN]], generator)
        scores_BN = self._inputs_RF.new_zeros(rows_BN.shape).masked_scatter(present_BN, scores_R)
        return query_losses(self.config, scores_BN, self._grades_R[rows_BN], present_BN, generator) / present_BN.sum(-1)


def new_ranker(train: RankingSet, config: RankerConfig) -> Ranker:
    """An untrained ranker: features standardised as those of some rows, weights drawn from the seed."""
    generator = torch.Generator().manual_seed(config.seed)
    standardise = Standardise(train.features_RF)
    function = (
        HighwayFunction(standardise.outputs, config.hidden, LAYERS, config.dropout, INIT_STD, generator)
        if isinstance(config, HighwayConfig)
        else LinearFunction(standardise.outputs, INIT_STD, generator)
    )
    return Ranker(train.feature_names, standardise, function)


def padded(query_offset: Int64, queries: Int64) -> tuple[Tensor, Tensor]:
    """int64[B, N] rows of some queries, 0 as padding, and bool[B, N], whether there is a row."""
    begin_B, size_B = query_offset[queries], query_offset[queries + 1] - query_offset[queries]
    position_N = np.arange(size_B.max())
    present_BN = position_N < size_B[:, None]
    return torch.from_numpy(np.where(present_BN, begin_B[:, None] + position_N, 0)), torch.from_numpy(present_BN)


def _with_different_grades(train: RankingSet) -> Int64:
    """Positions of the queries whose items have different grades; the others have no gradient."""
    begins = train.query_offset[:-1]
    return np.flatnonzero(np.maximum.reduceat(train.grades_R, begins) > np.minimum.reduceat(train.grades_R, begins))


def _ndcg(ranker: Ranker, valid: RankingSet) -> float:
    return float(ndcg(ranker.scores(valid.features_RF), valid.grades_R, valid.query_offset, VALIDATE_AT).mean())


def query_losses(config: RankerConfig, scores_BN: Tensor, grades_BN: Tensor, present_BN: Tensor, generator: torch.Generator) -> Tensor:
    """[B]: −log P of each query's grades under the configured model.

    scores_BN  float32 or float64; grades_BN likewise, higher is better
    present_BN    bool: whether the position holds an item
    generator  of the order inside a grade, for `ties = "random"`
    """
    if config.ties == "marginal":
        tied = tied_elimination_loss if config.loss == "elimination" else tied_plackett_luce_loss
        return tied(scores_BN, grades_BN, present_BN)
    order_BN = random_order(grades_BN, present_BN, generator)
    scores_BN, present_BN = scores_BN.gather(-1, order_BN), present_BN.gather(-1, order_BN)
    loss = plackett_luce_loss if config.loss == "plackett-luce" else elimination_loss
    return loss(scores_BN, present_BN)
