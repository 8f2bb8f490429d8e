"""The most recent queries of customers, for admins. They are kept only in memory, and only if a setting says so.

Knows queries as JSON. Does not know their meaning.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import orjson
from pydantic import BaseModel

MAX_BYTES = 64 << 20
"""Most bytes of JSON of all samples."""
QUERY_BYTES = 1 << 16
"""Larger queries are not kept."""
PER_REQUEST = 16
"""Of one request, only so many queries are kept, the first ones."""


class Sample(NamedTuple):
    """One query. at: seconds since 1970; query: its JSON."""

    at: float
    model: str
    version: int
    query: bytes


class QuerySamples:
    """The `most` most recent queries of this process, 0 for none. All methods may be called from any thread."""

    def __init__(self, most: int, clock: Callable[[], float] = time.time) -> None:
        self.most, self._clock = most, clock
        self._samples: deque[Sample] = deque()
        self._bytes = 0
        self._lock = threading.Lock()  # guards both

    def note(self, model: str, version: int, queries: Sequence[BaseModel]) -> None:
        """Keep the queries of a request. Costs some microseconds each."""
        contents = [query.model_dump_json(exclude_unset=True).encode() for query in queries[:PER_REQUEST]]
        with self._lock:
            for content in contents:
                if len(content) <= QUERY_BYTES:
                    self._samples.append(Sample(self._clock(), model, version, content))
                    self._bytes += len(content)
            while len(self._samples) > self.most or self._bytes > MAX_BYTES:
                self._bytes -= len(self._samples.popleft().query)

    def forget(self, model: str) -> None:
        """Drop all queries of a model."""
        with self._lock:
            self._samples = deque(sample for sample in self._samples if sample.model != model)
            self._bytes = sum(len(sample.query) for sample in self._samples)

    def of(self, model: str, limit: int, version: int | None = None) -> list[Sample]:
        """A model's most recent queries, newest first."""
        with self._lock:
            samples = [sample for sample in reversed(self._samples) if sample.model == model and version in (None, sample.version)]
        return samples[:limit]


def as_json(samples: Sequence[Sample], most: int) -> bytes:
    """`{"queries": [{"at", "version", "query"}], "most"}`."""
    queries = [{"at": round(sample.at, 3), "version": sample.version, "query": orjson.Fragment(sample.query)} for sample in samples]
    return orjson.dumps({"queries": queries, "most": most})
