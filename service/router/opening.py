"""How the router opens a version: with an engine that asks its shards, once all of them are there."""

from __future__ import annotations

import hashlib
from pathlib import Path

from espalier.bundle import Bundle, parse_manifest
from espalier.engines.live.engine import LiveEngine, LiveSearch
from espalier.engines.live.forest import LiveForestEngine
from espalier.engines.live.stacked import LiveStackedEngine
from espalier.errors import BundleCorrupt, UnsupportedSchema
from espalier.search import Device, Engine, Precision
from service.router.engine import ShardedEngine
from service.router.fleet import Fleet, Whole


class ShardedEngines:
    """Opens engines over the shards of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def open(self, bundle: Bundle, device: Device, engine: str | None, threads: int, precision: Precision) -> Engine:
        """An engine with live items; device, engine, threads and precision are those of the shards, elsewhere.

        Raises ShardsMissing, and BundleCorrupt where the bundle is a shard itself.
        """
        if (shard := bundle.manifest.shard) is not None:
            raise BundleCorrupt(f"{bundle.path}: shard {shard.index} of {shard.count}; a router opens the whole bundle, {shard.of}")
        return self._live(bundle)

    def _live(self, bundle: Bundle) -> LiveSearch:
        if bundle.manifest.stacking is not None:
            return LiveStackedEngine(bundle, self._live(bundle.unstacked))
        sharded = ShardedEngine(bundle, self._fleet)
        if bundle.manifest.trees:
            from service.router.forest import ShardedForest

            return LiveForestEngine(ShardedForest(bundle, sharded))
        return LiveEngine(bundle, sharded)

    def awaits(self, path: Path) -> str | None:
        """What models/<name>/<version>/ waits for; None: nothing."""
        try:
            content = (path / "manifest.json").read_bytes()
            if parse_manifest(content, str(path)).shard is not None:
                return None
        except (OSError, BundleCorrupt, UnsupportedSchema):
            return None  # opening it says what is wrong
        whole = _whole(path, content)
        return None if self._fleet.count_of(whole) is not None else self._fleet.missing(whole)

    def layout(self, path: Path) -> int | None:
        """Into how many shards models/<name>/<version>/ is cut that are all there; None: not all are."""
        try:
            return self._fleet.count_of(_whole(path, (path / "manifest.json").read_bytes()))
        except OSError:
            return None


def _whole(path: Path, manifest: bytes) -> Whole:
    """What the shards of a version's folder say that they are of."""
    return Whole(path.parent.name, int(path.name), hashlib.sha256(manifest).hexdigest())
