"""The writes of a load test: items that are put into the live catalogue again and again, each time with a query as evidence.

Knows bodies of PUT and how retrievals and writes share a loop. Does not know sockets or clocks, except for the deletes at the end.
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
"""Number of ids, which are written in turn: a test of any length adds at most so many items."""
PREFIX = "loadtest-item-"
WRITTEN = (200, 201, 202)
"""Statuses of successful writes."""


class Put(NamedTuple):
    id: str
    body: Json


class Writes:
    """The writes of one test, numbered from 0. No two are equal, so that no write is `unchanged`.

    longest  most ids of a history that the model takes as evidence; the last ones are sent. None: any number
    """

    def __init__(self, queries: Sequence[Query], longest: int | None = None) -> None:
        self._queries = [query for query in queries if query.values]  # an empty query is no evidence
        self._longest = longest
        self._began = time.time_ns() // 1000  # so that the writes of a later test are not `stale`

    def put(self, number: int) -> Put:
        query = self._queries[number % len(self._queries)]
        values = list(query.values) if isinstance(query.values, tuple) else query.values
        if query.kind == "history" and isinstance(values, list) and self._longest is not None:
            values = values[-self._longest :]
        return Put(f"{PREFIX}{number % ITEMS}", {"events": [values], "source_version": self._began + number})

    def ids(self, count: int) -> list[str]:
        """The ids of the first `count` writes."""
        return [f"{PREFIX}{n}" for n in range(min(count, ITEMS))]


class Mixed(NamedTuple):
    """The requests of a loop in order, and which of them are writes."""

    requests: list[bytes]
    is_write: list[bool]


def mixed(retrievals: Sequence[bytes], put: Callable[[int], bytes], per_s: float, writes_per_s: float, seconds: float) -> Mixed:
    """The requests of a loop of `per_s` retrievals and `writes_per_s` writes a second, evenly spread."""
    share = writes_per_s / (per_s + writes_per_s)
    count = max(1, round((per_s + writes_per_s) * seconds))
    is_write = [int((i + 1) * share) > int(i * share) for i in range(count)]
    requests, retrieval_count, write_count = [], 0, 0
    for write in is_write:
        requests.append(put(write_count) if write else retrievals[retrieval_count % len(retrievals)])
        retrieval_count, write_count = retrieval_count + (not write), write_count + write
    return Mixed(requests, is_write)


def put_bytes(target: Target, model: str, put: Put) -> bytes:
    path = f"{target.prefix}/models/{quote(model, safe='')}/items/{quote(put.id, safe='')}"
    return request_bytes(path, put.body, {"Host": target.authority, **target.headers}, method="PUT")


def delete_all(target: Target, model: str, ids: Sequence[str]) -> None:
    """Delete the items that a test has put. Raises ServiceRefused."""
    body = b"\n".join(json.dumps({"id": item, "delete": True}).encode() for item in ids)
    path = f"/models/{quote(model, safe='')}/items"
    status, content = exchange(target, "POST", path, body, "application/x-ndjson")
    errors = [line for line in content.splitlines() if json.loads(line)["status"] not in (*WRITTEN, 404)] if status == 200 else [content]
    if errors:
        raise ServiceRefused(f"POST {target}{path}: {status}, {errors[0][:200].decode(errors='replace')}")
