"""Writes of a load test: items that are put again and again into the live catalogue, each time with a query as its evidence.

Knows bodies of PUT and how retrievals and writes share a loop. Does not know sockets or clocks, but for the deletes at the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import quote

from .loops import request_bytes
from .queries import Query
from .target import Json, ServiceRefused, Target, exchange

ITEMS = 1000
"""Ids that are written in turn, so that a test of any length leaves the catalogue as small."""
PREFIX = "loadtest-item-"
WRITTEN = (200, 201, 202)
"""Statuses of a write that was done."""


class Put(NamedTuple):
    id: str
    body: Json


class Writes:
    """The writes of one test, by their number from 0 on. No two are equal, so that each is a write and not `unchanged`.

    items  ids to write in turn
    """

    def __init__(self, queries: Sequence[Query], items: int = ITEMS) -> None:
        self._queries, self._items = [query for query in queries if query.values], items  # an empty one is no evidence
        self._began = time.time_ns() // 1000  # so that a later test is not `stale`

    def put(self, number: int) -> Put:
        query = self._queries[number % len(self._queries)]
        values = list(query.values) if isinstance(query.values, tuple) else query.values
        return Put(f"{PREFIX}{number % self._items}", {"events": [values], "source_version": self._began + number})

    def ids(self, written: int) -> list[str]:
        return [f"{PREFIX}{n}" for n in range(min(written, self._items))]


class Mixed(NamedTuple):
    """Requests of a loop in their order, and which of them are writes."""

    requests: list[bytes]
    is_write: list[bool]


def mixed(retrievals: Sequence[bytes], put: Callable[[int], bytes], per_s: float, writes_per_s: float, seconds: float) -> Mixed:
    """The requests of a loop of `per_s` retrievals and `writes_per_s` writes a second, evenly spread."""
    share = writes_per_s / (per_s + writes_per_s)
    count = max(1, round((per_s + writes_per_s) * seconds))
    is_write = [int((i + 1) * share) > int(i * share) for i in range(count)]
    requests, retrieved, written = [], 0, 0
    for write in is_write:
        requests.append(put(written) if write else retrievals[retrieved % len(retrievals)])
        retrieved, written = retrieved + (not write), written + write
    return Mixed(requests, is_write)


def put_bytes(target: Target, model: str, put: Put) -> bytes:
    path = f"{target.prefix}/models/{quote(model, safe='')}/items/{quote(put.id, safe='')}"
    return request_bytes(path, put.body, {"Host": target.authority, **target.headers}, method="PUT")


def delete_all(target: Target, model: str, ids: Sequence[str]) -> None:
    """Delete what a test has put. Raises ServiceRefused."""
    body = b"\n".join(json.dumps({"id": item, "delete": True}).encode() for item in ids)
    path = f"/models/{quote(model, safe='')}/items"
    status, content = exchange(target, "POST", path, body, "application/x-ndjson")
    wrong = [line for line in content.splitlines() if json.loads(line)["status"] not in (*WRITTEN, 404)] if status == 200 else [content]
    if wrong:
        raise ServiceRefused(f"POST {target}{path}: {status}, {wrong[0][:200].decode(errors='replace')}")
