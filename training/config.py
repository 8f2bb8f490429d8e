"""The training configuration: one TOML file, checked on reading.

Knows keys, defaults and limits. Paths in the file are relative to the current directory.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from espalier.errors import InvalidConfig
from espalier.manifest import ModelName
from espalier.queries import MAX_HISTORY
from training.data.log_files import LogFormat
from training.deep.scorers.encoders import PAPER_WINDOWS

PATH_PRODUCTS = ("plt", "hsm")
"""Objectives that train conditional probabilities: the search ranks by their product along the path."""
EARLIER_TREES = ("earlier", "jtm")
"""Kinds of tree whose nodes are those of the earlier model."""


Config = TypeVar("Config", bound=BaseModel)


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
    targets: int = Field(default=1, ge=1)
    cold_share: float = Field(default=0.02, ge=0, lt=1)

    @field_validator("windows")
    @classmethod
    def _not_too_long(cls, windows: tuple[int, ...]) -> tuple[int, ...]:
        if sum(windows) > MAX_HISTORY:
            raise ValueError(f"windows of at most {MAX_HISTORY} places together")
        return windows


class TreeConfig(_Section):
    """The tree: items in random order, by category, by balanced k-means, that of an earlier model, or learned by one (JTM).

    branching      children of a node
    embedding_dim  k-means: width of the co-occurrence embeddings
    gap            jtm: levels that are matched at once, d of Alg. 2
    samples        jtm: at most so many events of training users are its samples
    gamma          jtm: γ of the ranks that the tree is learned for; none: the one that the earlier model was trained with. 0 takes each
                   node's own logit, as published; path products have their own
    rounds         jtm: how often learning the tree and training on it alternate
    """

    kind: Literal["random", "category", "kmeans", "earlier", "jtm"] = "kmeans"
    branching: int = Field(default=2, ge=2, le=256)
    embedding_dim: int = Field(default=64, ge=1)
    gap: int = Field(default=7, ge=1)
    samples: int = Field(default=200_000, ge=1)
    gamma: float | None = Field(default=None, ge=0, le=1)
    rounds: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _alternates_with_jtm_only(self) -> TreeConfig:
        if self.rounds > 1 and self.kind != "jtm":
            raise InvalidConfig("tree.rounds", self.rounds, f"1, since tree.kind is {self.kind}")
        return self


class ScorerConfig(_Section):
    """The node scorer: an inner product with a network of the query, the papers' network, or that with TDM's attention unit.

    node_dim          width of a node row; unless given, 128 for `product`, the papers' 24 for the others
    hidden            layers of the network; unless given, 256 for `product`, the papers' 128–64–24 for the others
    dropout           product: share of the inputs of each layer that is 0 in training; unless given, 0.3
    attention_hidden  attention: units of the network that weighs a behaviour
    init              node rows at the start: `embeddings`, the mean of the co-occurrence embeddings of the items below, or `random`;
                      `earlier` takes them, and the weights, from the earlier model
    init_std          their root mean square
    """

    kind: Literal["product", "mlp", "attention"] = "product"
    node_dim: int = Field(default=128, ge=2)
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = (256,)
    dropout: float = Field(default=0.3, ge=0, lt=1)
    attention_hidden: int = Field(default=36, ge=1)
    init: Literal["embeddings", "random", "earlier"] = "embeddings"
    init_std: float = Field(default=0.3, gt=0)
    dtype: Literal["float32", "float16"] = "float32"

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_kind(cls, given: object) -> object:
        if not isinstance(given, dict) or given.get("kind", "product") == "product":
            return given
        return {"node_dim": 24, "hidden": (128, 64, 24), "dropout": 0.0} | given

    @model_validator(mode="after")
    def _fits_the_kind(self) -> ScorerConfig:
        if not self.hidden and self.kind != "product":
            raise InvalidConfig("scorer.hidden", self.hidden, f"at least one layer, since scorer.kind is {self.kind}")
        if self.dropout and self.kind != "product":
            raise InvalidConfig("scorer.dropout", self.dropout, f"0, since scorer.kind is {self.kind}")
        return self


class ObjectiveConfig(_Section):
    """What is minimised.

    kind             `otm-robust`, `otm`, its ablations `otm-no-bs` and `otm-no-optest`, `tdm`, `plt` or `hsm`
    beam_size        otm kinds: the training beam k; unless it is given, 50 in `otm-robust` and 200 in the others
    beam_schedule    otm kinds: `fixed` at k; `random`, log-uniform from k/4 to 4k in each step; `growing` from k/4 to k over the run
    stochastic_beam  otm kinds: the beam is drawn without replacement (Gumbel top-k), not the best
    gamma            otm kinds: γ of the training beam, 0 unless given; in `otm-robust` γ of the ranks that are trained, 0.5
    warm_start       otm kinds: share of the steps that train `tdm` first
    random_nodes     otm kinds: random nodes added on each level (OTM Proposition 3); unless given, 50 in `otm-robust`, 0 in the others
    level_decay      otm-robust: each level counts so many times as much as the one below
    negatives        tdm: negatives on the last level; each level above has `negative_decay` times as many, at least 8
    """

    kind: Literal["otm-robust", "otm", "otm-no-bs", "otm-no-optest", "tdm", "plt", "hsm"] = "otm-robust"
    beam_size: int = Field(default=50, ge=1)
    beam_schedule: Literal["fixed", "random", "growing"] = "fixed"
    stochastic_beam: bool = False
    gamma: float = Field(default=0.5, ge=0, le=1)
    warm_start: float = Field(default=0.0, ge=0, lt=1)
    random_nodes: int = Field(default=50, ge=0)
    level_decay: float = Field(default=0.7, gt=0, le=1)
    negatives: int = Field(default=200, ge=1)
    negative_decay: float = Field(default=0.7, gt=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_kind(cls, given: object) -> object:
        if not isinstance(given, dict) or given.get("kind", "otm-robust") == "otm-robust":
            return given
        return {"beam_size": 200, "random_nodes": 0, "gamma": 0.0} | given

    @model_validator(mode="after")
    def _means_something(self) -> ObjectiveConfig:
        if self.gamma and not self.kind.startswith("otm"):
            raise InvalidConfig(
                "objective.gamma", self.gamma, f"0, since {self.kind} trains none; search.gamma is what a model is served with"
            )
        if self.kind == "otm-robust" and self.random_nodes == 0:
            raise InvalidConfig("objective.random_nodes", 0, "at least 1, since otm-robust estimates whole levels with them")
        return self


class OptimiserConfig(_Section):
    """Adam with a linear decay to 0 at `steps`; weights are averaged, and those with the best recall of validation users are kept.

    steps           at most
    average         steps over which the weights that are validated and kept are averaged, exponentially; 1: they are those of the step
    validate_every  steps between two measurements of recall@`search.m` on at most 1,000 validation users
    patience        measurements without a better one after which training ends
    batch           instances of an update, over all processes together
    precision       of matrix products; weights stay float32. `auto` takes bfloat16 where the device computes in it, else float32
    """

    steps: int = Field(default=2000, ge=1)
    batch: int = Field(default=256, ge=1)
    learning_rate: float = Field(default=2e-3, gt=0)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    average: int = Field(default=200, ge=1)
    validate_every: int = Field(default=100, ge=1)
    patience: int = Field(default=8, ge=1)
    checkpoint_every: int = Field(default=500, ge=1)


class SearchLimits(_Section):
    """Search defaults and limits of an exported model.

    min_beam_size  down to which the service may shrink a beam when a deadline is near; none: never
    """

    beam_size: int = Field(default=200, ge=1)
    m: int = Field(default=50, ge=1)
    max_beam_size: int = Field(default=1000, ge=1)
    max_m: int = Field(default=1000, ge=1)
    min_beam_size: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _within_limits(self) -> SearchLimits:
        for name in ("beam_size", "m"):
            if getattr(self, name) > getattr(self, f"max_{name}"):
                limit = getattr(self, f"max_{name}")
                raise InvalidConfig(f"search.{name}", getattr(self, name), f"at most search.max_{name}, {limit}")
        return self


class SearchConfig(SearchLimits):
    """Search defaults and limits, and γ.

    gamma         γ of the ranking, or "auto": the value with the best recall@m of validation users
    exclude_seen  whether that choice (and the calibration of scores) leaves out the items of the history
    """

    gamma: Literal["auto"] | float = "auto"
    exclude_seen: bool = True

    @field_validator("gamma", mode="before")
    @classmethod
    def _auto_or_share(cls, gamma: object) -> object:
        if gamma != "auto" and (isinstance(gamma, bool) or not isinstance(gamma, int | float) or not 0 <= gamma <= 1):
            raise ValueError('"auto" or a number from 0 to 1')
        return gamma


class TrainingConfig(_Section):
    """A whole training run. `seed` reproduces it.

    earlier_model  a bundle that `tree.kind` "earlier", "jtm" or "kmeans" and `scorer.init` "earlier" start from; items are matched by id
    """

    name: ModelName
    seed: int = Field(default=1, ge=0, lt=2**32)
    earlier_model: Path | None = None
    data: DataConfig
    instances: InstanceConfig = InstanceConfig()
    tree: TreeConfig = TreeConfig()
    scorer: ScorerConfig = ScorerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    search: SearchConfig = SearchConfig()

    @model_validator(mode="after")
    def _category_known(self) -> TrainingConfig:
        if self.tree.kind == "category" and self.data.format.format == "lists":
            raise InvalidConfig("tree.kind", self.tree.kind, "another kind, since data.format.format is lists and lists have no categories")
        if self.tree.kind == "category" and self.data.format.category is None:
            raise InvalidConfig("data.format.category", None, "a column, since tree.kind is category")
        if self.objective.kind in PATH_PRODUCTS and self.search.gamma not in ("auto", 1.0):
            raise InvalidConfig("search.gamma", self.search.gamma, f'1 or "auto", since {self.objective.kind} ranks by path products')
        return self

    @model_validator(mode="after")
    def _earlier_model_fits(self) -> TrainingConfig:
        if self.earlier_model is None and self.tree.kind in EARLIER_TREES:
            raise InvalidConfig("earlier_model", None, f"a bundle, since tree.kind is {self.tree.kind}")
        if self.scorer.init == "earlier" and self.tree.kind not in EARLIER_TREES:
            raise InvalidConfig("tree.kind", self.tree.kind, "earlier or jtm, since scorer.init is earlier and node rows belong to nodes")
        if self.earlier_model is not None and self.tree.kind not in ("kmeans", *EARLIER_TREES):
            raise InvalidConfig("tree.kind", self.tree.kind, "earlier, jtm or kmeans, since there is an earlier_model")
        if self.tree.rounds > 1 and self.scorer.init != "earlier":
            raise InvalidConfig("scorer.init", self.scorer.init, "earlier, since with tree.rounds training goes on from round to round")
        return self


def read_toml(file: Path) -> dict[str, object]:
    """A configuration as it stands in its file. Raises InvalidConfig."""
    if not file.is_file():
        raise InvalidConfig("--config", str(file), "a TOML file that exists")
    try:
        return tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(str(file), str(error), "valid TOML") from error


def read_config(file: Path) -> TrainingConfig:
    """Read and check a configuration. Raises InvalidConfig naming the key, its value and what was expected."""
    return check_config(read_toml(file))


def check_config(raw: dict[str, object]) -> TrainingConfig:
    """The configuration that a mapping holds. Raises InvalidConfig."""
    return checked(TrainingConfig, raw)


def checked(kind: type[Config], raw: dict[str, object]) -> Config:
    """A configuration of some kind that a mapping holds. Raises InvalidConfig naming the key, its value and what was expected."""
    try:
        return kind.model_validate(raw)
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
