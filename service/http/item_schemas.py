"""The JSON of the routes of live items: these classes validate requests and document answers.

item_bodies.py makes the checks that depend on the model: the kind of events, and limits.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field
from pydantic.config import JsonDict

from espalier.label_counts import MAX_COUNT

from ..live.catalogue_types import ItemPlacement
from ..retrieval.schemas import Features, Ids, Number, StrictBody

MAX_EVENTS = 64
"""Most events of an item."""
MAX_LIKE = 64
"""Most similar items in `like`."""
MAX_SOURCE_VERSION = (1 << 63) - 1
TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?([Zz]|[+-][0-9]{2}:[0-9]{2})$"
"""RFC 3339."""
A_TIME = "a time from 1970 to 9999, as 2027-01-31T12:00:00Z"

E = TypeVar("E")
Vector = Annotated[list[Number], FailFast()]
Text = Annotated[str, Field(min_length=1)]
Event = list[str] | list[float] | Features | str
"""An event of a model of any kind. Only the documentation uses it."""

_EXAMPLE: JsonDict = {"fields": {"title": "A new game", "section": "games"}, "events": [["libsdl2-2.0-0", "libgl1"]], "source_version": 7}
_FIELDS = (
    "Column of the item table → value: a string, a number, a boolean, null, or a list of them. They replace all fields of a live item: "
    "a column that is left out becomes null."
)


def _checked_time(text: str) -> str:
    if not re.fullmatch(TIME, text):
        raise ValueError(A_TIME)
    return text


class ItemRequest(StrictBody, Generic[E]):
    """An item. A new item needs evidence of where it belongs in the tree: `events`, `like`, `text` or fields that the model reads."""

    fields: dict[str, Any] | None = Field(None, description=_FIELDS)
    text: Text | None = Field(None, description="A description of the item in words.")
    like: Ids = Field(default_factory=list, max_length=MAX_LIKE, description="Ids of similar items. Unknown ids are skipped.")
    events: Annotated[list[E], FailFast()] = Field(
        default_factory=list,
        max_length=MAX_EVENTS,
        description="Queries that led to it, of the model's kind: lists of item ids, oldest first; vectors; sparse vectors; or texts.",
    )
    users: Ids = Field(
        default_factory=list, max_length=MAX_EVENTS, description="A tag for each event that names its user, so that it can be erased."
    )
    source_version: int | None = Field(
        None, ge=0, le=MAX_SOURCE_VERSION, description="Version of your record. A lower one than the stored one changes nothing (`stale`)."
    )
    valid_until: Annotated[str, AfterValidator(_checked_time), Field(json_schema_extra={"pattern": TIME})] | None = Field(
        None,
        json_schema_extra={"format": "date-time"},
        description="Time from which the item counts as deleted, as 2027-01-31T12:00:00Z. null removes it; without this field it stays.",
    )
    count: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="Number of its events in a time as long as that of the training log, including `events`: its popularity. Without "
        "this field a stored count stays; if there is none, it is estimated from `events`.",
    )


class PutRequest(ItemRequest[Event]):
    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})


class BulkLine(ItemRequest[E]):
    """A line of a bulk request: an item to put, or to delete."""

    id: str
    delete: bool = False


class Known(BaseModel):
    """The stored fields of an item, in the form of a PUT. Missing fields are left out."""

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
    sequence: int = Field(description="Sequence of its last operation, as in ETag; 0 for a trained item without operations.")
    live: bool = Field(description="Whether an operation put it.")
    at: str | None = Field(description="When its last operation was committed.")
    placed: ItemPlacement | None


class EvidenceFrom(BaseModel):
    """An operation."""

    sequence: int
    at: str = Field(description="When it was committed.")


class Change(Known):
    """An operation. It has the whole state of its item, so it does not depend on earlier operations."""

    sequence: int
    id: str
    kind: Literal["put", "delete"]
    at: str = Field(description="When it was committed.")
    evidence_from: EvidenceFrom | None = Field(
        None, description="The operation that gave `text`, `like` and `events`, if it was an earlier one: a version may know them already."
    )


class ChangesAnswer(BaseModel):
    changes: list[Change] = Field(description="Ascending by sequence. There may be more even if they are fewer than `limit`.")
    sequence: int = Field(description="The end of the feed: that of the last change once all changes were returned.")
    dropped: int = Field(
        description="Old deletes up to this sequence may be missing. If it is above `after`, and above its value when you began with "
        "after=0, you may lack deletes: begin again with after=0."
    )
    journal: str | None = Field(description="Identity of the sequence numbers. It changes if a backup is restored.")
