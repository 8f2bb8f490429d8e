"""The types between the routes of a live catalogue and the catalogue: requests and outcomes.

The routes parse requests into `Put` and `Delete`, within limits. The catalogue decides, stores, applies and answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

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


class Placed(NamedTuple):
    """An item's place in a version: the parent of its leaf (of a forest in the first tree), and the evidence that placed it.

    by  some of `events`, `like`, `text` and `fields`, joined by `+`; `trained` if training placed it
    """

    version: int
    parent: int
    by: str


@dataclass(frozen=True)
class Outcome:
    """The outcome of a request.

    sequence  of the item's last operation: the one of this request, or if nothing changed (`unchanged`, `stale`) the stored one
    outcome   `inserted`: there was no such item, or it was deleted; `updated` and `deleted`: there was one; `unchanged`: the item already
              had that state, also that of a deleted one; `stale`: the stored operation has a higher source_version
    visible   whether every worker of this service has applied it; False: it is durable, and a worker was still behind after a second
    placed    None for a deleted item, and while no version serves
    unknown   ids of the evidence that the catalogue does not have, which were skipped
    """

    sequence: int
    outcome: OutcomeKind
    visible: bool = True
    placed: Placed | None = None
    unknown: tuple[str, ...] = ()


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
    placed: Placed | None
    source_version: int | None = None
    at: float | None = None


@dataclass(frozen=True)
class CatalogueStatus:
    """The status of a live catalogue.

    sequence    the last operation that all versions of this worker hold; others may have committed more: see `LiveCatalogue.committed`
    applied     the last operation in the answers of this worker's default version
    items       live items: put since training, and not deleted
    tombstones  trained items that were deleted
    capacity    most live items (ESPALIER_MAX_LIVE)
    reason      why it takes no writes now; None: it takes writes
    """

    sequence: int = NOWHERE
    applied: int = NOWHERE
    items: int = 0
    tombstones: int = 0
    capacity: int = 0
    reason: str | None = None
