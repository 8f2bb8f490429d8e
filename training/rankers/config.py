"""The configuration of a ranker: rank function, loss, and how it is trained. The defaults are the NCE paper's for its small set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from espalier.errors import InvalidConfig
from training.config import read_toml

Function = Literal["linear", "highway"]
Ties = Literal["random", "marginal"]
ChoiceModel = Literal["elimination", "plackett-luce"]
Scaling = Literal["z-score", "quantile"]


@dataclass(frozen=True)
class RankerConfig:
    """What is trained, and how.

    function         `linear`: ⟨w, x⟩, or `highway`: a highway network
    loss             `elimination` (NCE Eq. 5) or `plackett-luce` (Eq. 2)
    ties             items of one grade: `random`, an order drawn anew in every epoch, or `marginal`, all orders together
    top_k            the order beyond so many places does not count; None: all count. With random ties only
    scaling          of features on training rows: `z-score` (the paper), or `quantile`, a piecewise linear map to the normal distribution
    missing          whether each feature that has missing values gets a second one, which says so
    hidden, layers   highway: units K, and layers L, of which L − 1 share their weights
    visible_dropout, dropout   highway: share of features, and of hidden units, that are dropped for an item in training
    max_norm         highway: no unit's incoming weights are longer; None: no limit
    init_std         standard deviation of the first weights; the paper says "small"
    optimizer        `sgd` (the paper) or `adam`
    learning_rate    at first; halved after an epoch in which the training loss did not improve
    least_rate       training ends when the rate falls below
    weight_decay     of all weights but biases, a step shrinks them by rate · decay
    average          the weights that count are a running mean over about so many epochs; 0: the last ones
    batch_queries    queries of a step; the loss is the mean over them of each one's mean over its items
    max_epochs       at most so many
    patience         with validation queries: epochs without a better NDCG on them after which training ends; None: only the rate ends it
    validate_at      k of that NDCG@k
    seed             of first weights, order of queries, dropout and ties
    """

    function: Function = "highway"
    loss: ChoiceModel = "elimination"
    ties: Ties = "random"
    top_k: int | None = None
    scaling: Scaling = "z-score"
    missing: bool = False
    hidden: int = 10
    layers: int = 3
    visible_dropout: float = 0.0
    dropout: float = 0.3
    max_norm: float | None = 1.0
    init_std: float = 0.1
    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = 0.1
    least_rate: float = 1e-4
    weight_decay: float = 0.0
    average: float = 0.0
    batch_queries: int = 2
    max_epochs: int = 200
    patience: int | None = None
    validate_at: int = 10
    seed: int = 1

    def __post_init__(self) -> None:
        choices = {
            "function": ("linear", "highway"),
            "loss": ("elimination", "plackett-luce"),
            "ties": ("random", "marginal"),
            "scaling": ("z-score", "quantile"),
            "optimizer": ("sgd", "adam"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise InvalidConfig(name, getattr(self, name), " or ".join(known))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in choices or (value is None and field.name in ("top_k", "max_norm", "patience")):
                continue
            whole = field.type in ("int", "int | None")
            if field.type == "bool":
                if not isinstance(value, bool):
                    raise InvalidConfig(field.name, value, "true or false")
            elif isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise InvalidConfig(field.name, value, "a whole number" if whole else "a number")
        for name in ("top_k", "hidden", "layers", "batch_queries", "max_epochs", "patience", "validate_at"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidConfig(name, value, "at least 1")
        for name in ("init_std", "learning_rate", "least_rate", "max_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidConfig(name, value, "a positive number")
        for name in ("weight_decay", "average", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidConfig(name, getattr(self, name), "at least 0")
        for name in ("visible_dropout", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise InvalidConfig(name, getattr(self, name), "at least 0 and below 1")
        if self.top_k is not None and self.ties == "marginal":
            raise InvalidConfig("top_k", self.top_k, "none, since ties is marginal")


STAGE_DEFAULTS: Mapping[str, Any] = {
    "hidden": 64,
    "dropout": 0.0,
    "optimizer": "adam",
    "learning_rate": 3e-3,
    "batch_queries": 16,
    "max_epochs": 50,
    "patience": 5,
}
"""Where `fit-ranker` differs from the paper: chosen on validation users (benchmarks/results, reranking), and several times faster."""


def ranker_config(file: Path | None, given: Mapping[str, Any]) -> RankerConfig:
    """The second stage's defaults, the options of a TOML file, and those given beside it, which may not be in it too.

    Raises InvalidConfig naming the key.
    """
    options: dict[str, Any] = {} if file is None else read_toml(file)
    known = [field.name for field in fields(RankerConfig)]
    for name in options:
        if name not in known or name in given:
            raise InvalidConfig(f"{file}, {name}", options[name], f"one of {', '.join(key for key in known if key not in given)}")
    return RankerConfig(**{**STAGE_DEFAULTS, **options, **given})
