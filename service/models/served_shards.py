"""The shards that a process serves, and what all searches of routers share.

Knows versions and limits. Does not know messages.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any

from espalier.shards.messages import Pin
from service.errors import NotServed, QueueFull
from service.models.loading import LoadedModel
from service.models.registry_entry import Entry
from service.models.shard_version import ShardVersion
from service.settings import Settings
from service.watch.metrics import Metrics

ANSWERS = 4
"""Answers of the largest size that may be made at a time."""


class ServedShards:
    """See the module.

    process  identifies this start of the service; its workers have one
    """

    def __init__(self, settings: Settings, metrics: Metrics, entries: Callable[[], Mapping[str, Entry]]) -> None:
        self.settings, self.metrics, self._entries = settings, metrics, entries
        run = settings.run_folder
        self.process = secrets.token_hex(8) if run is None else hashlib.sha256(str(run).encode()).hexdigest()[:16]
        self._values_left = ANSWERS * settings.max_search_values

    def find(self, pin: Pin) -> tuple[LoadedModel, ShardVersion]:
        """The version that a query is for; it counts as searched from now on. Raises NotServed."""
        entry = self._entries().get(str(pin.index))
        loaded = None if entry is None else entry.ready.get(pin.version)
        if loaded is None or loaded.shard is None or loaded.shard.pin != pin:
            raise NotServed(
                f"shard {pin.index} of {pin.count} of {pin.of[:64]} version {pin.version} ({pin.digest[:12]}) is not served here."
            )
        loaded.shard.searched_at = monotonic()
        return loaded, loaded.shard

    def described(self) -> list[dict[str, Any]]:
        """Every version of a shard that serves, as `GET /internal/shards` lists them."""
        return [
            {
                "model": loaded.name,
                **loaded.shard.info.model_dump(include={"of", "version", "digest", "index", "count"}),
                "items": len(loaded.shard.local.parts.items),
                "engine": loaded.engine.name,
                "ready": True,
            }
            for entry in self._entries().values()
            for _, loaded in sorted(entry.ready.items())
            if loaded.shard is not None
        ]

    @contextmanager
    def room(self, values: int) -> Iterator[None]:
        """Room for so many results while they are found and written. Raises QueueFull."""
        if values > self._values_left:
            raise QueueFull("Too many large answers are being made.", 1)
        self._values_left -= values
        try:
            yield
        finally:
            self._values_left += values
