"""Standardisation of raw features, NaN where a value is missing: mean 0 and standard deviation 1 on the training rows.

Each feature enters a rank function twice, as it is and by its quantiles, since neither form is best on all data: similarities and scores
rank better as they are, counts and other heavy-tailed numbers by quantiles.

Knows columns. Does not know queries: the same value gets the same result in every query. By hand, as a torch module: it is exported in
ranker.onnx with the rank function, unlike scikit-learn's StandardScaler and QuantileTransformer, and NaN becomes 0.

Legend: F features, K knots; rows have any number of dimensions in front.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor, nn

from espalier.arrays import Array, Float32

QUANTILES = 16
"""Pieces of the map to the normal distribution."""
BLOCK_ROWS = 1 << 12
FARTHEST = 5.0
"""Most standard deviations from the mean. Without a limit, a price that was typed wrong, or a year that training has not seen, decides
alone; in which direction is chance."""
RAREST = 0.2
"""Smallest standard deviation by which an indicator is divided: what was missing once in a million rows is no input of a thousand."""


class Standardise(nn.Module):
    """Standardised features; the same after a rising piecewise linear map from the training quantiles to those of the normal distribution,
    in which values beyond the outermost quantiles equal these; and, for each feature with missing values, its standardised indicator "is
    missing". Both forms of a missing value are 0.

    Its arrays are buffers: they are saved and exported with the model. A feature with a single value is always 0.
    """

    mean: Tensor
    scale: Tensor
    knots_FK: Tensor
    rise_FK: Tensor
    flagged: Tensor

    def __init__(self, features_RF: Float32) -> None:
        super().__init__()
        knots_FK, rise_FK = _normal_map(features_RF)
        self.register_buffer("knots_FK", torch.from_numpy(knots_FK))
        self.register_buffer("rise_FK", torch.from_numpy(rise_FK))
        mapped_RF = in_blocks(lambda rows: _mapped(rows, self.knots_FK, self.rise_FK), torch.from_numpy(features_RF)).numpy()
        absent_RF = np.isnan(features_RF)
        flagged = np.flatnonzero(absent_RF.any(axis=0) & ~absent_RF.all(axis=0))
        self.register_buffer("flagged", torch.from_numpy(flagged))
        columns = [*features_RF.T, *mapped_RF.T, *absent_RF[:, flagged].T]
        mean_F, std_F = np.array([_mean_and_deviation(column) for column in columns]).T
        indicators = slice(2 * features_RF.shape[1], None)
        std_F[indicators] = np.maximum(std_F[indicators], RAREST)
        varies_F = std_F > np.maximum(1e-7 * np.abs(mean_F), 1e-30)  # smaller deviations are float32 rounding
        self.register_buffer("mean", torch.from_numpy(mean_F.astype(np.float32)))
        self.register_buffer("scale", torch.from_numpy(np.divide(1, std_F, out=np.zeros_like(std_F), where=varies_F).astype(np.float32)))
        self.outputs = len(columns)

    def forward(self, features: Tensor) -> Tensor:
        """[…, features] → [… , outputs]."""
        is_missing = features.isnan()
        indicators = is_missing.index_select(-1, self.flagged)
        x = torch.cat([features, _mapped(features, self.knots_FK, self.rise_FK), indicators.to(features.dtype)], -1)
        standardised = ((x - self.mean) * self.scale).clamp(-FARTHEST, FARTHEST)
        return torch.where(torch.cat([is_missing, is_missing, torch.zeros_like(indicators)], -1), 0, standardised)


def _mean_and_deviation(column: Array) -> tuple[float, float]:
    """Of the numbers that are not NaN; 0 if there are none."""
    values = column[~np.isnan(column)].astype(np.float64)
    return (float(values.mean()), float(values.std())) if len(values) else (0.0, 0.0)


def _normal_map(features_RF: Float32) -> tuple[Float32, Float32]:
    """Knots float32[F, K + 1], ascending, and how much the map rises between each two, float32[F, K]. Starts from the first quantile."""
    level_K = (np.arange(QUANTILES + 1) + 0.5) / (QUANTILES + 1)
    knots_FK = np.zeros((features_RF.shape[1], QUANTILES + 1), np.float32)
    rise_FK = np.zeros((features_RF.shape[1], QUANTILES), np.float32)
    for feature, column in enumerate(features_RF.T):
        values = column[~np.isnan(column)]
        if len(values) == 0:
            continue
        knots, group = np.unique(np.quantile(values, level_K).astype(np.float32), return_inverse=True)
        # Equal quantiles, of a value that is frequent, are one knot at the mean of their normal scores.
        score = np.bincount(group, weights=norm.ppf(level_K)) / np.bincount(group)
        knots_FK[feature] = np.concatenate([knots, np.full(len(level_K) - len(knots), knots[-1])])
        rise_FK[feature, : len(knots) - 1] = np.diff(score)
    return knots_FK, rise_FK


def _mapped(x: Tensor, knots_FK: Tensor, rise_FK: Tensor) -> Tensor:
    """Σ_k rise_k · (the share of the way from knot k to the next that x has gone)."""
    low_FK = knots_FK[:, :-1]
    width_FK = torch.where(knots_FK[:, 1:] > low_FK, knots_FK[:, 1:] - low_FK, 1)
    return (rise_FK * ((x[..., None] - low_FK) / width_FK).clamp(0, 1)).sum(-1)


def in_blocks(function: Callable[[Tensor], Tensor], rows_RF: Tensor) -> Tensor:
    """function(rows_RF), some rows at a time: bounds the memory of what is between, K numbers a feature and the hidden units."""
    return torch.cat([function(block) for block in rows_RF.split(BLOCK_ROWS)])
