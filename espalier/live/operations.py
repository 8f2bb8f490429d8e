"""One operation on the live catalogue, a put or a delete of an item, as the journal stores it and every process reads it.

A body is stored as canonical JSON, so that two bodies are equal exactly if their bytes are. Does not know files (journal.py), placements
(espalier.placement) or HTTP.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import orjson

from espalier.errors import InvalidData
from espalier.items import MAX_ID_BYTES
from espalier.label_counts import MAX_COUNT

Kind = Literal["put", "delete"]

MAX_BODY_BYTES = 1 << 20
"""Largest body in canonical JSON."""
MAX_SEQUENCE = (1 << 63) - 1
"""Also the largest source version."""
MAX_TAG_BYTES = 512
"""Longest tag of a person."""
_KEYS = ("count", "events", "evidence_from", "fields", "like", "text", "users", "valid_until")


@dataclass(frozen=True)
class ItemBody:
    """Everything known of a live item, apart from its id. Empty for a deleted item.

    fields       columns of the item table, JSON values; None: not given
    text         the text by which a text model places it
    like         ids of items that it resembles
    events       queries that led to it, JSON values as the model's query kind takes them: lists of item ids, texts, lists of numbers,
                 or {"indices", "values"}
    users        a tag of the person of each event, so that a person's events can be erased; or empty
    valid_until  Unix time in s from which the item counts as deleted; None: never
    count        number of events that the item has had, `events` included; None: not given
    evidence_from  (sequence, Unix time in s) of the operation that gave `text`, `like` and `events`; None: the one that has this body
    """

    fields: Mapping[str, object] | None = None
    text: str | None = None
    like: tuple[str, ...] = ()
    events: tuple[object, ...] = ()
    users: tuple[str, ...] = ()
    valid_until: float | None = None
    count: int | None = None
    evidence_from: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        if self.count is not None and not 0 <= self.count <= MAX_COUNT:
            raise InvalidData("count", self.count, f"0 to {MAX_COUNT}")
        if self.users and len(self.users) != len(self.events):
            raise InvalidData("users", f"{len(self.users)} tags", f"{len(self.events)}, one for each event, or none")
        for tag in self.users:
            _check_text("users", tag, MAX_TAG_BYTES)
        for item in self.like:
            _check_text("like", item, MAX_ID_BYTES)
        if self.valid_until is not None and not math.isfinite(self.valid_until):
            raise InvalidData("valid_until", self.valid_until, "a time")

    @property
    def has_evidence(self) -> bool:
        """Whether it has evidence of where the item belongs, beyond fields."""
        return bool(self.events or self.like) or self.text is not None

    def over(self, earlier: ItemBody) -> ItemBody:
        """The item's body after this body is put over an earlier one.

        Fields replace fields. Events, like and text replace the earlier three together. Whatever is not given stays, also `valid_until` and
        `count`. So the last operation of an id holds all that is known of it, and earlier ones may be dropped.
        """
        fields = earlier.fields if self.fields is None else self.fields
        until = earlier.valid_until if self.valid_until is None else self.valid_until
        count = earlier.count if self.count is None else self.count
        return replace(self if self.has_evidence else earlier, fields=fields, valid_until=until, count=count)

    def without(self, user: str) -> ItemBody:
        """The body without the events of a person."""
        others = [(event, tag) for event, tag in zip(self.events, self.users, strict=False) if tag != user]
        if len(others) == len(self.users):
            return self
        return replace(self, events=tuple(event for event, _ in others), users=tuple(tag for _, tag in others))

    def to_bytes(self) -> bytes:
        """Canonical JSON: sorted keys, without values that were not given. Raises InvalidData if that is no JSON or too large."""
        return self._bytes

    @cached_property
    def _bytes(self) -> bytes:
        values = {key: value for key in _KEYS if (value := getattr(self, key)) is not None and value != ()}
        if self.valid_until is not None:
            values["valid_until"] = float(self.valid_until)  # 5 and 5.0 are one time
        try:
            data = orjson.dumps(values, option=orjson.OPT_SORT_KEYS)
            if b"null" in data:  # orjson also writes NaN and infinite numbers as null, which are no JSON
                json.dumps(values, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidData("body", str(error), "JSON") from error
        if len(data) > MAX_BODY_BYTES:
            raise InvalidData("body", f"{len(data)} bytes", f"at most {MAX_BODY_BYTES}")
        return data

    @staticmethod
    def from_bytes(data: bytes) -> ItemBody:
        """Raises InvalidData for bytes that `to_bytes` did not make."""
        if len(data) > MAX_BODY_BYTES:
            raise InvalidData("body", f"{len(data)} bytes", f"at most {MAX_BODY_BYTES}")
        try:
            values = orjson.loads(data)
        except (ValueError, RecursionError) as error:
            raise InvalidData("body", data[:100], "JSON") from error
        if type(values) is not dict or not values.keys() <= set(_KEYS):
            raise InvalidData("body", data[:100], f"an object with some of {', '.join(_KEYS)}")
        fields, text, until, count = (values.get(key) for key in ("fields", "text", "valid_until", "count"))
        given = values.get("evidence_from")
        like, events, users = values.get("like", ()), values.get("events", ()), values.get("users", ())
        if not (
            (fields is None or type(fields) is dict)
            and (text is None or type(text) is str)
            and (until is None or type(until) is float)
            and (count is None or type(count) is int)
            and (given is None or (type(given) is list and [*map(type, given)] == [int, float]))
            and all(value == () or type(value) is list for value in (like, events, users))
        ):
            raise InvalidData("body", data[:100], "parts of the types that a body has")
        return ItemBody(
            fields, text, tuple(like), tuple(events), tuple(users), until, count, None if given is None else (given[0], given[1])
        )


NOTHING = ItemBody()
"""The body of a delete."""


@dataclass(frozen=True)
class Operation:
    """One operation, immutable once committed.

    sequence        1, 2, 3, … of one journal, never used twice; 0: not committed yet
    id              of the item
    body            everything known of the item from now on
    source_version  the caller's version number of this state of the item; None: none
    at              Unix time of the commit, s
    """

    sequence: int
    id: str
    kind: Kind
    body: ItemBody = NOTHING
    source_version: int | None = None
    at: float = 0.0

    def __post_init__(self) -> None:
        _check_text("id", self.id, MAX_ID_BYTES)
        if self.kind not in ("put", "delete"):
            raise InvalidData("kind", self.kind, "put or delete")
        if self.kind == "delete" and self.body != NOTHING:
            raise InvalidData("body", "one of a delete", "none")
        if not 0 <= self.sequence <= MAX_SEQUENCE:
            raise InvalidData("sequence", self.sequence, f"0 to {MAX_SEQUENCE}")
        if self.source_version is not None and not 0 <= self.source_version <= MAX_SEQUENCE:
            raise InvalidData("source_version", self.source_version, f"0 to {MAX_SEQUENCE}")
        if not math.isfinite(self.at):
            raise InvalidData("at", self.at, "a time")

    def has_expired(self, now: float) -> bool:
        """Whether the item's `valid_until` has passed. now: seconds since 1970."""
        return self.body.valid_until is not None and self.body.valid_until <= now

    def same_state(self, other: Operation) -> bool:
        """Whether both leave the item in the same state. Such an operation is not written to the journal."""
        body, other_body = (
            operation.body if operation.body.evidence_from is None else replace(operation.body, evidence_from=None)
            for operation in (self, other)
        )
        return (self.kind, self.source_version) == (other.kind, other.source_version) and body.to_bytes() == other_body.to_bytes()

    @property
    def with_evidence_from(self) -> ItemBody:
        """The body, which says where its evidence is from."""
        body = self.body
        return replace(body, evidence_from=self.evidence_from) if body.has_evidence else body

    @property
    def evidence_from(self) -> tuple[int, float]:
        """(sequence, Unix time in s) of the operation that gave the evidence: this one or an earlier one."""
        return self.body.evidence_from or (self.sequence, round(float(self.at), 6))  # microseconds, as in the feed of changes


def _check_text(field: str, value: str, limit: int) -> None:
    try:
        size = len(value.encode())
    except (UnicodeEncodeError, AttributeError) as error:
        raise InvalidData(field, value, "text without half surrogate pairs") from error
    if not 1 <= size <= limit:
        raise InvalidData(field, value, f"1 to {limit} bytes")
