"""XLR, extreme learning to rank: Rank SVMs of all labels that share a few basic rankers (Cheng, Davidson and Hsieh 2018).

    min_{U, V} ½ (‖U‖² + ‖V‖²) + C Σ_l y_l / N_l Σ_{i has l} Σ_{j has not} max(0, 1 − ⟨U v_l, x_i − x_j⟩)²

The K columns of U are basic rankers, and v_l says how label l combines them. As in label_rank_svm.py, N_l counts the points without the
label, of which at most 4,000 take part; y_l is the label's mean relevance. L-BFGS minimises over U and V together: points are multiplied by
U once an evaluation, so a label costs its points times K. The scores of different labels share no scale.

Legend: B points, F features and the bias's, I labels, K rank, R points of one label's problem.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from benchmarks.papers.xreg.label_rank_svm import pair_loss, problems
from benchmarks.papers.xreg.linear_scores import LinearScores, with_bias
from training.data.csr import Csr
from training.data.xmc import LabelledPoints

Float64 = NDArray[np.float64]
STEPS = 50
SCALE = 0.1
"""Of the normal numbers, over √K, that U and V start from: what rare features start with is only shrunk."""


def fit_xlr(train: LabelledPoints, rank: int, cost: float, seed: int = 1) -> LinearScores:
    """U and V; v is nearly 0 of labels that no point or every point has.

    rank  K
    cost  C
    """
    objective = _Objective(train, rank, cost, seed)
    start = np.random.default_rng(seed).normal(size=objective.size) * SCALE / np.sqrt(rank)
    optimum = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": STEPS})
    left_FK, right_IK = objective.split(optimum.x)
    return LinearScores(left_FK.astype(np.float32), np.ascontiguousarray(right_IK.T, np.float32))


@dataclass(frozen=True, eq=False)
class _Problem:
    label: int
    rows_R: NDArray[np.int64]
    having: int
    cost: float


class _Objective:
    """What is minimised, with its gradient, of U and V in one vector."""

    def __init__(self, train: LabelledPoints, rank: int, cost: float, seed: int) -> None:
        self._inputs: Csr = with_bias(train.points).astype(np.float64)
        self._shapes = (self._inputs.shape[1], rank), (train.labels.shape[1], rank)
        self._problems = [_Problem(label, rows_R, having, cost * unit) for label, rows_R, having, unit in problems(train.labels, seed)]
        self.size = sum(rows * columns for rows, columns in self._shapes)

    def split(self, parameters: Float64) -> tuple[Float64, Float64]:
        """U and V."""
        cut = self._shapes[0][0] * self._shapes[0][1]
        return parameters[:cut].reshape(self._shapes[0]), parameters[cut:].reshape(self._shapes[1])

    def __call__(self, parameters: Float64) -> tuple[float, Float64]:
        left_FK, right_IK = self.split(parameters)
        projected_BK = self._inputs @ left_FK
        loss, gradient = float(parameters @ parameters) / 2, parameters.copy()
        left_gradient_FK, right_gradient_IK = self.split(gradient)
        projected_gradient_BK = np.zeros_like(projected_BK)
        for problem in self._problems:
            projected_RK, combined_K = projected_BK[problem.rows_R], right_IK[problem.label]
            label_loss, slope_R = pair_loss(projected_RK @ combined_K, np.arange(len(problem.rows_R)) < problem.having)
            loss += problem.cost * label_loss
            right_gradient_IK[problem.label] += problem.cost * (slope_R @ projected_RK)
            projected_gradient_BK[problem.rows_R] += problem.cost * np.outer(slope_R, combined_K)
        left_gradient_FK += self._inputs.T @ projected_gradient_BK
        return loss, gradient
