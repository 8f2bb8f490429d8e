"""The JSON of the routes of live items: requests are validated by these classes, answers are documented by them.

item_bodies.py checks what depends on the model: the kind of events, and limits.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field
from pydantic.config import JsonDict

from espalier.label_counts import MAX_COUNT

from ..live.catalogue_types import OutcomeKind
from ..retrieval.schemas import Features, Ids, Number, StrictBody

MAX_EVENTS = 64
"""Most events of an item."""
MAX_LIKE = 64
"""Most items that it is said to be like."""
MAX_SOURCE_VERSION = (1 << 63) - 1
TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?([Zz]|[+-][0-9]{2}:[0-9]{2})$"
"""RFC 3339."""
A_TIME = "a time from 1970 to 9999, as 2027-01-31T12:00:00Z"

E = TypeVar("E")
Vector = Annotated[list[Number], FailFast()]
Text = Annotated[str, Field(min_length=1)]
Event = list[str] | list[float] | Features | str
"""Of a model of any kind, for the documentation alone."""

_EXAMPLE: JsonDict = {"fields": {"title": "A new game", "section": "games"}, "events": [["libsdl2-2.0-0", "libgl1"]], "source_version": 7}
_FIELDS = (
    "Column of the item table → value: a string, a number, a boolean, a list of strings, or null. They replace all fields of a live item: "
    "a column that is not named becomes null."
)


def _a_time(text: str) -> str:
    if not re.fullmatch(TIME, text):
        raise ValueError(A_TIME)
    return text


class ItemRequest(StrictBody, Generic[E]):
    """What is known of an item. A new one needs evidence of where it belongs: `events`, `like`, `text` or fields that the model reads."""

    fields: dict[str, Any] | None = Field(None, description=_FIELDS)
    text: Text | None = Field(None, description="What the item is about, in words.")
    like: Ids = Field(default_factory=list, max_length=MAX_LIKE, description="Ids of items that it resembles. Unknown ones are skipped.")
    events: Annotated[list[E], FailFast()] = Field(
        default_factory=list,
        max_length=MAX_EVENTS,
        description="Queries that led to it, of the model's kind: lists of item ids, oldest first; vectors; sparse vectors; or texts.",
    )
    users: Ids = Field(
        default_factory=list, max_length=MAX_EVENTS, description="A tag for each event, saying whose it is, so that it can be erased."
    )
    source_version: int | None = Field(
        None, ge=0, le=MAX_SOURCE_VERSION, description="Of your own record: a lower one than is stored changes nothing (`stale`)."
    )
    valid_until: Annotated[str, AfterValidator(_a_time), Field(json_schema_extra={"pattern": TIME})] | None = Field(
        None,
        json_schema_extra={"format": "date-time"},
        description="From then on the item counts as deleted, as 2027-01-31T12:00:00Z. null lifts it; where it is not named, it stays.",
    )

    count: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="Events that it has had in a time as long as the training log's, those of `events` among them: how popular it is. "
        "Where it is not named, it stays; where nobody says, it is guessed by `events`.",
    )


class PutRequest(ItemRequest[Event]):
    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})


class BulkLine(ItemRequest[E]):
    """A line of a bulk request: an item to put, or to delete."""

    id: str
    delete: bool = False


class Placement(BaseModel):
    """Where an item hangs in the model's tree; of a forest in its first."""

    version: int
    parent: int = Field(description="Node of the level above the leaves.")
    by: str = Field(description="The evidence that decided, joined by `+`: events, like, text, fields; `trained`: training placed it.")


class ItemOutcome(BaseModel):
    """What became of a write."""

    sequence: int = Field(description="Of the item's last operation; a retrieval with it as `min_sequence` sees the item like this.")
    outcome: OutcomeKind = Field(
        description="`unchanged`: it was like that already. `stale`: what is stored has a higher source_version. Both change nothing."
    )
    visible: bool = Field(description="Whether all workers answer by it. False: it is durable, and one of them was still behind.")
    placed: Placement | None
    unknown: list[str] = Field(description="Ids of the evidence that the catalogue does not have; they were skipped.")


class Known(BaseModel):
    """What is known of an item, in the form of a PUT; the rest is left out."""

    fields: dict[str, Any] | None = None
    text: str | None = None
    like: list[str] | None = None
    events: list[Event] | None = None
    users: list[str] | None = None
    source_version: int | None = None
    valid_until: str | None = None
    count: int | None = None


class LiveItem(Known):
    """An item of the catalogue: trained, live, or both."""

    id: str
    sequence: int = Field(description="Of its last operation, as in ETag; 0 for a trained item that none has named.")
    live: bool = Field(description="Whether an operation put it.")
    at: str | None = Field(description="When its last operation was committed.")
    placed: Placement | None


class Change(Known):
    """An operation. It holds all that is known of its item, so it needs none before it."""

    sequence: int
    id: str
    kind: Literal["put", "delete"]
    at: str = Field(description="When it was committed.")


class ChangesAnswer(BaseModel):
    changes: list[Change] = Field(description="Ascending. Fewer than `limit` do not mean that there are no more.")
    sequence: int = Field(description="The last operation that is committed: the feed's end.")
    dropped: int = Field(
        description="Old deletes up to this sequence may be missing. Where it is above `after`, and above what it was when you began with "
        "after=0, you may lack deletes: begin again with after=0."
    )
    journal: str | None = Field(description="Names the sequence numbers: another name means that a backup was put in place.")
