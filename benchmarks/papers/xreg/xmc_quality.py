"""How well labels were found: P@k, nDCG@5, PSP@k, R@k.

Legend: B points, M results.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from training.data.xmc import LabelledPoints


def quality(found_BM: NDArray[np.int64], test: LabelledPoints, training: LabelledPoints) -> dict[str, float]:
    """P@k, nDCG@5, PSP@k (Jain et al. 2016, A = .55, B = 1.5) and R@k in %.

    R@k is the mean over points with labels, the others are over all points, as the repository's own scripts have them.
    """
    counts = np.diff(test.labels.indptr)
    hits_BM = np.zeros(found_BM.shape, np.bool_)
    for b in range(len(test)):
        hits_BM[b] = np.isin(found_BM[b], test.labels_of(b))
    seen = np.bincount(training.labels.indices, minlength=training.labels.shape[1])
    c = (np.log(len(training)) - 1) * (1.5 + 1) ** 0.55
    worth = 1 + c * np.exp(-0.55 * np.log(seen + 1.5))
    gain_BM = np.where(hits_BM, worth[np.maximum(found_BM, 0)], 0)
    best = [np.sort(worth[test.labels_of(b)])[::-1] for b in range(len(test))]
    row: dict[str, float] = {}
    for k in (1, 3, 5):
        row[f"p{k}"] = float(hits_BM[:, :k].mean())
        row[f"psp{k}"] = float(gain_BM[:, :k].sum() / sum(gains[:k].sum() for gains in best))
    discount = 1 / np.log2(np.arange(2, 7))
    ideal = np.array([discount[: min(5, count)].sum() for count in counts])
    with_labels = counts > 0
    row["ndcg5"] = float(((hits_BM[:, :5] * discount).sum(1)[with_labels] / ideal[with_labels]).sum() / len(test))
    for k in (10, 100):
        row[f"r{k}"] = float((hits_BM[with_labels, :k].sum(1) / counts[with_labels]).mean())
    return {name: round(100 * value, 2) for name, value in row.items()}
