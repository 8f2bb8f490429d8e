"""A trained ranker as ranker.onnx, compared with the torch model before use.

The graph takes `features float32[N, F]`, raw and with NaN where a value is missing, and gives `scores float32[N]`, higher is better. N is
any number of items, of any number of queries: an item's score depends on its own features alone. No control flow, no external data.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from espalier.arrays import Float32
from espalier.engines.runtime import ort

from ..onnx_graphs import onnx_bytes
from ..rankers.fit import Ranker

PARITY_TOLERANCE = 1e-4
"""Tolerance as a share of the largest score of the compared rows, at least 1."""
COMPARED_ROWS = 256
LARGEST = -1e38, 1e38
"""Bounds of the compared numbers; differences of larger ones may overflow."""


def ranker_onnx(ranker: Ranker) -> bytes:
    """The graph's bytes. Raises FloatingPointError where ONNX Runtime and torch score seeded rows differently; some have missing values."""
    example_RF = _example(ranker)
    serialised = onnx_bytes(ranker, (torch.from_numpy(example_RF),), ["features"], "scores", [{0: torch.export.Dim.DYNAMIC}])
    session = ort.InferenceSession(serialised, providers=["CPUExecutionProvider"])
    for rows in (COMPARED_ROWS, 1):
        expected_R = ranker.scores(example_RF[:rows])
        (actual_R,) = session.run(["scores"], {"features": example_RF[:rows]})
        worst = float(np.abs(actual_R - expected_R).max()) if actual_R.shape == expected_R.shape else math.inf
        limit = PARITY_TOLERANCE * max(1.0, float(np.abs(expected_R).max()))
        if not worst <= limit:
            hint = "" if np.isfinite(worst) else "; leave out features of huge numbers"
            raise FloatingPointError(f"scores: got a difference of {worst} between ONNX Runtime and torch, expected at most {limit}{hint}")
    return serialised


def _example(ranker: Ranker) -> Float32:
    """float32[R, F]: rows about the training rows' means, from within to far beyond them, a fifth of the values missing."""
    rng = np.random.default_rng(0)
    width = len(ranker.feature_names)
    spread_R = rng.choice([0.1, 1.0, 10.0], (COMPARED_ROWS, 1))
    knots_FK = ranker.standardise.knots_FK.numpy()
    low_F, high_F = knots_FK[:, 0].astype(np.float64), knots_FK[:, -1].astype(np.float64)
    example_RF = (low_F + high_F) / 2 + spread_R * (high_F - low_F) * rng.standard_normal((COMPARED_ROWS, width))
    example_RF[rng.random(example_RF.shape) < 0.2] = np.nan
    return np.clip(example_RF, *LARGEST).astype(np.float32)
