"""Labels by linear scores: the models of one-versus-all and low-rank methods.

Points are of length 1 with a last feature of 1, the bias's.

Legend: B points, F features and the bias's, I labels, K rank, M results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csc_array, csr_array, hstack, issparse

from espalier.arrays import Array, Float32, Int64
from training.data.csr import Csr, normalised

BLOCK = 512
"""Points whose scores are held at a time."""


def with_bias(points: Csr) -> Csr:
    """float32[B, F]: points of length 1 and a feature of 1."""
    ones = csr_array(np.ones((points.shape[0], 1), np.float32))
    rows: Csr = hstack([normalised(points), ones], format="csr")
    return rows


@dataclass(frozen=True, eq=False)
class LinearScores:
    """score(x, l) = ⟨x, W_l⟩, W = left · right.

    left   float32[F, I], dense or sparse, or float32[F, K]
    right  float32[K, I], or None
    """

    left: Float32 | csc_array[Any]
    right: Float32 | None = None

    def best(self, points: Csr, most: int) -> tuple[Int64, Float32]:
        """int64[B, M] and float32[B, M], M at most I: the labels of highest scores, best first, and their scores."""
        inputs = with_bias(points)
        blocks = [self._best(inputs[begin : begin + BLOCK], most) for begin in range(0, inputs.shape[0], BLOCK)]
        return np.concatenate([block[0] for block in blocks]), np.concatenate([block[1] for block in blocks])

    def _best(self, inputs: Csr, most: int) -> tuple[Int64, Float32]:
        score_BI: Any = inputs @ self.left
        if not isinstance(score_BI, np.ndarray):
            score_BI = score_BI.toarray()
        score_BI = score_BI if self.right is None else score_BI @ self.right
        most = min(most, score_BI.shape[1])
        some_BM = np.sort(np.argpartition(-score_BI, most - 1, axis=1)[:, :most], axis=1)
        order_BM = np.argsort(-np.take_along_axis(score_BI, some_BM, axis=1), axis=1, kind="stable")
        label_BM = np.take_along_axis(some_BM, order_BM, axis=1)
        return label_BM, np.take_along_axis(score_BI, label_BM, axis=1)

    def arrays(self) -> dict[str, Array]:
        if issparse(self.left):
            return {name: getattr(self.left, name) for name in ("data", "indices", "indptr")}
        return {"left": np.asarray(self.left)} | ({} if self.right is None else {"right": self.right})
