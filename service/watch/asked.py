"""What customers' requests asked for, beyond numbers: unknown ids, and a sample of the queries where a setting asks for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from service.watch.query_samples import QuerySamples
from service.watch.unknown_ids import UnknownIds


@dataclass(frozen=True)
class Asked:
    """Of one process. Used by the event loop alone."""

    unknown: UnknownIds
    samples: QuerySamples

    def note(self, model: str, version: int, queries: Sequence[BaseModel], unknown: Sequence[Sequence[str]]) -> None:
        """Note a request that was answered. unknown: the unknown ids of each of its queries."""
        self.unknown.note(model, unknown)
        self.samples.note(model, version, queries)
