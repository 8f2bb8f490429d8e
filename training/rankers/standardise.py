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

from espalier.arrays import Float32, Float64

QUANTILES = 16
"""Pieces of the map to the normal distribution."""
BLOCK_ROWS = 1 << 12
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
        absent_RF = np.isnan(features_RF)
        values_RF = features_RF.astype(np.float64)
        knots_FK, rise_FK = _normal_map(values_RF)
        self.register_buffer("knots_FK", torch.from_numpy(knots_FK.astype(np.float32)))
        self.register_buffer("rise_FK", torch.from_numpy(rise_FK.astype(np.float32)))
        knots, rise = torch.from_numpy(knots_FK), torch.from_numpy(rise_FK)
        mapped_RF = in_blocks(lambda rows: _mapped(rows, knots, rise), torch.from_numpy(values_RF)).numpy()
        flagged = np.flatnonzero(absent_RF.any(axis=0) & ~absent_RF.all(axis=0))
        self.register_buffer("flagged", torch.from_numpy(flagged))
        columns_RF = np.concatenate([values_RF, mapped_RF, absent_RF[:, flagged].astype(np.float64)], axis=1)
        is_known_RF = ~np.isnan(columns_RF)
        count_F = np.maximum(is_known_RF.sum(axis=0), 1)
        mean_F = np.where(is_known_RF, columns_RF, 0).sum(axis=0) / count_F
        std_F = np.sqrt((np.where(is_known_RF, columns_RF - mean_F, 0) ** 2).sum(axis=0) / count_F)
        indicators = slice(2 * features_RF.shape[1], None)
        std_F[indicators] = np.maximum(std_F[indicators], RAREST)
        varies_F = std_F > 1e-7 * np.abs(mean_F)  # smaller deviations are float32 rounding
        self.register_buffer("mean", torch.from_numpy(mean_F.astype(np.float32)))
        self.register_buffer("scale", torch.from_numpy(np.divide(1, std_F, out=np.zeros_like(std_F), where=varies_F).astype(np.float32)))
        self.outputs = len(mean_F)

    def forward(self, features: Tensor) -> Tensor:
        """[…, features] → [… , outputs]."""
        is_missing = features.isnan()
        indicators = is_missing.index_select(-1, self.flagged)
        x = torch.cat([features, _mapped(features, self.knots_FK, self.rise_FK), indicators.to(features.dtype)], -1)
        return torch.where(torch.cat([is_missing, is_missing, torch.zeros_like(indicators)], -1), 0, (x - self.mean) * self.scale)


def _normal_map(values_RF: Float64) -> tuple[Float64, Float64]:
    """Knots float64[F, K + 1], ascending, and how much the map rises between each two, float64[F, K]. Starts from the first quantile."""
    level_K = (np.arange(QUANTILES + 1) + 0.5) / (QUANTILES + 1)
    knots_FK = np.zeros((values_RF.shape[1], QUANTILES + 1))
    rise_FK = np.zeros((values_RF.shape[1], QUANTILES))
    for feature, column in enumerate(values_RF.T):
        values = column[~np.isnan(column)]
        if len(values) == 0:
            continue
        knots, group = np.unique(np.quantile(values, level_K), return_inverse=True)
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
