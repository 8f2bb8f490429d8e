"""The configuration of a tree model over users' lists: keys, defaults and limits of each kind.

Paths in the file are relative to the current directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from espalier.content_info import MOST_FEATURES
from espalier.errors import MISSING, InvalidConfig
from espalier.logs.log_values import DATED
from espalier.manifest import ModelName
from espalier.queries import MAX_HISTORY

from ..specification.log_format import CsvFormat, LogFormat, TableFormat, TextTable, VectorsFormat
from ..specification.networks import (
    OptimiserConfig,
    ProductScorer,
    Scorer,
    SequenceInstances,
    SequenceObjective,
    SequenceOptimiser,
    SequenceScorer,
)
from ..specification.sections import SHARE, SearchLimits, Section, auto_or, auto_or_integer, default_kind, number_of
from ..specification.splits import DateSplit, LastSplit, SplitConfig, UserSplit, microseconds

PAPER_WINDOWS = (20, 20, 10, 10, 2, 2, 2, 1, 1, 1)
"""Window lengths, old to recent, of TDM, JTM and OTM: 69 behaviours."""


class DataConfig(Section):
    """The log, the item table, and what is held out for measuring."""

    log: Path
    """the log. `--data` reads another one"""
    items: Path | None = None
    """item table. Parquet or text"""
    items_id: str = "id"
    """column of its ids"""
    items_format: TextTable = TextTable()
    """how `data.items` is read, if it is text"""
    format: LogFormat = CsvFormat()
    split: SplitConfig = UserSplit()

    @model_validator(mode="after")
    def _log_can_be_split(self) -> DataConfig:
        if isinstance(self.split, LastSplit) and self.format.order == "none":
            raise InvalidConfig("data.split.kind", "last", "another kind, since data.format.order is none: no item is the last one")
        if isinstance(self.split, DateSplit):
            if self.format.timestamp is None:
                raise InvalidConfig("data.split.kind", "date", "another kind, since data.format.timestamp names no column")
            self._check_times(self.split)
        return self

    def _check_times(self, split: DateSplit) -> None:
        """Raise InvalidConfig for a time of another form than the log's times."""
        dated = isinstance(self.format, TableFormat) and self.format.timestamp_type in DATED
        for name in ("validation_from", "test_from"):
            value = getattr(split, name)
            if value is None:
                continue
            if isinstance(value, str) != dated:
                expected = "an ISO 8601 date and time" if dated else "a number"
                raise InvalidConfig(f"data.split.{name}", value, f"{expected}, as the log's timestamps are")
            if isinstance(value, str):
                try:
                    microseconds(value)
                except ValueError as error:
                    raise InvalidConfig(f"data.split.{name}", value, "an ISO 8601 date and time") from error


class InstanceConfig(Section):
    """How a user's list becomes a training instance: a history and its targets."""

    windows: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=PAPER_WINDOWS, min_length=1)
    """history window lengths, old to recent. Their sum is the history length. Lists without an order want one window"""
    split: Literal["half", "random"] = "random"
    """where a list is cut: `"half"` or `"random"`. `"half"`: the first half of the list is the history (OTM). `"random"`: another position
    each time the user is drawn"""
    targets: int = Field(default=1, ge=1)
    """largest number of targets. 1 is the next item (TDM). Long lists, and lists without an order, want several"""
    cold_share: float = Field(default=0.02, ge=0, lt=1)
    """share of training examples without a history"""

    @field_validator("windows")
    @classmethod
    def _not_too_long(cls, windows: tuple[int, ...]) -> tuple[int, ...]:
        if sum(windows) > MAX_HISTORY:
            raise ValueError(f"windows of at most {MAX_HISTORY} places together")
        return windows


# -- trees ----------------------------------------------------------------------------------------------------------------


BINARY_ITEMS = 1 << 15
"""Larger catalogues get wider trees: with few inner nodes besides the leaves, instead of as many, and with a third of the levels."""
WIDE = range(4, 13)


class _Tree(Section):
    branching: Annotated[Literal["auto"] | int, auto_or_integer(2, 256)] = "auto"
    """children of a node, or `"auto"`. `"auto"`: 2 up to 32,768 items, else from 4 to 12, the number with the fewest nodes; in trees of
    `earlier_model` as many as there"""

    def children(self, items: int) -> int:
        """The most children of a node in a new tree of so many items."""
        if self.branching != "auto":
            return self.branching
        return 2 if items <= BINARY_ITEMS else min(WIDE, key=lambda branching: _inner_nodes(items, branching))


def _inner_nodes(items: int, branching: int) -> int:
    """The number of inner nodes of a tree whose levels above the leaves are full."""
    nodes, level = 0, 1
    while level < items:
        nodes += level
        level *= branching
    return nodes


class RandomTree(_Tree):
    """Items in random order."""

    kind: Literal["random"] = "random"


class CategoryTree(_Tree):
    """Items by category."""

    kind: Literal["category"] = "category"


class KMeansTree(_Tree):
    """Balanced k-means over co-occurrence embeddings, or over the leaf rows of `earlier_model`."""

    kind: Literal["kmeans"] = "kmeans"


class TreeOfEarlierModel(_Tree):
    """A tree whose nodes are those of `earlier_model`."""

    kind: str
    gap: int = Field(default=7, ge=1)
    """levels matched at once (d of JTM's Algorithm 2). Fewer where a node would have over 256 descendants"""
    samples: int = Field(default=200_000, ge=1)
    """largest number of events that assign items"""


class EarlierTree(TreeOfEarlierModel):
    """The tree of `earlier_model`."""

    kind: Literal["earlier"] = "earlier"


class JtmTree(TreeOfEarlierModel):
    """The tree of `earlier_model` with its items assigned anew by that model (JTM)."""

    kind: Literal["jtm"] = "jtm"
    gamma: float | None = Field(default=None, ge=0, le=1)
    """γ of the ranks that assign items. 0 is JTM as published, the default the earlier model's"""
    rounds: int = Field(default=1, ge=1)
    """rounds of assigning items and training"""


Tree = Annotated[RandomTree | CategoryTree | KMeansTree | EarlierTree | JtmTree, Field(discriminator="kind"), default_kind("kmeans")]


# -- objectives -----------------------------------------------------------------------------------------------------------


class _Negatives(Section):
    negatives: int = Field(default=200, ge=1)
    """random negatives on the leaf level, for `tdm` and warm starts"""
    negative_decay: float = Field(default=0.7, gt=0, le=1)
    """negatives of a level over those of the level below. At least 8 are drawn"""


class _BeamObjective(_Negatives):
    beam_size: int = Field(default=200, ge=1)
    """training beam size. As large as the serving beam is best"""
    gamma: float = Field(default=0.0, ge=0, le=1)
    """γ of the ranks in training"""
    warm_start: float = Field(default=0.0, ge=0, lt=1)
    """share of the steps that train `tdm` first. From scratch, `otm` fails on real logs without it"""


class RobustObjective(_BeamObjective):
    """The softmax over whole levels, estimated from a beam and random nodes."""

    beam_size: int = Field(default=50, ge=1)
    """training beam size"""
    gamma: float = Field(default=0.5, ge=0, le=1)
    random_nodes: int = Field(default=50, ge=1)
    """random nodes per level. They estimate the sum over the nodes outside the beam"""
    level_decay: float = Field(default=0.7, gt=0, le=1)
    """weight of a level over that of the level below"""


class OtmObjective(_BeamObjective):
    """Cross-entropy on the nodes that a beam visits."""

    random_nodes: int = Field(default=0, ge=0)
    """random nodes per level. OTM Proposition 3"""


class SampledObjective(_BeamObjective):
    """Cross-entropy on 2k random nodes of each level."""


class TdmObjective(_Negatives):
    """Cross-entropy on the targets' ancestors and random negatives."""

    gamma: ClassVar[float] = 0.0


class PathObjective(Section):
    """Cross-entropy on the children of the targets' ancestors; it has no keys."""

    gamma: ClassVar[float] = 0.0


Objective = RobustObjective | OtmObjective | SampledObjective | TdmObjective | PathObjective | SequenceObjective


# -- content and memory --------------------------------------------------------------------------------------------------


class ContentConfig(Section):
    """Attributes and texts of items in the rows of their leaves."""

    columns: Literal["auto"] | tuple[str, ...] = ()
    """item table columns that enter leaf rows, or `"auto"`. `"auto"`: all but `id` that hold strings, lists of strings or numbers. None:
    rows know nothing of content"""
    features: int = Field(default=16_384, ge=16, le=MOST_FEATURES)
    """largest number of features. They are made of the columns: values, then words, by frequency"""
    drop: float = Field(default=0.2, ge=0, lt=1)
    """share of items without their own part in a step. Content alone then finds them"""

    @field_validator("columns", mode="before")
    @classmethod
    def _auto_or_names(cls, columns: object) -> object:
        if isinstance(columns, str) and columns != "auto":
            raise ValueError('"auto" or a list of column names')
        return columns


MOST_NEIGHBOURS = 4096
"""Most neighbours of an item in a bundle."""
LEAST_WEIGHT = 0.001
"""A memory with a smaller weight is within the differences between engines. With far smaller ones it vanishes in float32."""
MOST_WEIGHT = 1_000_000
"""Ranks stop mattering at far smaller weights. A weight above float32 would only fail at the export."""

WEIGHT = auto_or(
    f"0, or a number from {LEAST_WEIGHT} to {MOST_WEIGHT}", lambda weight: weight == 0 or LEAST_WEIGHT <= weight <= MOST_WEIGHT
)


class MemoryConfig(Section):
    """Item neighbours that the search adds to the ranks of a tree: key = rank + weight · memory."""

    neighbours: Annotated[Literal["auto"] | int, auto_or_integer(1, MOST_NEIGHBOURS)] = "auto"
    """neighbours kept per item, 1 to 4096, or `"auto"`. `"auto"`: of 32 to 4096 the fewest that lose at most half a percent"""
    weight: Annotated[Literal["auto"] | float, WEIGHT] = "auto"
    """λ, the weight of the memory, or `"auto"`. From 0.001 to 1,000,000, in units of the mean difference between the first and the last of
    the 200 items that a history's memory ranks highest. 0: no memory. `"auto"`: the best for validation users, or no memory where they do
    not gain more than a standard error"""
    repeat: Literal["auto", "none"] = "auto"
    """`"auto"`: items of the history get a bonus, by how often and how many positions ago they came, or are left out, whichever is best for
    validation users, if it gains more than a standard error; no effect on queries that exclude seen items. `"none"`: they rank like any
    other"""


# -- search --------------------------------------------------------------------------------------------------


class SearchConfig(SearchLimits):
    """Search defaults and limits of the exported model, and γ."""

    gamma: Annotated[Literal["auto"] | float, SHARE] = "auto"
    """γ of the ranks, 0 to 1, or `"auto"`. `"auto"`: the one that finds most for validation users"""
    exclude_seen: bool = True
    """choose and calibrate without the history's items"""


class DeepConfig(Section):
    """A whole training run over a log of users and items. Its kinds differ in the objective."""

    kind: str
    name: ModelName
    """name of the model. The NAME in `--out` overrides it"""
    seed: int = Field(default=1, ge=0, lt=2**32)
    """random seed. Of the split, the tree, the first weights, every batch and every random node"""
    earlier_model: Path | None = None
    """bundle to start from. For `tree.kind` `"earlier"`, `"jtm"` or `"kmeans"` and `scorer.init = "earlier"`. Items are matched by id"""
    data: DataConfig
    instances: InstanceConfig | SequenceInstances
    tree: Tree = KMeansTree()
    scorer: Scorer | SequenceScorer
    objective: Objective
    optimiser: OptimiserConfig | SequenceOptimiser
    search: SearchConfig = SearchConfig()
    content: ContentConfig = ContentConfig()
    memory: MemoryConfig = MemoryConfig()

    @property
    def rounds(self) -> int:
        """How often a tree is built and trained on."""
        return self.tree.rounds if isinstance(self.tree, JtmTree) else 1

    @property
    def history_length(self) -> int:
        """The most items of a history. Raises InvalidConfig if it has not been read from the log yet."""
        if isinstance(self.instances, InstanceConfig):
            return sum(self.instances.windows)
        length: Literal["auto"] | int = getattr(self.scorer, "length", "auto")
        return number_of("scorer.length", length)

    @property
    def windowed_instances(self) -> InstanceConfig:
        """Instances for models with windowed histories, such as baselines."""
        if isinstance(self.instances, InstanceConfig):
            return self.instances
        return InstanceConfig(targets=self.instances.targets, cold_share=self.instances.cold_share)

    @property
    def is_softmax(self) -> bool:
        """Whether a level's ranks are the log of a probability up to a constant: the objective is a softmax over the level."""
        return isinstance(self.objective, RobustObjective | SequenceObjective)

    @property
    def ranks_by_path_product(self) -> bool:
        """Whether conditional probabilities are trained, and the search ranks by their product along the path."""
        return isinstance(self.objective, PathObjective)

    @model_validator(mode="after")
    def _content_has_a_place(self) -> DeepConfig:
        if self.content.columns and isinstance(self.data.format, VectorsFormat):
            raise InvalidConfig("content.columns", self.content.columns, "none, since data.format.format is vectors")
        return self

    @model_validator(mode="after")
    def _category_known(self) -> DeepConfig:
        if isinstance(self.tree, CategoryTree):
            if not isinstance(self.data.format, TableFormat):
                expected = (
                    f"another kind, since data.format.format is {self.data.format.format} and {self.data.format.format} have no categories"
                )
                raise InvalidConfig("tree.kind", self.tree.kind, expected)
            if self.data.format.category is None:
                raise InvalidConfig("data.format.category", MISSING, "a column, since tree.kind is category")
        return self

    @model_validator(mode="before")
    @classmethod
    def _vectors_have_seen_nothing(cls, raw: object) -> object:
        """Set `search.exclude_seen` to false for vectors, unless it is configured."""
        if not isinstance(raw, dict) or not _is_of_vectors(raw.get("data")) or not isinstance(search := raw.get("search", {}), dict):
            return raw
        return raw | {"search": {"exclude_seen": False} | search}

    @model_validator(mode="after")
    def _vectors_have_no_history(self) -> DeepConfig:
        if isinstance(self.data.format, VectorsFormat):
            because = "since data.format.format is vectors and such queries have no history"
            if isinstance(self.scorer, SequenceScorer):
                raise InvalidConfig("kind", self.kind, f"a kind without a sequence encoder, such as otm-robust, {because}")
            if self.scorer.kind not in ("product", "mlp"):
                raise InvalidConfig("scorer.kind", self.scorer.kind, f"product or mlp, {because}")
            if self.search.exclude_seen:
                raise InvalidConfig("search.exclude_seen", True, f"false, {because}")
            if self.memory.weight not in (0, "auto"):
                raise InvalidConfig("memory.weight", self.memory.weight, f'0 or "auto", {because}')
            for key in ("windows", "split", "cold_share"):
                if getattr(self.instances, key) != (default := InstanceConfig.model_fields[key].default):
                    raise InvalidConfig(f"instances.{key}", getattr(self.instances, key), f"its default {default!r}, {because}")
        return self

    @model_validator(mode="after")
    def _earlier_model_fits(self) -> DeepConfig:
        tree = self.tree.kind
        if self.earlier_model is None and isinstance(self.tree, TreeOfEarlierModel):
            raise InvalidConfig("earlier_model", None, f"a bundle, since tree.kind is {tree}")
        if self.scorer.init == "earlier" and not isinstance(self.tree, TreeOfEarlierModel):
            raise InvalidConfig("tree.kind", tree, "earlier or jtm, since scorer.init is earlier and node rows belong to nodes")
        if self.earlier_model is not None and not isinstance(self.tree, KMeansTree | TreeOfEarlierModel):
            raise InvalidConfig("tree.kind", tree, "earlier, jtm or kmeans, since there is an earlier_model")
        if self.rounds > 1 and self.scorer.init != "earlier":
            raise InvalidConfig("scorer.init", self.scorer.init, "earlier, since with tree.rounds training goes on from round to round")
        return self


def _is_of_vectors(data: object) -> bool:
    format_ = data.get("format") if isinstance(data, dict) else None
    return isinstance(format_, dict) and format_.get("format") == "vectors"


class WindowConfig(DeepConfig):
    """A model that reads a history in windows, trained on instances."""

    instances: InstanceConfig = InstanceConfig()
    scorer: Scorer = ProductScorer()
    optimiser: OptimiserConfig = OptimiserConfig()


# -- kinds ----------------------------------------------------------------------------------------------------------------


class OtmRobustConfig(WindowConfig):
    """The softmax over whole levels, estimated from a training beam: for query vectors."""

    kind: Literal["otm-robust"]
    objective: RobustObjective = RobustObjective()


class SequenceConfig(DeepConfig):
    """The softmax of `otm-robust` at every position of a list, with a sequence encoder: the recipe for lists, with an order or without."""

    kind: Literal["otm-sequence"]
    instances: SequenceInstances = SequenceInstances()
    scorer: Annotated[SequenceScorer, default_kind("sequence")] = SequenceScorer()
    objective: SequenceObjective = SequenceObjective()
    optimiser: SequenceOptimiser = SequenceOptimiser()
    refit: bool = True
    """train a second time on the validation events too, if `data.split.kind` is `"last"` or `"date"` and lists grow by 3 %. Once everything
    is chosen: as many steps, in as much time; the model then knows the latest events"""

    @model_validator(mode="after")
    def _rows_are_shared_alike(self) -> SequenceConfig:
        shares = len(self.scorer.readers(self.data.format.order != "none")) * self.scorer.heads
        for node_dim in (128, 256) if self.scorer.node_dim == "auto" else (self.scorer.node_dim,):
            if node_dim % shares:
                raise InvalidConfig("scorer.node_dim", self.scorer.node_dim, f"a multiple of {shares}: encoders, times scorer.heads")
        return self


class OtmConfig(WindowConfig):
    """OTM as published: the nodes of a training beam, with labels that say what beam search should keep."""

    kind: Literal["otm"]
    objective: OtmObjective = OtmObjective()


class OtmNoBeamSearchConfig(WindowConfig):
    """OTM's ablation −BS: random nodes instead of a training beam."""

    kind: Literal["otm-no-bs"]
    objective: SampledObjective = SampledObjective()


class OtmNoOptimalTestConfig(WindowConfig):
    """OTM's ablation −OptEst: a node's label says whether a target lies below."""

    kind: Literal["otm-no-optest"]
    objective: OtmObjective = OtmObjective()


class TdmConfig(WindowConfig):
    """TDM: every node a classifier of its own, with random negatives."""

    kind: Literal["tdm"]
    objective: TdmObjective = TdmObjective()


class _PathProductConfig(WindowConfig):
    objective: PathObjective = PathObjective()

    @model_validator(mode="after")
    def _ranks_by_the_product(self) -> _PathProductConfig:
        if self.search.gamma not in ("auto", 1.0):
            raise InvalidConfig("search.gamma", self.search.gamma, f'1 or "auto", since {self.kind} ranks by path products')
        return self


class PltConfig(_PathProductConfig):
    """PLT: every node's probability given its parent; the search ranks by their product along the path."""

    kind: Literal["plt"]


class HsmConfig(_PathProductConfig):
    """HSM: PLT with one target an instance."""

    kind: Literal["hsm"]


COUNTED_HISTORY = 1000
"""Most items of a history that a model of neighbours reads. In lists with an order, weights end before that."""


class CountedMemory(MemoryConfig):
    """Item neighbours, which outweigh the ranks of a tree."""

    FIXED: ClassVar = ("weight",)
    weight: Annotated[Literal["auto"] | float, WEIGHT] = float(MOST_WEIGHT)


class CountedSearch(SearchConfig):
    """Search defaults and limits of the exported model."""

    FIXED: ClassVar = ("gamma",)
    gamma: Annotated[Literal["auto"] | float, SHARE] = 0.0


class NeighboursConfig(WindowConfig):
    """Tuned item neighbours in an untrained tree: a beam of at least m finds the best neighbours, then popular items."""

    FIXED: ClassVar = ("earlier_model", "instances", "scorer", "objective", "optimiser", "content")
    kind: Literal["neighbours"]
    instances: InstanceConfig = InstanceConfig(windows=(COUNTED_HISTORY,))
    scorer: Scorer = ProductScorer(node_dim=2, hidden=(), dtype="float32")
    objective: TdmObjective = TdmObjective()
    search: CountedSearch = CountedSearch()
    memory: CountedMemory = CountedMemory()
    refit: bool = True
    """count a second time with the validation events, if `data.split.kind` is `"last"` or `"date"` and lists grow by 3 %. Once everything
    is chosen"""

    @model_validator(mode="before")
    @classmethod
    def _counts_lists_of_users(cls, raw: object) -> object:
        """Checked before the checks of trained kinds, whose errors would name keys that this kind does not have."""
        if isinstance(raw, dict) and _is_of_vectors(raw.get("data")):
            raise InvalidConfig("kind", raw.get("kind"), "a kind for vectors, such as otm-robust, since data.format.format is vectors")
        tree = raw.get("tree") if isinstance(raw, dict) else None
        if isinstance(tree, dict) and tree.get("kind") in ("earlier", "jtm"):
            raise InvalidConfig(
                "tree.kind", tree["kind"], "random, category or kmeans, since kind neighbours goes on from no earlier model"
            )
        return raw


DeepKinds = (
    OtmRobustConfig
    | SequenceConfig
    | OtmConfig
    | OtmNoBeamSearchConfig
    | OtmNoOptimalTestConfig
    | TdmConfig
    | PltConfig
    | HsmConfig
    | NeighboursConfig
)
