"""How the weights of tree models are updated: keys, defaults and limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from training.specification.sections import Section, auto_or, auto_or_integer

MAX_PLACES = 1 << 20
"""Of an update: what its encoder computes is in memory at once."""
WARM_SHARE = 5
"""A learning rate that rises during more than a fifth of the steps is too low for too long: a short trial says nothing then."""
MAX_EPOCHS = 1_000_000
"""Of a training: `steps` ends it long before."""
EPOCHS = auto_or(f"a number above 0 and at most {MAX_EPOCHS:,}", lambda epochs: 0 < epochs <= MAX_EPOCHS)


class _Optimiser(Section):
    steps: int = Field(default=2000, ge=1)
    """largest number of updates"""
    learning_rate: float = Field(default=2e-3, gt=0)
    """learning rate. It falls linearly from the first step to 0 at `steps`"""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """precision of matrix products. Weights stay float32. `"auto"` is bfloat16 where the device computes in it"""
    average: int = Field(default=200, ge=1)
    """steps that the weight average spans. It is exponential; 1: no average"""
    validate_every: int = Field(default=100, ge=1)
    """steps between validations. Each measures recall@`search.m` on at most 1,000 validation users"""
    patience: int = Field(default=8, ge=1)
    """validations without progress that end training"""


class OptimiserConfig(_Optimiser):
    """Adam. The learning rate falls linearly to 0; the averaged weights with the best recall of validation users are kept."""

    batch: int = Field(default=256, ge=1)
    """instances per update. Over all processes together"""

    def learning_rate_at(self, step: int) -> float:
        return self.learning_rate * (1 - step / self.steps)


class SequenceOptimiser(_Optimiser):
    """AdamW. The learning rate rises, then falls linearly to 0; the averaged weights with the best recall of validation users are kept."""

    steps: int = Field(default=8000, ge=1)
    epochs: Annotated[Literal["auto"] | float, EPOCHS] = "auto"
    """passes over the lists, or `"auto"`. `steps` is lowered to them, but to no fewer than 1,000. `"auto"`: 4 for logs of fewer than 50
    events an item, else 8"""
    places: Annotated[Literal["auto"] | int, auto_or_integer(1, MAX_PLACES)] = "auto"
    """list positions per update, or `"auto"`. Padding included. `"auto"`: 1 in 400 of the log's events, from 1,024 to 4,096"""
    learning_rate: float = Field(default=2e-3, gt=0)
    """learning rate. It rises for `warm_steps`, then falls linearly to 0 at `steps`"""
    warm_steps: int = Field(
        default=200, ge=0, description=f"steps in which the learning rate rises linearly, at most one in {WARM_SHARE} of `steps`"
    )
    weight_decay: float = Field(default=0.0, ge=0)
    """decoupled weight decay"""
    average: int = Field(default=300, ge=1)
    validate_every: int = Field(default=250, ge=1)

    def learning_rate_at(self, step: int) -> float:
        warm_steps = min(self.warm_steps, self.steps // WARM_SHARE)
        return self.learning_rate * min((step + 1) / (warm_steps + 1), 1 - step / self.steps)
