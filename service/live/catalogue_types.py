"""What the routes of a live catalogue and the catalogue say to each other: operations in, outcomes out.

The routes parse requests into `Put` and `Delete`, within limits. The catalogue decides, stores, applies and answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from espalier.live.operations import NOTHING, ItemBody

from ..entity_tags import Condition

OutcomeKind = Literal["inserted", "updated", "unchanged", "stale", "deleted"]
NOWHERE = 0
"""Sequence of a trained item that no operation has named, and of a catalogue without operations. The first operation has 1."""
ALWAYS = Condition()
"""An operation without If-Match and If-None-Match. The catalogue calls `condition.check(tag_of(sequence), "item")` under the writer's lock,
so that no other operation comes between; with None instead of a tag where there is no such item, or it was deleted."""


def tag_of(sequence: int) -> str:
    """The entity tag of an item whose last operation has this sequence."""
    return f'"{sequence}"'


class Put(NamedTuple):
    """An item to put.

    source_version  of the caller's own record; a lower one than is stored is `stale`
    lifts_expiry    whether the item loses the `valid_until` that it has, where the body names none
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
        """It says nothing."""
        return NOTHING


class Placed(NamedTuple):
    """Where an item hangs: the version of the model, the parent of its leaf (of a forest in its first tree), and by which evidence.

    by  some of `events`, `like`, `text` and `fields`, joined by `+`; `trained` where training placed it
    """

    version: int
    parent: int
    by: str


@dataclass(frozen=True)
class Outcome:
    """What became of an operation.

    sequence  of the item's last operation: this one's, or where nothing changed (`unchanged`, `stale`) the one that is stored
    outcome   `inserted`: there was no such item, or it was deleted; `updated` and `deleted`: there was one; `unchanged`: it was like that
              already, deleted included; `stale`: what is stored has a higher source_version
    visible   whether every worker of this service answers by it; False: it is durable, and a worker was still behind after a second
    placed    None of a deleted item, and while no version serves
    unknown   ids of the evidence that the catalogue does not have, which were skipped
    """

    sequence: int
    outcome: OutcomeKind
    visible: bool = True
    placed: Placed | None = None
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoredItem:
    """One item as it is: of training, of the live catalogue, or both.

    sequence  of its last operation; NOWHERE for a trained item that none has named
    body      all that is known of it; of a trained item that no operation has named its fields
    live      whether an operation put it
    at        Unix time of its last operation, s; None where there was none
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
    """How a live catalogue stands.

    sequence    the last operation that all versions of this worker hold; others may have committed more: see `LiveCatalogue.committed`
    applied     the operation up to which this worker's default version answers
    items       live items: put since training, and not deleted
    tombstones  trained items that were deleted
    capacity    most live items (ESPALIER_MAX_LIVE)
    reason      why it takes no writes now; None where it does
    """

    sequence: int = NOWHERE
    applied: int = NOWHERE
    items: int = 0
    tombstones: int = 0
    capacity: int = 0
    reason: str | None = None
