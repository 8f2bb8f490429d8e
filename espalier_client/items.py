"""Items of the live catalogue: puts, deletes and their outcomes, and their JSON. Knows the service's documents, but not HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Literal, TypedDict

from espalier_client.messages import as_integer, as_tuple, read, to_bytes

NEVER: Literal["never"] = "never"
"""A `valid_until` that removes an item's `valid_until`."""
Event = Iterable[str] | Iterable[float] | Mapping[int, float] | str
"""A query that led to an item: item ids, oldest first; a vector; feature → value; or a text, as the model's query kind says."""


class ItemOptions(TypedDict, total=False):
    """The options of `put_item`: the fields of `Put` without the id."""

    fields: Mapping[str, Any] | None
    events: Iterable[Event]
    like: Iterable[str]
    text: str | None
    users: Iterable[str]
    source_version: int | None
    valid_until: datetime | str | None  # a string is a time of RFC 3339, or NEVER
    count: int | None


@dataclass(frozen=True, slots=True)
class Put:
    """An item to put.

    `fields`: all its columns; None: unchanged. A new item needs evidence of its place in the tree: `events` that led to it, ids of items
    that it is `like`, or a `text`. `users`: a tag for each event that says whose it is. `source_version`: version of your own record; a put
    with a lower one than stored changes nothing. `valid_until`: a time with its zone from which the item counts as deleted; NEVER removes
    the stored time; None: unchanged. `count`: the item's popularity, as its events in a period as long as the training log's; None:
    unchanged.
    """

    id: str
    fields: Mapping[str, Any] | None = None
    events: Iterable[Event] = ()
    like: Iterable[str] = ()
    text: str | None = None
    users: Iterable[str] = ()
    source_version: int | None = None
    valid_until: datetime | str | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        as_tuple(self, "events", "like", "users")
        as_integer(self, "source_version", "count")
        object.__setattr__(self, "events", tuple(event if isinstance(event, str | Mapping) else tuple(event) for event in self.events))
        if isinstance(self.valid_until, datetime) and self.valid_until.tzinfo is None:
            raise ValueError(f"valid_until: got {self.valid_until!r}, expected a time with its zone")

    def to_json(self) -> dict[str, Any]:
        """The body of a PUT."""
        until = self.valid_until.isoformat() if isinstance(self.valid_until, datetime) else self.valid_until
        values = {member.name: getattr(self, member.name) for member in fields(self) if member.name != "id"}
        values |= {"events": [_event(event) for event in self.events], "valid_until": until}
        document = {name: value for name, value in values.items() if value not in (None, (), [])}
        return document | {"valid_until": None} if until == NEVER else document

    def to_bytes(self) -> bytes:
        """The JSON of a line of a bulk."""
        return to_bytes({"id": self.id, **self.to_json()})


@dataclass(frozen=True, slots=True)
class Delete:
    """An item to delete. `source_version` as in `Put`."""

    id: str
    source_version: int | None = None

    def __post_init__(self) -> None:
        as_integer(self, "source_version")

    def to_bytes(self) -> bytes:
        """The JSON of a line of a bulk."""
        version = {} if self.source_version is None else {"source_version": self.source_version}
        return to_bytes({"id": self.id, "delete": True, **version})


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of an item: the `parent` node of its leaf in a `version`, and the evidence that decided (`by`)."""

    version: int
    parent: int
    by: str


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """The outcome of a write.

    `outcome`: inserted, updated, deleted, unchanged (it was so already), or stale (the stored item has a higher source_version).
    `sequence`: of the item's last operation; a retrieval with it as `min_sequence` sees this write. `visible`: the next answer of every
    worker sees the write; False: the write is durable, but some worker has not applied it yet. `unknown`: ids of the evidence that the
    catalogue does not have. `placed`: None after a delete, and in a bulk.
    """

    id: str
    outcome: str
    sequence: int
    visible: bool = True
    unknown: tuple[str, ...] = ()
    placed: Placement | None = None


@dataclass(frozen=True, slots=True)
class LiveItem:
    """An item as it is now. `sequence`: of its last operation, 0 for a trained item without one; `etag` is for `if_match`.

    `live`: whether an operation put it. `at`: time when the last operation was committed. All other fields are those of the put; a trained
    item has only `fields`.
    """

    id: str
    sequence: int
    live: bool
    at: str | None = None
    placed: Placement | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Any, ...] = ()
    like: tuple[str, ...] = ()
    text: str | None = None
    users: tuple[str, ...] = ()
    source_version: int | None = None
    valid_until: str | None = None
    count: int | None = None

    @property
    def etag(self) -> str:
        return f'"{self.sequence}"'


@dataclass(frozen=True, slots=True)
class Change:
    """An operation of the live catalogue: a put of an item, or its deletion (`put` is None). `at`: time when it was committed."""

    sequence: int
    id: str
    at: str
    put: Put | None
    source_version: int | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """Operations, ascending. `sequence`: of the catalogue's last operation. Ask again, after the last change, until it has this sequence.

    `journal`: identity of the journal; in another journal, sequence numbers mean other operations. None: nothing was ever written.
    `dropped`: deletes up to this sequence may be missing. If it is above `after`, and above its value when you began with after=0, you may
    have missed some: begin again with after=0.
    """

    changes: tuple[Change, ...]
    sequence: int
    journal: str | None = None
    dropped: int = 0


def outcome(item_id: str) -> Callable[[Any], ItemOutcome]:
    """A parser for the answer to a write of this item."""
    return lambda document: read(ItemOutcome, document, id=item_id, visible=document["visible"], placed=_placed(document.get("placed")))


def line_outcome(document: Any) -> ItemOutcome:
    """The outcome of a line of a bulk."""
    return read(ItemOutcome, document, visible=document["status"] != 202)


def live_item(document: Any) -> LiveItem:
    return read(LiveItem, document, placed=_placed(document.get("placed")))


def changes(document: Any) -> Changes:
    return read(Changes, document, changes=tuple(_change(change) for change in document["changes"]))


def _change(document: Any) -> Change:
    version = document.get("source_version")
    put = None
    if document["kind"] == "put":
        events = [_read_event(event) for event in document.get("events") or ()]
        evidence = document.get("like") or (), document.get("text"), document.get("users") or ()
        put = Put(document["id"], document.get("fields"), events, *evidence, version, document.get("valid_until"), document.get("count"))
    return Change(document["sequence"], document["id"], document["at"], put, version)


def _placed(document: Any) -> Placement | None:
    return None if document is None else read(Placement, document)


def _event(event: Any) -> Any:
    if isinstance(event, str):
        return event
    if isinstance(event, Mapping):
        return {"indices": [int(i) for i in event], "values": [float(value) for value in event.values()]}
    return [entry if isinstance(entry, str) else float(entry) for entry in event]  # NumPy's numbers are not JSON's


def _read_event(document: Any) -> Event:
    if isinstance(document, Mapping):
        return {int(i): float(value) for i, value in zip(document["indices"], document["values"], strict=True)}
    event: Event = document
    return event
