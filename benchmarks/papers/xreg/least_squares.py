"""One-versus-all least squares: every label's relevance by ridge regression, in closed form.

    min_W ‖Y − X W‖² + λ ‖W‖²,   W = (XᵀX + λ I)⁻¹ Xᵀ Y = Xᵀ (X Xᵀ + λ I)⁻¹ Y

Points are of length 1 and have a feature of 1, whose weight is regularised too. The smaller of the two systems is solved.

Legend: B points, F features and the bias's, I labels.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from benchmarks.papers.xreg.linear_scores import LinearScores, with_bias
from espalier.errors import InvalidData
from training.data.xmc import LabelledPoints

LARGEST = 20_000
"""Most points or features, whichever are fewer: the system is a dense matrix."""
MOST_WEIGHTS = 1 << 29
"""Features times labels: weights are dense."""


def fit_least_squares(train: LabelledPoints, ridge: float) -> LinearScores:
    """Weights of all labels. Raises InvalidData where the data are too large for dense matrices."""
    inputs = with_bias(train.points)
    (points, features), labels = inputs.shape, train.labels.shape[1]
    if min(points, features) > LARGEST or features * labels > MOST_WEIGHTS:
        expected = f"at most {LARGEST} points or features, and {MOST_WEIGHTS} features times labels"
        raise InvalidData("train", f"{points} points, {features} features and {labels} labels", expected)
    primal = features <= points
    system = ((inputs.T @ inputs) if primal else (inputs @ inputs.T)).toarray()
    system[np.diag_indices_from(system)] += ridge
    targets = ((inputs.T @ train.labels) if primal else train.labels).toarray()
    solved = cho_solve(cho_factor(system, lower=True, overwrite_a=True), targets, overwrite_b=True)
    return LinearScores(np.asarray(solved if primal else inputs.T @ solved, np.float32))
