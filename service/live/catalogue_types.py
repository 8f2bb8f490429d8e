"""What the routes of a live catalogue and the catalogue say to each other: items to put, conditions, outcomes, and the two protocols.

The routes parse requests into these types, within limits. The catalogue decides, stores, applies and answers with them. Neither knows more
of the other. Errors are those of service/errors.py; each has its status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from espalier.errors import EspalierError
from service.entity_tags import Condition

OutcomeKind = Literal["inserted", "updated", "unchanged", "stale", "deleted"]
NOWHERE = 0
"""Sequence of a trained item that no operation has named, and of a catalogue without operations. The first operation has 1."""


class FeatureVector(NamedTuple):
    """A query of a model of features: feature numbers, each once, and a value for each."""

    indices: tuple[int, ...]
    values: tuple[float, ...]


Event = tuple[str, ...] | tuple[float, ...] | FeatureVector | str
"""One query that led to an item, by the model's query kind: item ids, oldest first; a vector; sparse features; a text."""


@dataclass(frozen=True)
class PutItem:
    """What a PUT says of an item. None: the request did not name it, so what is stored of it stays.

    fields          column → value, None for a null; columns that the item table lacks are refused by the catalogue (422)
    text            evidence: what the item is about, for models of texts and for content
    like            evidence: ids of items that it resembles
    events          evidence: queries that led to it, all of the model's kind
    source_version  of the caller's own record; a lower one than is stored is `stale`
    valid_until     seconds since 1970; from then on the item counts as deleted
    """

    fields: Mapping[str, Any] | None = None
    text: str | None = None
    like: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    source_version: int | None = None
    valid_until: float | None = None

    @property
    def has_evidence(self) -> bool:
        return bool(self.text or self.like or self.events)

    def document(self) -> dict[str, Any]:
        """The item as a JSON object, always the same for equal items: what a journal stores and what `unchanged` compares."""
        said: dict[str, Any] = {}
        if self.fields is not None:
            said["fields"] = {name: self.fields[name] for name in sorted(self.fields)}
        if self.text is not None:
            said["text"] = self.text
        if self.like:
            said["like"] = list(self.like)
        if self.events:
            said["events"] = [event._asdict() if isinstance(event, FeatureVector) else event for event in self.events]
        if self.source_version is not None:
            said["source_version"] = self.source_version
        if self.valid_until is not None:
            said["valid_until"] = self.valid_until
        return said

    @staticmethod
    def of_document(said: Mapping[str, Any]) -> PutItem:
        """The item of what `document` gave, read back from JSON."""
        events: list[Event] = []
        for event in said.get("events", ()):
            if isinstance(event, Mapping):
                events.append(FeatureVector(tuple(event["indices"]), tuple(event["values"])))
            else:
                events.append(event if isinstance(event, str) else tuple(event))
        return PutItem(
            said.get("fields"),
            said.get("text"),
            tuple(said.get("like", ())),
            tuple(events),
            said.get("source_version"),
            said.get("valid_until"),
        )


ALWAYS = Condition()
"""An operation without If-Match and If-None-Match. The catalogue calls `condition.check(tag_of(sequence), "item")` under the writer's lock,
so that no other operation comes between; with None instead of a tag where there is no such item, or it was deleted."""


def tag_of(sequence: int) -> str:
    """The entity tag of an item whose last operation has this sequence."""
    return f'"{sequence}"'


class Put(NamedTuple):
    """A line of a bulk request that puts an item."""

    id: str
    item: PutItem


class Delete(NamedTuple):
    """A line of a bulk request that deletes an item."""

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
    visible   whether every worker of this host answers by it; False: it is durable, and a worker was still behind after a second
    placed    None after a delete, and while no version serves
    """

    sequence: int
    outcome: OutcomeKind
    visible: bool = True
    placed: Placed | None = None


@dataclass(frozen=True)
class StoredItem:
    """One item as it is: of training, of the live catalogue, or both.

    sequence  of its last operation; NOWHERE for a trained item that none has named
    item      the whole item, with the evidence that was put last; a trained item has its fields alone
    at        when its last operation was committed, in seconds since 1970; None where there was none
    """

    id: str
    sequence: int
    item: PutItem
    live: bool
    placed: Placed | None
    at: float | None = None


@dataclass(frozen=True)
class Change:
    """An operation as the changes feed gives it.

    item  the whole item as it was after the operation, so that an operation needs none before it; None for a delete
    at    in seconds since 1970
    """

    sequence: int
    id: str
    item: PutItem | None
    source_version: int | None
    at: float


@dataclass(frozen=True)
class CatalogueStatus:
    """How a live catalogue stands.

    sequence    the last operation that is committed
    applied     the last operation by which this worker answers, in the version that is the default
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

    Operations raise InvalidInput (422: evidence is missing, a column is unknown, a value has a wrong type), PreconditionFailed (412),
    QueueFull (429: too many operations wait), CatalogueFull (507: no room; deletes are still taken), Follows (409: another host writes this
    catalogue), NotWritable (503: the disk is full, or the folder is read-only) and NotReady (503).
    An operation that has begun is finished even if the caller is cancelled.
    """

    async def put(self, item_id: str, item: PutItem, conditions: Condition = ALWAYS) -> Outcome: ...

    async def delete(self, item_id: str, conditions: Condition = ALWAYS, source_version: int | None = None) -> Outcome:
        """Raises ItemNotFound (404) for an id that never was; one that is deleted already is `unchanged`."""
        ...

    async def bulk(self, operations: Sequence[Put | Delete]) -> Sequence[Outcome | EspalierError]:
        """The outcomes in the order of the operations, as one group commit; an operation that fails has its error in its place."""
        ...

    async def get(self, item_id: str) -> StoredItem:
        """Raises ItemNotFound for an id that is unknown or deleted."""
        ...

    async def changes(self, after: int, limit: int) -> Sequence[Change]:
        """Operations after a sequence, ascending, at most `limit`. Raises ChangesGone (410) where some of them are not kept any more."""
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
