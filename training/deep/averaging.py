"""The exponential mean of weights over steps, which is what is validated and kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

AVERAGE_EVERY = 5
"""Steps between two updates of the averaged weights: one reads and writes all node rows."""


def averaged_over(steps: int, model: nn.Module) -> AveragedModel:
    """A copy of a model that follows the mean of its weights over about so many steps; update it every AVERAGE_EVERY steps."""
    return AveragedModel(model, multi_avg_fn=partial(average_in, 1 - AVERAGE_EVERY / steps))


@torch.no_grad()
def average_in(decay: float, averaged: Sequence[Tensor], current: Sequence[Tensor], times: Tensor) -> None:
    """averaged ← d · averaged + (1 − d) · current, d growing from 0.1 to `decay`: the first weights soon lose their share."""
    warm = (1 + int(times)) / (10 + int(times))
    for mean, value in zip(averaged, current, strict=True):
        mean.lerp_(value, 1 - max(0.0, min(decay, warm)))
