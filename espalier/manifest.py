"""The manifest: what a bundle says about itself, in JSON.

Knows the fields and their limits. Does not know how files are written or read.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, field_validator, model_validator

from espalier.bundle_files import sha256_of
from espalier.content_info import ContentInfo
from espalier.queries import FeaturesKind, HistoryKind, QueryKind, TextKind
from espalier.rank_features import HISTORY, TEXT, check_names, needs_node_rows
from espalier.tree import Tree

FORMAT: Literal["espalier-bundle"] = "espalier-bundle"
SCHEMA_VERSION: Literal[1] = 1
"""The only version that is written and read."""

NAME = "[a-z0-9][a-z0-9._-]{0,63}"
"""Pattern for names of models and of files in a bundle, which cannot be paths."""
ModelName = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]
PartName = ModelName
MAX_BEAM = 1 << 24
"""Largest beam size and m. Engines allocate arrays of these sizes."""
MAX_TREES = 16
"""Most trees of a forest: a query searches every tree."""
MAX_SEQUENCE = (1 << 63) - 1
"""Largest sequence number of an operation on live items."""
MAX_SHARDS = 4096
"""Most shards of a bundle."""
MAX_STACKED = 1024
"""Most candidates that stacking reorders."""
MAX_KNOTS = 16
"""Most knots of a calibration: each adds a comparison to every score."""
LARGEST = float(np.finfo(np.float32).max)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TreeInfo(_Strict):
    """Sizes of the tree; `max_children[h]` is the largest number of children on level h."""

    levels: int = Field(ge=2, le=64)
    nodes: int = Field(ge=2)
    leaves: int = Field(ge=1)
    items: int = Field(ge=1)
    max_children: tuple[int, ...]

    @staticmethod
    def of(tree: Tree) -> TreeInfo:
        """The sizes of a tree."""
        return TreeInfo(
            levels=tree.height + 1, nodes=tree.node_count, leaves=tree.leaf_count, items=tree.item_count, max_children=tree.max_children
        )


class InnerProductForm(_Strict):
    """logit = ⟨query state, node row⟩."""

    kind: Literal["inner-product"] = "inner-product"


class MlpForm(_Strict):
    """logit = out(layerₗ(… layer₁(node row, query state))), the arrays named as `espalier.engines.scorer_weights` writes them.

    A layer is x → x · weight + bias, then max(x, 0) + slope · min(x, 0). The state is added to the first layer's sums.
    """

    kind: Literal["mlp"] = "mlp"
    layers: int = Field(ge=1)


ScorerForm = Annotated[InnerProductForm | MlpForm, Field(discriminator="kind")]


class GraphScorer(_Strict):
    """ONNX graphs over node rows [nodes, node_dim] and query states [state_levels, state_dim]; state_levels is levels or 1.

    dtype    type of the stored rows (espalier.node_rows)
    form     the formula of scorer.onnx, for engines with their own kernels; they verify it. None: not declared
    encoder  input of query.onnx for a history: the items' ancestors on each requested level (`levels`), or the items' leaves, in order, for
             the states of all levels in one pass (`sequence`)
    """

    kind: Literal["graphs"] = "graphs"
    dtype: Literal["float32", "float16", "int8"]
    node_dim: int = Field(ge=1)
    state_levels: int = Field(ge=1)
    state_dim: int = Field(ge=1)
    form: ScorerForm | None = None
    encoder: Literal["levels", "sequence"] = "levels"


class LinearScorer(_Strict):
    """Weights of sparse features, stored by parent (espalier.chunks): the numbers of features, rows and weights.

    dtype  of the weights: float16 is packed (espalier.packed_chunks), float32 is not. The manifest leaves float32 out
    """

    kind: Literal["linear"] = "linear"
    features: int = Field(ge=1)
    rows: int = Field(ge=0)
    weights: int = Field(ge=0)
    dtype: Literal["float32", "float16"] = Field(default="float32", exclude_if=lambda dtype: dtype == "float32")


class ForestTree(_Strict):
    """A tree of a forest after the first one: its sizes and those of its scorers."""

    tree: TreeInfo
    scorer: LinearScorer


def _scorer_kind(value: Any) -> Any:
    return value.get("kind", "graphs") if isinstance(value, dict) else getattr(value, "kind", None)


Scorer = Annotated[Annotated[GraphScorer, Tag("graphs")] | Annotated[LinearScorer, Tag("linear")], Discriminator(_scorer_kind)]
Activation = Literal["sigmoid", "l1-hinge", "l2-hinge", "l3-hinge", "l4-hinge"]
"""σ(v), or exp(−max(0, 1 − v)^p) for p = 1 … 4 (PECOS's post-processors)."""


class Calibration(_Strict):
    """score = sigmoid(slope · bent(key) + intercept), fitted on validation queries (Platt 1999); without a memory keys are ranks.

    knots  (key, bent key), both ascending. bent is linear between knots; the first and last pieces extend beyond the ends. Empty:
           bent(key) = key. Used for keys with a memory, which have a heavy tail
    """

    slope: float = Field(gt=0, allow_inf_nan=False)
    intercept: float = Field(allow_inf_nan=False)
    knots: tuple[tuple[float, float], ...] = Field(default=(), max_length=MAX_KNOTS)

    @field_validator("knots")
    @classmethod
    def _knots_ascend(cls, knots: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        if len(knots) == 1:
            raise ValueError("expected none, or at least 2: one has no slope")
        for knot in knots:
            if not all(abs(value) <= LARGEST for value in knot):  # NaN fails too
                raise ValueError(f"expected finite float32 numbers, got {knot}")
        for (key, value), (next_key, next_value) in pairwise(knots):
            if not (key < next_key and value < next_value):
                raise ValueError(f"expected ascending keys and values, got {(key, value)} before {(next_key, next_value)}")
        return knots


class Ranking(_Strict):
    """rank(n) = own(n) + gamma · rank(parent(n)), rank(root) = 0.

    own = the logit, or the log of the activation; only linear scorers have hinges. `node` models (TDM, JTM, OTM as published):
    logit, gamma 0. `path` models (PLT, HSM, XR-Linear as published): log activation, gamma 1; linear scorers may discount it.
    `discounted`: logit, 0 < gamma < 1, with a calibration that maps ranks to scores.
    """

    activation: Activation = "sigmoid"
    own: Literal["logit", "log_activation"]
    gamma: float = Field(ge=0, le=1)
    calibration: Calibration | None = None


SMALLEST_BEAM = 10


class SearchDefaults(_Strict):
    """Defaults and limits of the search knobs; over a limit is an error, never clamped.

    min_beam_size  down to which a service may shrink a beam when the deadline is near; None: to SMALLEST_BEAM
    """

    beam_size: int = Field(ge=1)
    m: int = Field(ge=1)
    max_beam_size: int = Field(ge=1)
    max_m: int = Field(ge=1)
    min_beam_size: int | None = Field(default=None, ge=1)

    @property
    def smallest_beam_size(self) -> int:
        return SMALLEST_BEAM if self.min_beam_size is None else self.min_beam_size

    @field_validator("beam_size", "m", "max_beam_size", "max_m")
    @classmethod
    def _has_room(cls, value: int) -> int:
        if value > MAX_BEAM:
            raise ValueError(f"at most {MAX_BEAM}, got {value}")
        return value


class RankerInfo(_Strict):
    """ranker.onnx, which reorders the best candidates of a search.

    features   its input's columns (espalier.rank_features)
    depth      default number of candidates that are re-ranked; max_depth: most that a request may have re-ranked
    training   how it was trained, and its measured effect
    """

    features: tuple[str, ...] = Field(min_length=1)
    depth: int = Field(ge=1)
    max_depth: int = Field(ge=1)
    training: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names_are_known(self) -> RankerInfo:
        check_names(self.features)
        if self.depth > self.max_depth:
            raise ValueError(f"a depth of {self.depth} exceeds the limit, {self.max_depth}")
        return self


Bonus = Annotated[float, Field(ge=0, le=LARGEST)]


Power = Annotated[float, Field(ge=-4, le=4, allow_inf_nan=False)]


class MemoryFormula(_Strict):
    """How the entries of a memory were computed from lists. A live item's events give entries by the same formula:

    S[a, b] = (M[a, b] / ((n_a + shrink)^row · (n_b + shrink)^column))^power / unit
    M[a, b] = Σ over lists of length^−user · (Σ over b at most `window` items after a of decay^(items between) + back · the same before a)

    n: events of an item (label counts). near, slim: the weights of what lists also add to S, for items with similar users, and by a
    regression with the penalty l2. Events add neither; instead, their entries count 1 + slim times.
    """

    row: Power
    column: Power
    power: float = Field(gt=0, le=4)
    shrink: float = Field(ge=0, le=1e9)
    user: float = Field(ge=0, le=4)
    back: float = Field(ge=0, le=4)
    decay: float = Field(gt=0, le=1)
    window: int = Field(ge=1)
    unit: float = Field(gt=0, le=LARGEST)
    near: float = Field(default=0.0, ge=0, le=1e9)
    slim: float = Field(default=0.0, ge=0, le=1e9)
    l2: float = Field(default=1.0, gt=0, le=1e9)


class MemoryInfo(_Strict):
    """memory.safetensors (espalier.memory): beams are cut and leaves ordered by key = rank + weight · mem.

    weight      λ, a normal float32: engines multiply by it in float32, and some would take a smaller number for 0
    length      number of a history's last items that count
    entries     of the sparse matrix item → item
    occurrence  what each one of an item in the history adds to mem, by how many items came after it: 0, 1, 2–3, 4–7, 8–15, 16 and more
    left_out    for which of these buckets items are excluded, if their last occurrence is in it
    search      `pushed`: by key on every level
    formula     how the entries were computed; None: live items' events add no entries
    """

    weight: float = Field(ge=float(np.finfo(np.float32).tiny), le=LARGEST)
    length: int = Field(ge=1)
    entries: int = Field(ge=0)
    occurrence: tuple[Bonus, Bonus, Bonus, Bonus, Bonus, Bonus] = (0.0,) * 6
    left_out: tuple[bool, bool, bool, bool, bool, bool] = (False,) * 6
    search: Literal["pushed"] = "pushed"
    formula: MemoryFormula | None = None


class TailInfo(_Strict):
    """tail.safetensors (espalier.tail): rank = alpha · log of the forest's score + (1 − alpha) · log of how near the item's points are.

    form     `product` of the query and the item's row, or `gaussian` of their distance, with steepness `gamma`
    entries  of all rows
    """

    form: Literal["product", "gaussian"]
    alpha: float = Field(gt=0, lt=1)
    gamma: float = Field(default=30.0, ge=0, le=1000)
    entries: int = Field(ge=0)


class StackingInfo(_Strict):
    """stacking.safetensors (espalier.stacking): a network reorders the best `candidates` of a search, key = log p + power · log weight.

    points    number of training points that vote
    training  how it was trained, and its measured effect
    """

    candidates: int = Field(ge=1, le=MAX_STACKED)
    power: float = Field(ge=0, le=1)
    points: int = Field(ge=0)
    training: dict[str, Any] = Field(default_factory=dict)


class TrainedItems(_Strict):
    """The items that training, and no fold, made rows for, and what it knew of them.

    items    how many: they are the first ones of the item table
    created  when training published them: without a journal, it may have known everything until then
    through  the last operation of the journal that it was given; None: it had no journal
    """

    items: int = Field(ge=0)
    created: datetime
    through: int | None = Field(default=None, ge=1, le=MAX_SEQUENCE)


class LiveInfo(_Strict):
    """The live items in a version. A service that loads it replays only later operations.

    through      the last operation of the model's journal that is in the tree and item table
    folded_from  the version that the live items were folded into; None if the version was trained with them
    trained      of a fold: the items that were trained; None: all of the version's
    """

    through: int = Field(ge=0, le=MAX_SEQUENCE)
    folded_from: int | None = Field(default=None, ge=1)
    trained: TrainedItems | None = None


class ShardInfo(_Strict):
    """Which shard of which bundle this is; shard.safetensors (espalier.shard_parts) has its items and nodes.

    of, version   name and version of the bundle that was cut
    digest        SHA-256 of its manifest.json
    index, count  shard `index`, from 0, of `count` shards
    items, nodes  of the whole bundle; nodes of its first tree
    """

    of: ModelName
    version: int = Field(ge=1)
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    index: int = Field(ge=0)
    count: int = Field(ge=1, le=MAX_SHARDS)
    items: int = Field(ge=1)
    nodes: int = Field(ge=2)

    @model_validator(mode="after")
    def _index_is_one_of_count(self) -> ShardInfo:
        if self.index >= self.count:
            raise ValueError(f"index: expected 0 to {self.count - 1}, got {self.index}")
        return self


class FileInfo(_Strict):
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    size: int = Field(ge=0)

    @staticmethod
    def of(file: Path) -> FileInfo:
        """The digest and size of a file."""
        return FileInfo(sha256=sha256_of(file), size=file.stat().st_size)


class ManifestDraft(_Strict):
    """The fields that training sets. Tree sizes and file checksums are added when the bundle is written.

    command  the training command, as it was called
    live     the live items in it; left out if the bundle was made without a journal
    shard    which shard of another bundle it is; left out if the bundle is whole
    """

    name: ModelName
    version: int = Field(ge=1)
    algorithm: str
    created: datetime
    query: QueryKind
    ranking: Ranking
    search: SearchDefaults
    training: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[str, Any] = Field(default_factory=dict)
    command: str | None = None
    live: LiveInfo | None = Field(default=None, exclude_if=lambda live: live is None)
    shard: ShardInfo | None = Field(default=None, exclude_if=lambda shard: shard is None)


class Manifest(ManifestDraft):
    """The whole manifest.

    trees     a forest's trees after the first, which `tree` and `scorer` describe; left out if there are none
    tail      item rows for the scores of a forest; left out if there are none
    stacking  the stacker, which reorders the best candidates of linear scorers; left out if there is none
    """

    format: Literal["espalier-bundle"] = FORMAT
    schema_version: Literal[1] = SCHEMA_VERSION
    tree: TreeInfo
    scorer: Scorer
    ranker: RankerInfo | None = None
    memory: MemoryInfo | None = None
    content: ContentInfo | None = None
    trees: tuple[ForestTree, ...] = Field(default=(), max_length=MAX_TREES - 1, exclude_if=lambda trees: not trees)
    tail: TailInfo | None = Field(default=None, exclude_if=lambda tail: tail is None)
    stacking: StackingInfo | None = Field(default=None, exclude_if=lambda stacking: stacking is None)
    files: dict[PartName, FileInfo]

    @property
    def fingerprint(self) -> int:
        """63 bits that tell this version from another one that had its number. A journal knows versions by them."""
        files = [f"{name} {info.sha256}" for name, info in sorted(self.files.items())]
        digest = hashlib.sha256("\n".join([str(self.version), *files]).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    @property
    def result_ranking(self) -> Ranking:
        """The ranking for `scores_of_ranks`, which converts a result's keys to scores. Keys of a forest or a stacker are logs of scores."""
        return Ranking(own="log_activation", gamma=1) if self.trees or self.stacking is not None else self.ranking

    @property
    def trained_items(self) -> TrainedItems:
        """The items that training made rows for, and what it knew of them."""
        live = self.live
        if live is not None and live.trained is not None:
            return live.trained
        return TrainedItems(items=self.tree.items, created=self.created, through=None if live is None else live.through)

    @property
    def history_items(self) -> int:
        """Number of items that histories may have: for a shard, all items of the whole bundle."""
        return self.tree.items if self.shard is None else self.shard.items

    @model_validator(mode="after")
    def _parts_fit(self) -> Manifest:
        self._shard_fits()
        self._graph_parts_fit()
        self._stacking_fits()
        self._kinds_fit()
        self._trees_fit()
        self._content_fits()
        self._ranker_fits()
        return self

    def _shard_fits(self) -> None:
        if self.shard is None:
            return
        for name in ("ranker", "content", "stacking", "live"):
            if getattr(self, name) is not None:
                raise ValueError(f"a shard has no {name}: it belongs to the whole bundle")
        if self.tree.items > self.shard.items or self.tree.nodes > self.shard.nodes:
            shard_size, whole_size = f"{self.tree.items} items on {self.tree.nodes} nodes", f"{self.shard.items} on {self.shard.nodes}"
            raise ValueError(f"a shard of {shard_size} cannot be part of {whole_size}")

    def _graph_parts_fit(self) -> None:
        history = self.query if isinstance(self.query, HistoryKind) else None
        if self.memory is not None:
            if history is None or not isinstance(self.scorer, GraphScorer):
                raise ValueError(f"a memory cannot serve {self.query.kind} queries of {self.scorer.kind} scorers")
            if self.memory.length > history.length:
                raise ValueError(f"a memory of {self.memory.length} items, histories have {history.length}")
        if isinstance(self.scorer, GraphScorer) and self.scorer.encoder == "sequence":
            if history is None:
                raise ValueError(f"a sequence encoder cannot read {self.query.kind} queries")
            if self.scorer.state_levels != self.tree.levels:
                raise ValueError(f"a sequence encoder has {self.tree.levels} states, one for each level, got {self.scorer.state_levels}")
        if isinstance(self.scorer, GraphScorer) and self.scorer.state_levels not in (1, self.tree.levels):
            raise ValueError(f"scorer.state_levels: expected 1, or {self.tree.levels}, the tree's levels, got {self.scorer.state_levels}")

    def _stacking_fits(self) -> None:
        if self.stacking is None:
            return
        if not isinstance(self.scorer, LinearScorer) or self.ranking.own != "log_activation":
            raise ValueError(f"stacking orders candidates by scores of linear scorers, got {self.scorer.kind} with {self.ranking.own}")
        if self.tail is not None:
            raise ValueError("stacking and a tail both order candidates, expected one of them")

    def _kinds_fit(self) -> None:
        scorer, query = self.scorer, self.query
        if isinstance(scorer, LinearScorer) and isinstance(query, FeaturesKind | TextKind):
            if scorer.features != query.width:
                raise ValueError(f"scorers of {scorer.features} features cannot answer queries of {query.width}")
        elif isinstance(scorer, LinearScorer) or isinstance(query, FeaturesKind | TextKind):
            raise ValueError(f"{scorer.kind} scorers cannot answer {query.kind} queries")
        elif self.ranking.activation != "sigmoid":
            raise ValueError(f"graphs have logits for the sigmoid, not for {self.ranking.activation}")

    def _trees_fit(self) -> None:
        if self.tail is not None and not self.trees:
            raise ValueError("a tail enters the scores of a forest, got one tree")
        if not self.trees:
            return
        if not isinstance(self.scorer, LinearScorer):
            raise ValueError(f"a forest has linear scorers, got {self.scorer.kind}")
        for number, other in enumerate(self.trees, start=2):
            if other.tree.items != self.tree.items:
                raise ValueError(f"tree {number} holds {other.tree.items} items, the first one {self.tree.items}")
            if other.scorer.features != self.scorer.features:
                raise ValueError(f"tree {number} has scorers of {other.scorer.features} features, the first one of {self.scorer.features}")

    def _content_fits(self) -> None:
        if self.content is not None and not (isinstance(self.scorer, GraphScorer) and isinstance(self.query, HistoryKind)):
            raise ValueError(f"content enters rows of graphs over histories, got {self.scorer.kind} scorers of {self.query.kind} queries")

    def _ranker_fits(self) -> None:
        ranker = self.ranker
        if ranker is None:
            return
        if ranker.max_depth > self.search.max_m:
            raise ValueError(f"a ranker of {ranker.max_depth} candidates cannot follow a search that gives at most {self.search.max_m}")
        for name in ranker.features:
            readable = HistoryKind if name in HISTORY else TextKind if name.startswith(TEXT) else object
            if not isinstance(self.query, readable):
                raise ValueError(f"a ranker cannot have the feature {name} of {self.query.kind} queries")
            if needs_node_rows(name) and isinstance(self.scorer, LinearScorer):
                raise ValueError(f"a ranker cannot have the feature {name} where scorers are linear: they have no node rows")
