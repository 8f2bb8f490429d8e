"""The router as an ASGI application: the ordinary service with engines that search shards.

A version is opened once replicas serve all its shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

from espalier.bundle import Bundle, parse_manifest
from espalier.engines.pipeline import Pipeline
from espalier.errors import BundleCorrupt, UnsupportedSchema
from espalier.search import Device, Engine, Precision

from ..app import create_app
from ..models.loading import EngineSource
from ..router.config import RouterConfig, with_key_of
from ..router.connections import HttpTransport
from ..router.fleet import Fleet
from ..router.replicas import Whole
from ..router.shard_search import ShardSearch
from ..router.transport import Transport
from ..settings import Settings
from ..watch.metrics import Metrics

FIRST_POLL_S = 2.0
"""How long loading waits until all replicas were polled once."""


def create_router(settings: Settings, config: RouterConfig, transport: Transport | None = None) -> FastAPI:
    """The service over the bundles of a models folder, whose items are on the shards at `config.shards`.

    transport  how the shards are reached; None: by HTTP
    Raises BundleNotFound when the folder holds no model.
    """
    metrics = Metrics()
    if transport is None:
        transport = HttpTransport(with_key_of(config, settings), settings.client_certificates)
    fleet = Fleet(transport, config.shards, config, metrics)
    app = create_app(settings, ShardedEngines(fleet), metrics)
    service_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        fleet.start()
        fleet.wait_until_polled(FIRST_POLL_S)
        try:
            async with service_lifespan(app):
                yield
        finally:
            fleet.close()

    app.router.lifespan_context = lifespan
    return app


class ShardedEngines(EngineSource):
    """Engines that search the shards of a fleet. The shards' services have devices, engines, threads and a precision of their own."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(self._open)
        self._fleet, self.calls = fleet, fleet.config.calls

    def _open(self, bundle: Bundle, device: Device, engine: str | None, threads: int, precision: Precision) -> Pipeline:
        """Raises ShardsMissing, and BundleCorrupt if the bundle is a shard itself."""
        if (shard := bundle.manifest.shard) is not None:
            raise BundleCorrupt(f"{bundle.path}: shard {shard.index} of {shard.count}; a router opens the whole bundle, {shard.of}")
        return Pipeline(bundle, ShardSearch(bundle, self._fleet))

    def layout_of(self, engine: Engine) -> int | None:
        trees = engine.tree_search if isinstance(engine, Pipeline) else None
        return trees.count if isinstance(trees, ShardSearch) else None

    def awaits(self, path: Path) -> str | None:
        try:
            content = (path / "manifest.json").read_bytes()
            is_shard = parse_manifest(content, str(path)).shard is not None
            return None if is_shard else self._fleet.awaits(_whole(path, content))
        except (OSError, BundleCorrupt, UnsupportedSchema):
            return None  # opening it reports the error

    def layout(self, path: Path) -> int | None:
        try:
            return self._fleet.count_of(_whole(path, (path / "manifest.json").read_bytes()))
        except OSError:
            return None


def _whole(path: Path, manifest: bytes) -> Whole:
    """The identity that shards of a version give as their origin."""
    return Whole(path.parent.name, int(path.name), hashlib.sha256(manifest).hexdigest())
