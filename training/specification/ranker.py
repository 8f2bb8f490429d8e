"""The configuration of a ranker (`fit-ranker --config`): one kind for each rank function."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ..specification.sections import Form, Section, default_kind, read_toml

Function = Literal["linear", "highway"]
Ties = Literal["random", "marginal"]
ChoiceModel = Literal["elimination", "plackett-luce"]


class _Ranker(Section):
    model_config = ConfigDict(strict=True)  # "yes" is not true and "7" is not 7

    loss: ChoiceModel = "elimination"
    """`"elimination"` or `"plackett-luce"`. `"elimination"`: the worst item leaves first. `"plackett-luce"`: the best is chosen first"""
    ties: Ties = "random"
    """order of items with equal grades: `"random"`, `"marginal"`. `"random"`: drawn anew in every epoch. `"marginal"`: the probability of
    all their orders"""
    learning_rate: float = Field(default=3e-3, gt=0)
    """first learning rate. Halved after an epoch in which the training loss did not improve"""
    max_epochs: int = Field(default=50, ge=1)
    """largest number of epochs"""
    patience: int | None = Field(default=5, ge=1)
    """epochs without a better validation NDCG that end training"""
    seed: int = Field(default=1, ge=0, lt=2**32)
    """random seed. Of first weights, order of queries, dropout and ties. `--seed` overrides it"""


class HighwayConfig(_Ranker):
    """A highway network."""

    kind: Literal["highway"] = "highway"
    hidden: int = Field(default=64, ge=1, le=4096)
    """units. K of the paper"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """dropout of hidden units"""


class LinearRankerConfig(_Ranker):
    """The inner product of the features with trained weights."""

    kind: Literal["linear"] = "linear"


RankerConfig = HighwayConfig | LinearRankerConfig
RANKER_CONFIG: Form[RankerConfig] = Form(Annotated[RankerConfig, Field(discriminator="kind"), default_kind("highway")])


def ranker_config(file: Path | None = None, **overrides: Any) -> RankerConfig:
    """The configuration in a file, or the default one, with `overrides` that are not None. Raises InvalidConfig."""
    overrides = {key: value for key, value in overrides.items() if value is not None}
    return RANKER_CONFIG.checked(({} if file is None else read_toml(file)) | overrides)
