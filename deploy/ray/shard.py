"""A replica of a shard: the ordinary models of one folder without HTTP. A query and its answer are bytes.

Ray starts it, checks its health, and replaces it. It follows the shard's folder by itself, as the service does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from espalier.compile import make_ready
from espalier.errors import EspalierError
from service.models.registry import Registry
from service.settings import warn_of_unknown_settings
from service.shards.search import answer_search
from service.watch import logs
from service.watch.metrics import Metrics

from ..ray.arguments import settings_of

LOOK_S = 0.05
"""Seconds between two checks whether the versions are loaded."""


class NotLoaded(EspalierError):
    """A replica cannot serve. The text says why."""


class Shard:
    """See the module. The constructor returns once the versions serve, so that Ray sends no query before.

    Raises BundleNotFound, or NotLoaded if no version can serve.
    """

    async def __init__(self, settings: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        """settings: from app.yaml; others come from the environment of the replica."""
        self._settings = settings_of(settings)
        logs.configure(self._settings.log_level, self._settings.log_format)
        warn_of_unknown_settings(self._settings)
        await asyncio.to_thread(make_ready)
        self._registry = Registry(self._settings, Metrics())
        self._registry.start_loading()
        self.__del__ = self.stop  # Ray awaits this at the end. If it were a method, Python's collector would call it too
        while not self._is_tried():
            await asyncio.sleep(LOOK_S)
        self.check_health()

    def _is_tried(self) -> bool:
        """Whether it serves, or cannot without help. Versions from a store may take longer."""
        registry, states = self._registry, [entry.state for entry in self._registry.entries.values()]
        if not registry.wait_until_loaded(0) or "loading" in states:
            return False
        return not registry.not_ready() or "failed" in states or self._settings.store is None

    def check_health(self) -> None:
        """Ray replaces a replica that raises, or that does not answer in time. Raises NotLoaded."""
        if self._registry.draining or not any(entry.ready for entry in self._registry.entries.values()):
            raise NotLoaded("; ".join(self._registry.not_ready()) or "no version serves")

    async def search(self, body: bytes) -> tuple[int, bytes]:
        """Status and body as of POST /internal/search. (Ray would log the whole trace of a raised error.)"""
        return await answer_search(self._registry, body)

    async def shards(self) -> Sequence[Mapping[str, Any]]:
        """Every version that serves, as in GET /internal/shards."""
        return self._registry.shards.described()

    async def stop(self) -> None:
        """Finish the accepted queries. Ray sends no more of them, and waits for this."""
        await self._registry.drain(self._settings.drain_s)
