"""The types between the routes of a live catalogue and the catalogue: requests and outcomes.

The routes parse requests into `Put` and `Delete`, within limits. The catalogue decides, stores, applies and answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from espalier.live.operations import NOTHING, ItemBody

from ..entity_tags import Condition

OutcomeKind = Literal["inserted", "updated", "unchanged", "stale", "deleted"]
NOWHERE = 0
"""Sequence of a trained item without operations, and of a catalogue without operations. The first operation has 1."""
ALWAYS = Condition()
"""A request without If-Match and If-None-Match. The catalogue calls `condition.check(tag_of(sequence), "item")` under the writer's lock, so
that no other operation comes between. The tag is None if there is no such item, or it was deleted."""


def tag_of(sequence: int) -> str:
    """The entity tag of an item whose last operation has this sequence."""
    return f'"{sequence}"'


class Put(NamedTuple):
    """An item to put.

    source_version  of the caller's record; a put with a lower one than the stored one is `stale`
    lifts_expiry    whether a body without `valid_until` removes the item's
    """

    id: str
    body: ItemBody
    source_version: int | None = None
    lifts_expiry: bool = False


class Delete(NamedTuple):
    """An item to delete."""

    id: str
    source_version: int | None = None

    @property
    def body(self) -> ItemBody:
        """Empty."""
        return NOTHING


@dataclass(frozen=True)
class ItemPlacement:
    """The place of an item in the model's tree, or in the first tree of a forest."""

    version: int
    parent: Annotated[int, Field(description="Parent of its leaf: a node of the level above the leaves.")]
    by: Annotated[
        str, Field(description="The evidence that decided, joined by `+`: events, like, text, fields; `trained`: training placed it.")
    ]


@dataclass(frozen=True)
class ItemOutcome:
    """The outcome of a write."""

    sequence: Annotated[
        int, Field(description="Sequence of the item's last operation. A retrieval with this `min_sequence` sees this state.")
    ]
    outcome: Annotated[
        OutcomeKind,
        Field(
            description="`inserted`: there was no such item, or it was deleted. `updated`, `deleted`: there was one, or only its "
            "source_version rose. `unchanged`: the item was the same already. `stale`: the stored item has a higher source_version. The "
            "last two change nothing."
        ),
    ]
    visible: Annotated[
        bool, Field(description="Whether all workers have applied the write. False: it is durable, but a worker was still behind.")
    ]
    placed: Annotated[ItemPlacement | None, Field(description="Null for a deleted item, and while no version serves.")]
    unknown: Annotated[tuple[str, ...], Field(description="Ids of the evidence that the catalogue does not have; they were skipped.")]


@dataclass(frozen=True)
class StoredItem:
    """The present state of one item of training, of the live catalogue, or of both.

    sequence  of its last operation; NOWHERE for a trained item without operations
    body      everything known of it; for a trained item without operations its fields
    live      whether an operation put it
    at        Unix time of its last operation, s; None if there was none
    """

    id: str
    sequence: int
    body: ItemBody
    live: bool
    placed: ItemPlacement | None
    source_version: int | None = None
    at: float | None = None


@dataclass(frozen=True)
class CatalogueStatus:
    """The live catalogue of a model, as this worker sees it."""

    sequence: Annotated[int, Field(description="The last committed operation that this worker has applied to all its versions.")]
    applied: Annotated[int, Field(description="The default version's answers reflect all operations up to this one.")]
    items: Annotated[int, Field(description="Items that were put since training and are not deleted.")]
    tombstones: Annotated[int, Field(description="Trained items that were deleted.")]
    capacity: Annotated[int, Field(description="Most live items: ESPALIER_MAX_LIVE, or what a small tree has room for.")]
    reason: Annotated[str | None, Field(description="Why it takes no writes now; null if it takes them.")]
