"""ProXML: one-versus-all classifiers whose 1-norm makes them robust to changes of their points' features (Babbar and Schölkopf 2019).

    min_w ‖w‖₁ + C Σ_i max(0, 1 − t_i w·x_i)²

Labels without points have no weights and so a score of 0, above what negatives of other labels have: their weight of the bias is −1, what a
label of all negatives has.

Legend: B points, F features and the bias's, I labels.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csc_array

from benchmarks.papers.xreg.l1_linear import Columns, Stop, minimise
from benchmarks.papers.xreg.linear_scores import LinearScores, with_bias
from training.data.xmc import LabelledPoints

STOP = Stop(tolerance=0.01, rounds=20, passes=10)


def fit_proxml(train: LabelledPoints, cost: float = 1.0, seed: int = 1) -> LinearScores:
    """Classifiers of all labels. `cost` is C."""
    columns_BF = with_bias(train.points).tocsc()
    features, by_label = Columns(columns_BF.indptr.astype(np.int64), columns_BF.indices, columns_BF.data), train.labels.tocsc()
    cost_B, columns = np.full(len(train), cost), []
    for label in range(train.labels.shape[1]):
        sign_B = np.full(len(train), -1.0)
        sign_B[by_label.indices[by_label.indptr[label] : by_label.indptr[label + 1]]] = 1
        if (sign_B > 0).any():
            weight_F = minimise(features, sign_B, cost_B, True, STOP, seed + label)
        else:
            weight_F = np.zeros(columns_BF.shape[1])
            weight_F[-1] = -1
        columns.append(csc_array(weight_F[:, None].astype(np.float32)))
    indptr = np.append(0, np.cumsum([column.nnz for column in columns]))
    data, indices = (np.concatenate([getattr(column, name) for column in columns]) for name in ("data", "indices"))
    return LinearScores(csc_array((data, indices, indptr), shape=(columns_BF.shape[1], len(columns))))
