"""The exponential mean of weights over steps, which is what is validated and kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

AVERAGE_EVERY = 5
"""Steps between two updates of the averaged weights: one reads and writes all of them."""


def averaged_over(steps: int, model: nn.Module) -> AveragedModel:
    """A copy of a model that follows the mean of its weights over about so many steps; update it every AVERAGE_EVERY steps."""
    return AveragedModel(model, multi_avg_fn=partial(_average_in, steps))


def share_kept(steps: int, times: int) -> float:
    """d of averaged ← d · averaged + (1 − d) · current, at an update after `times` others.

    It is 0 at the first and grows from 2/11 to 1 − AVERAGE_EVERY / steps: the first weights soon lose their share.
    """
    return 0.0 if times == 0 else max(0.0, min(1 - AVERAGE_EVERY / steps, (1 + times) / (10 + times)))


@torch.no_grad()
def _average_in(steps: int, averaged: Sequence[Tensor], current: Sequence[Tensor], times: Tensor) -> None:
    for mean, value in zip(averaged, current, strict=True):
        mean.lerp_(value, 1 - share_kept(steps, int(times)))
