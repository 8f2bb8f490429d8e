"""LEML: linear scores of low rank by least squares (Yu, Jain, Kar and Dhillon 2014, with the squared loss and all labels observed).

    min_{U, V} ½ ‖Y − X U Vᵀ‖² + λ/2 (‖U‖² + ‖V‖²)

V, given U, is a ridge regression of K inputs. U, given V, is found by conjugate gradients: its Hessian times S is
Xᵀ X S VᵀV + λ S, so no matrix of points × labels is made. Both take turns. XᵀX is made once if it is small.

Legend: B points, F features and the bias's, I labels, K rank.
"""

from __future__ import annotations

import numpy as np

from benchmarks.papers.xreg.linear_scores import LinearScores, with_bias
from espalier.arrays import Float64
from training.data.csr import Csr
from training.data.xmc import LabelledPoints

ROUNDS, STEPS, TOLERANCE = 10, 10, 1e-2
"""Turns; most steps of conjugate gradients in one, which end at this share of the first gradient."""
SMALL = 8192
"""Up to so many features, XᵀX is made: 512 MB."""


def fit_leml(train: LabelledPoints, rank: int, ridge: float, seed: int = 1) -> LinearScores:
    """U and V.

    rank   K; more than labels or features bring nothing
    ridge  λ
    """
    inputs, labels = with_bias(train.points).astype(np.float64), train.labels
    rank = min(rank, inputs.shape[1], labels.shape[1])
    left_FK = np.random.default_rng(seed).normal(size=(inputs.shape[1], rank)) / np.sqrt(rank)
    gram_FF = (inputs.T @ inputs).toarray() if inputs.shape[1] <= SMALL else None
    for _ in range(ROUNDS):
        right_IK = _right(inputs, labels, left_FK, ridge)
        left_FK = _left(inputs, labels, right_IK, left_FK, ridge, gram_FF)
    right_IK = _right(inputs, labels, left_FK, ridge)
    return LinearScores(left_FK.astype(np.float32), np.ascontiguousarray(right_IK.T, np.float32))


def _right(inputs: Csr, labels: Csr, left_FK: Float64, ridge: float) -> Float64:
    """float64[I, K]: the best V."""
    projected_BK = inputs @ left_FK
    system_KK = projected_BK.T @ projected_BK + ridge * np.eye(left_FK.shape[1])
    best_IK: Float64 = np.linalg.solve(system_KK, (labels.T @ projected_BK).T).T
    return best_IK


def _left(inputs: Csr, labels: Csr, right_IK: Float64, start_FK: Float64, ridge: float, gram_FF: Float64 | None) -> Float64:
    """float64[F, K]: nearly the best U, by conjugate gradients from where it is."""
    gram_KK = right_IK.T @ right_IK

    def hessian(step_FK: Float64) -> Float64:
        both_FK: Float64 = inputs.T @ (inputs @ step_FK) if gram_FF is None else gram_FF @ step_FK
        return both_FK @ gram_KK + ridge * step_FK

    left_FK = start_FK.copy()
    residual_FK = inputs.T @ (labels @ right_IK) - hessian(left_FK)
    direction_FK, square = residual_FK.copy(), float((residual_FK**2).sum())
    enough = TOLERANCE**2 * square
    for _ in range(STEPS):
        if square <= enough:
            break
        image_FK = hessian(direction_FK)
        length = square / float((direction_FK * image_FK).sum())
        left_FK += length * direction_FK
        residual_FK -= length * image_FK
        before, square = square, float((residual_FK**2).sum())
        direction_FK = residual_FK + square / before * direction_FK
    return left_FK
