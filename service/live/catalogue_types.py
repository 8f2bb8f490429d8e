"""What the routes of a live catalogue and the catalogue say to each other: operations in, outcomes out, and the two protocols.

The routes parse requests into `Put` and `Delete`, within limits. The catalogue decides, stores, applies and answers. Neither knows more of
the other. Errors are those of service/errors.py; each has its status.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from espalier.errors import EspalierError
from espalier.live.operations import ItemBody, Operation

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

    sequence    the last operation that all versions of this worker hold; others may have committed more: see `Catalogue.committed`
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


class Catalogue(Protocol):
    """The live catalogue of one model. Used from the event loop of one worker.

    Writes raise InvalidInput (422: evidence is missing, a column is unknown, a value has a wrong type), PreconditionFailed (412), QueueFull
    (429: too many operations wait), CatalogueFull (507: no room; deletes are still taken), Follows (409: another host writes this
    catalogue), NotWritable (503: the disk is full, the folder is read-only, or it takes too long) and NotReady (503).
    An operation that has begun is finished even if the caller is cancelled.
    """

    async def put(self, put: Put, condition: Condition = ALWAYS) -> Outcome: ...

    async def delete(self, delete: Delete, condition: Condition = ALWAYS) -> Outcome:
        """Raises ItemNotFound (404) for an id that never was; one that is deleted already is `unchanged`."""
        ...

    async def bulk(self, operations: Sequence[Put | Delete]) -> Sequence[Outcome | EspalierError]:
        """The outcomes in the order of the operations; an operation that fails has its error in its place.

        Waits for room instead of raising QueueFull, so that a bulk is read no faster than it is committed.
        """
        ...

    async def get(self, item_id: str) -> StoredItem:
        """Raises ItemNotFound for an id that is unknown or deleted."""
        ...

    async def changes(self, after: int, limit: int) -> Sequence[Operation]:
        """Operations after a sequence, ascending, at most `limit`: of each id the last one at least, and it holds all that is known of the
        item. Raises ChangesGone (410) where a follower that has everything up to `after` cannot go on from what is kept."""
        ...

    async def identity(self) -> str | None:
        """Names the sequence numbers: under another identity they may mean other operations. None where nothing was ever written."""
        ...

    async def dropped(self) -> int:
        """The last delete that is not kept any more, because it was old and every version holds it; 0 where there is none. A follower that
        copied an item before, and not its delete, must begin anew."""
        ...

    async def committed(self) -> int:
        """The last operation that this host has committed, whichever worker did. Raises NotWritable where it cannot be read."""
        ...

    def status(self) -> CatalogueStatus:
        """Cheap: /models asks for it."""
        ...

    def applied(self, version: int) -> int:
        """The operation up to which answers of this worker's `version` hold everything. Cheap: every retrieval asks for it."""
        ...

    async def reached(self, version: int, sequence: int, deadline: float) -> bool:
        """Wait until `applied(version)` is at least `sequence`; False where that is not so by `deadline` (of time.perf_counter())."""
        ...


class Catalogues(Protocol):
    """The live catalogues of a models folder."""

    def of(self, model: str) -> Catalogue:
        """Cheap: every retrieval asks for it. Raises ModelNotFound."""
        ...
