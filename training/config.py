"""The training configuration: one TOML file, checked on reading.

Knows keys, defaults and limits. Paths in the file are relative to the current directory.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from espalier.errors import InvalidConfig
from espalier.manifest import ModelName
from espalier.queries import MAX_HISTORY
from training.data.log_files import LogFormat
from training.scorers.encoders import PAPER_WINDOWS


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(_Section):
    """The log, the optional item table (Parquet with a column `id`), and the split into users."""

    log: Path
    items: Path | None = None
    format: LogFormat = LogFormat()
    test_share: float = Field(default=0.1, ge=0, lt=1)
    validation_share: float = Field(default=0.1, gt=0, lt=1)

    @model_validator(mode="after")
    def _leaves_training_users(self) -> DataConfig:
        if self.test_share + self.validation_share >= 1:
            raise InvalidConfig(
                "data.validation_share", self.validation_share, f"less than {1 - self.test_share:g}, 1 less data.test_share"
            )
        return self


class InstanceConfig(_Section):
    """How users become training instances.

    windows      history window lengths, old to recent; their sum is the history length T
    split        `half`: each user's first half is the query (OTM); `random`: a new random place every time the user is drawn
    targets      at most so many targets an instance; 1 = the next item, the single-target setting of TDM
    cold_share   share of instances with an empty history, so that cold users get a trained answer
    """

    windows: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=PAPER_WINDOWS, min_length=1)
    split: Literal["half", "random"] = "random"
    targets: int = Field(default=50, ge=1)
    cold_share: float = Field(default=0.02, ge=0, lt=1)

    @field_validator("windows")
    @classmethod
    def _not_too_long(cls, windows: tuple[int, ...]) -> tuple[int, ...]:
        if sum(windows) > MAX_HISTORY:
            raise ValueError(f"windows of at most {MAX_HISTORY} places together")
        return windows


class TreeConfig(_Section):
    """The tree: items in random order, by category, or by balanced k-means.

    branching      children of a node
    embedding_dim  k-means: width of the co-occurrence embeddings
    earlier_model  k-means: a bundle whose leaf rows take the place of the co-occurrence embeddings (items matched by id)
    """

    kind: Literal["random", "category", "kmeans"] = "kmeans"
    branching: int = Field(default=2, ge=2, le=256)
    embedding_dim: int = Field(default=64, ge=1)
    earlier_model: Path | None = None


class ScorerConfig(_Section):
    """The node scorer: the papers' network, or an inner product.

    init      node rows at the start: `embeddings`, the mean of the co-occurrence embeddings of the items below, or `random`
    init_std  their root mean square
    """

    kind: Literal["mlp", "linear"] = "mlp"
    node_dim: int = Field(default=24, ge=2)
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(128, 64, 24), min_length=1)
    init: Literal["embeddings", "random"] = "embeddings"
    init_std: float = Field(default=0.3, gt=0)
    dtype: Literal["float32", "float16"] = "float32"


class ObjectiveConfig(_Section):
    """What is minimised.

    kind            `tdm`, `plt` or `otm`
    beam_size       otm: the training beam k
    gamma           otm: γ of the training beam
    labels          otm: `best-child` is ẑ of Eq. 15; `any-below` is 1 where any target lies below (the paper's ablation "−OptEst")
    warm_start      otm: share of the steps that train `tdm` first
    random_nodes    otm: random nodes added on each level (OTM Proposition 3)
    negatives       tdm: negatives on the last level; each level above has `negative_decay` times as many, at least 8
    """

    kind: Literal["tdm", "plt", "otm"] = "otm"
    beam_size: int = Field(default=200, ge=1)
    gamma: float = Field(default=0.0, ge=0, le=1)
    labels: Literal["best-child", "any-below"] = "best-child"
    warm_start: float = Field(default=0.0, ge=0, lt=1)
    random_nodes: int = Field(default=0, ge=0)
    negatives: int = Field(default=200, ge=1)
    negative_decay: float = Field(default=0.7, gt=0, le=1)


class OptimiserConfig(_Section):
    """Adam with a linear decay to 0.

    precision   of matrix products; weights stay float32. `auto` takes bfloat16 where the device computes in it, else float32
    """

    steps: int = Field(default=2000, ge=1)
    batch: int = Field(default=100, ge=1)
    learning_rate: float = Field(default=1e-2, gt=0)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    checkpoint_every: int = Field(default=500, ge=1)


class SearchConfig(_Section):
    """Search defaults and limits of the exported model.

    min_beam_size  down to which the service may shrink a beam when a deadline is near; none: never
    gamma          γ of the ranking, or "auto": the value with the best recall@m of validation users
    exclude_seen   whether that choice (and the calibration of scores) leaves out the items of the history
    """

    beam_size: int = Field(default=200, ge=1)
    m: int = Field(default=50, ge=1)
    max_beam_size: int = Field(default=1000, ge=1)
    max_m: int = Field(default=1000, ge=1)
    min_beam_size: int | None = Field(default=None, ge=1)
    gamma: Literal["auto"] | float = "auto"
    exclude_seen: bool = True

    @field_validator("gamma", mode="before")
    @classmethod
    def _auto_or_share(cls, gamma: object) -> object:
        if gamma != "auto" and (isinstance(gamma, bool) or not isinstance(gamma, int | float) or not 0 <= gamma <= 1):
            raise ValueError('"auto" or a number from 0 to 1')
        return gamma

    @model_validator(mode="after")
    def _within_limits(self) -> SearchConfig:
        for name in ("beam_size", "m"):
            if getattr(self, name) > getattr(self, f"max_{name}"):
                limit = getattr(self, f"max_{name}")
                raise InvalidConfig(f"search.{name}", getattr(self, name), f"at most search.max_{name}, {limit}")
        return self


class TrainingConfig(_Section):
    """A whole training run. `seed` reproduces it."""

    name: ModelName
    seed: int = Field(default=1, ge=0, lt=2**32)
    data: DataConfig
    instances: InstanceConfig = InstanceConfig()
    tree: TreeConfig = TreeConfig()
    scorer: ScorerConfig = ScorerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    search: SearchConfig = SearchConfig()

    @model_validator(mode="after")
    def _category_known(self) -> TrainingConfig:
        if self.tree.kind == "category" and self.data.format.category is None:
            raise InvalidConfig("data.format.category", None, "a column, since tree.kind is category")
        if self.tree.earlier_model is not None and self.tree.kind != "kmeans":
            raise InvalidConfig("tree.kind", self.tree.kind, "kmeans, since there is a tree.earlier_model")
        if self.objective.kind == "plt" and self.search.gamma not in ("auto", 1.0):
            raise InvalidConfig("search.gamma", self.search.gamma, '1 or "auto", since plt ranks by path products')
        return self


def read_config(file: Path) -> TrainingConfig:
    """Read and check a configuration. Raises InvalidConfig naming the key, its value and what was expected."""
    if not file.is_file():
        raise InvalidConfig("--config", str(file), "a TOML file that exists")
    try:
        raw = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(str(file), str(error), "valid TOML") from error
    return check_config(raw)


def check_config(raw: dict[str, object]) -> TrainingConfig:
    """The configuration that a mapping holds. Raises InvalidConfig."""
    try:
        return TrainingConfig.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "config"
        raise InvalidConfig(key, first["input"], _expectation(first["type"], first["msg"])) from error


def _expectation(kind: str, message: str) -> str:
    """pydantic's message as what was expected."""
    if kind == "extra_forbidden":
        return "no such key; docs/training.md lists them"
    if kind == "missing":
        return "this key, which is required"
    return message.removeprefix("Value error, ").removeprefix("Input should be ")
