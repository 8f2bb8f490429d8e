"""What `Result.explain` holds, as types alone: the document is kept as the service sent it, so newer keys are in it too.

A key that is not required may be missing or None. docs/serve.md says what each means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NotRequired, TypedDict


class ExplainedLevel(TypedDict):
    """One level of the search: `cut` is the key of the worst node that was kept, `dropped` of the best one that was not.

    `nodes` and their `keys` where they were asked for, the kept ones first."""

    level: int
    candidates: int
    kept: int
    cut: float | None
    dropped: float | None
    nodes: NotRequired[list[int]]
    keys: NotRequired[list[float]]


class ExplainedAncestor(TypedDict):
    """An item's ancestor on a level of the search, and its place among the level's candidates; None where it was no candidate."""

    level: int
    node: int
    rank: float | None
    key: float | None
    place: int | None
    kept: bool


class ExplainedFeature(TypedDict):
    """What a feature of the query adds to an item's logits; in a forest the mean over its trees."""

    feature: str
    contribution: float


class Source(TypedDict):
    """A past item, and what it adds to an item's key."""

    id: str
    part: float


class ExplainedMemory(TypedDict):
    """What the model's memory adds to an item's key, and the past items that add most."""

    part: float
    items: list[Source]


class ExplainedInTree(TypedDict):
    """A requested item in one tree of a forest: `scored` with its rank, or `pruned` on a level."""

    outcome: Literal["scored", "pruned"]
    level: NotRequired[int | None]
    rank: NotRequired[float | None]
    cut: NotRequired[float | None]


class ExplainedLive(TypedDict):
    """What the live catalogue knows of an item: when it was put first, its last operation, and the evidence that its row comes from."""

    since: str
    sequence: int
    placed_by: str


class ExplainedItem(TypedDict):
    """Where the search dropped a requested item, or its place in the answer. `trees`: of a forest, the item in each tree; `tail`:
    what the tail adds to its rank; `live`: of an item that was put in or changed while the service was running.
    """

    id: str
    outcome: Literal["returned", "below_min_score", "below_m", "pruned", "excluded", "filtered", "removed", "deleted", "unknown"]
    level: NotRequired[int | None]
    rank: NotRequired[float | None]
    key: NotRequired[float | None]
    cut: NotRequired[float | None]
    place: NotRequired[int | None]
    retrieved_place: NotRequired[int | None]
    rerank_score: NotRequired[float | None]
    rank_features: NotRequired[Mapping[str, float | None] | None]
    path: NotRequired[list[ExplainedAncestor] | None]
    live: NotRequired[ExplainedLive | None]
    memory: NotRequired[ExplainedMemory | None]
    trees: NotRequired[list[ExplainedInTree] | None]
    tail: NotRequired[float | None]
    features: NotRequired[list[ExplainedFeature] | None]


class ExplainedTree(TypedDict):
    """What one tree of a forest kept."""

    levels: list[ExplainedLevel]


class Moved(TypedDict):
    """An item of the answer whose place the ranker changed."""

    id: str
    retrieved_place: int
    place: int


class Explanation(TypedDict):
    """`levels` of the only tree, or of a forest's first; `trees`: of a forest, every tree."""

    levels: list[ExplainedLevel]
    trees: NotRequired[list[ExplainedTree] | None]
    items: list[ExplainedItem]
    moved: NotRequired[list[Moved] | None]
