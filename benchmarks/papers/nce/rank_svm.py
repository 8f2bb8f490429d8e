"""Rank SVM: a linear function whose differences within a query have the right sign (Joachims 2002), the linear baseline of NCE's Table 1.

    ½ ‖w‖² + C / Q · Σ_{pairs of a query, i better than j} max(0, 1 − ⟨w, x_i − x_j⟩)²

The hinge is squared, as LIBLINEAR's primal solver wants it. Knows ranking sets. Does not know models of choice.

Legend: P pairs, F features, Q queries.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.svm import LinearSVC

from espalier.arrays import Int64
from espalier.errors import InvalidData
from training.data.ranking_set import RankingSet
from training.rankers.fit import Ranker
from training.rankers.rank_functions import LinearFunction
from training.rankers.standardise import Standardise, in_blocks

MAX_PAIRS = 3_000_000
"""Of more pairs a seeded sample is taken: their differences are a dense array."""


def fit_rank_svm(train: RankingSet, cost: float, seed: int = 0) -> Ranker:
    """A linear ranker of cost C.

    Raises InvalidData where no query has items of different grades.
    """
    pairs_P2 = better_and_worse(train)
    if len(pairs_P2) == 0:
        raise InvalidData("train.grades_R", "equal grades in every query", "a query with items of different grades")
    rng = np.random.default_rng(seed)
    share = min(1.0, MAX_PAIRS / len(pairs_P2))
    if share < 1:
        pairs_P2 = pairs_P2[rng.choice(len(pairs_P2), MAX_PAIRS, replace=False)]
    standardise = Standardise(train.features_RF)
    inputs_RF = in_blocks(standardise, torch.from_numpy(train.features_RF)).numpy().astype(np.float64)
    difference_PF = inputs_RF[pairs_P2[:, 0]] - inputs_RF[pairs_P2[:, 1]]
    sign_P = np.where(np.arange(len(difference_PF)) % 2, -1.0, 1.0)  # LIBLINEAR needs two classes; the loss is symmetric
    solver = LinearSVC(loss="squared_hinge", dual=False, fit_intercept=False, C=cost / len(train) / share, tol=1e-4)
    solver.fit(difference_PF * sign_P[:, None], sign_P)
    function = LinearFunction(standardise.outputs, 1.0, torch.Generator())
    function.weight.data = torch.from_numpy(solver.coef_[0].astype(np.float32))
    return Ranker(train.feature_names, standardise, function).eval()


def better_and_worse(train: RankingSet) -> Int64:
    """int64[P, 2]: rows of each pair of a query's items with different grades, the better one first."""
    query_pairs = []
    for query in range(len(train)):
        rows = train.rows_of(query)
        grades = train.grades_R[rows]
        better, worse = np.nonzero(grades[:, None] > grades[None, :])
        query_pairs.append(np.stack([better, worse], axis=1) + rows.start)
    return np.concatenate(query_pairs)
