"""Which models and versions serve, and which version answers a request. Knows models and versions, not HTTP.

changes.py changes what serves; follower.py follows the models folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

from espalier.errors import MISSING, BundleNotFound, InvalidQuery, spelled
from espalier.serving import Candidate
from espalier.shards.messages import Pin

from ..errors import Conflict, Gone, NotFound, NotReady, QueueFull
from ..live.catalogue import LiveCatalogue
from ..live.catalogues import LiveCatalogues
from ..models.changes import Changes
from ..models.follower import STALE_S, Follower
from ..models.loading import EngineSource, LoadedModel
from ..models.registry_entry import Entry
from ..models.shard_version import ShardVersion
from ..models.store_state import StoreWait
from ..models.worker_progress import Workers
from ..settings import Settings, metrics_folder
from ..watch.metrics import Metrics

if TYPE_CHECKING:
    from ..models.backups import Backups
    from ..models.store_mirror import StoreMirror

log = logging.getLogger(__name__)

CHECK_S = 0.02
"""Seconds between two checks of the other workers."""
MAX_LARGE_ANSWERS = 4
"""How many answers of the largest size a process may make for routers at a time."""


class Registry:
    """The models of one folder. Raises BundleNotFound when it holds none, unless they come from a store.

    shards       the versions that are shards, for routers
    leaving      the process stops soon: /readyz says so; requests are still served
    draining     requests are refused
    """

    def __init__(self, settings: Settings, metrics: Metrics, engines: EngineSource | None = None) -> None:
        if settings.run_folder is not None:
            metrics.folder = metrics_folder(settings.run_folder)
        metrics.watch_disk(settings.models)
        if settings.store is not None:
            from espalier.store.fetching import put_back  # here, because its library takes memory and most services have no store

            put_back(settings.models)
        self._workers = Workers(settings.run_folder)
        self.catalogues = LiveCatalogues(settings, metrics, lambda: {name: entry.catalogue for name, entry in self.entries.items()})
        self._follower = Follower(settings, metrics, engines or EngineSource(), self._workers, self.catalogues)
        self.entry, self.wait_until_loaded = self._follower.entry, self._follower.wait_until_loaded
        self._mirror: StoreMirror | None = None
        if settings.store is not None:
            from ..models.store_mirror import StoreMirror  # as above

            self._mirror = StoreMirror(settings, settings.store, metrics, self._workers, self._follower)
            self._follower.starting = self._mirror.starting
        elif not self.entries:
            expected = "<name>/<version>/manifest.json, as `espalier fit` writes them"
            if settings.shard is not None:
                expected = f"{settings.shard}/<version>/manifest.json, as `espalier shard` writes them (ESPALIER_SHARD)"
            raise BundleNotFound(f"{settings.models}: no model there; expected {expected}")
        self._backups: Backups | None = None
        if settings.backup is not None and settings.follow is None:
            from ..models.backups import Backups  # as above

            self._backups = Backups(settings, settings.backup, metrics)
        self.shards = ServedShards(settings, metrics, lambda: self.entries)
        self.changes = Changes(settings, metrics, self._follower, self._workers)
        self.leaving = self.draining = False

    @property
    def entries(self) -> dict[str, Entry]:
        """Every model by its name. The dictionary is replaced, never changed."""
        return self._follower.entries

    def start_loading(self) -> None:
        """Load in the background, and follow the models folder from then on."""
        self._follower.start()
        if self._mirror is not None:
            self._mirror.start()
        if self._backups is not None:
            self._backups.start()

    async def take_over(self) -> None:
        """If other workers serve, wait until this one serves the same models. Until then the others take the connections."""
        logged_models: set[str] = set()
        while not self.leaving and self._workers.others_serve():
            if self._follower.wait_until_loaded(0):
                behind = self._workers.behind()
                if not behind:
                    return
                if behind - logged_models:
                    log.error("this worker takes no connections: others serve %s, and it cannot", ", ".join(sorted(behind)))
                    logged_models = behind
            await asyncio.sleep(CHECK_S)

    def not_ready(self) -> list[str]:
        """Why the service is not ready, one line per reason; empty when it is."""
        if self.draining or self.leaving:
            return ["shutting down"]
        lines = [] if self._mirror is None else self._mirror.lines()
        for entry in self.entries.values():
            if entry.state != "ready" and not entry.late:
                lines.append(f"{entry.name} version {entry.version}: {entry.state}" + (f": {entry.reason}" if entry.reason else ""))
            elif not entry.tried and not entry.late:
                waiting = [info.version for info in entry.states() if info.state == "loading"]
                lines += [f"{entry.name} version {version}: loading" for version in waiting]
        if not lines and not self._workers.have_started({name for name, entry in self.entries.items() if not entry.late}):
            return ["another worker has not loaded every model yet"]
        return lines

    def waits_for(self, name: str) -> StoreWait | None:
        """What a model waits for from the store."""
        return None if self._mirror is None else self._mirror.state.waits.get(name)

    def catalogue(self, name: str) -> LiveCatalogue:
        """The live catalogue of a model. Raises NotFound."""
        return self.entry(name).catalogue

    def only(self) -> LoadedModel | None:
        """The version that serves, if one version of one model is all that serves."""
        entries = self._follower.entries
        if len(entries) != 1 or self.draining:
            return None
        entry = next(iter(entries.values()))
        return entry.loaded if len(entry.ready) == 1 else None

    def choose(self, name: str | None, version: int | None, visible: frozenset[str] | None = frozenset()) -> LoadedModel:
        """The version that answers a request. Without a name, of the only model; without a number, the default version.
        visible: the models that an error may name, which are those of the request's key; None: all. By default it names none.

        The version stays open as long as it is referenced, so that a swap fails no request. Keep it no longer than the request.
        Raises InvalidQuery when a request names no model and there are several, NotFound, NotReady.
        """
        entries = self._follower.entries
        names = [other for other in entries if visible is None or other in visible]
        if name is None:
            if len(entries) > 1:
                raise InvalidQuery(
                    "model", MISSING, f"one of {', '.join(names)}" if names else "a model that the key may use; none is here"
                )
            if not entries:
                raise NotReady("No model has come from the store yet; see /readyz.")
            name = next(iter(entries))
        entry = entries.get(name)
        if entry is None:
            raise NotFound(f"There is no model {spelled(name)}." + (f" Models: {', '.join(names)}." if names else ""))
        loaded = entry.loaded if version is None else entry.ready.get(version)
        if self.draining:
            raise NotReady("The service is shutting down.")
        if loaded is not None:
            if monotonic() - entry.looked_at > STALE_S:
                self._follower.look_again(entry)
            return loaded
        if version is not None and version not in entry.desired:
            serving = ", ".join(f"version {number}" for number in sorted(entry.ready)) or "none"
            raise NotFound(f"Version {version} of {spelled(name)} is not loaded; loaded: {serving}.")
        raise NotReady(f"Model {spelled(name)}{f' version {version}' if version else ''} is not ready; see /readyz and /models/{name}.")

    def choose_whole(self, name: str | None, version: int | None, visible: frozenset[str] | None = frozenset()) -> LoadedModel:
        """As `choose`, for a request that a shard cannot answer. Raises Conflict too."""
        loaded = self.choose(name, version, visible)
        if loaded.shard is not None:
            raise _is_shard(loaded, loaded.shard)
        return loaded

    def candidate(self, name: str) -> tuple[LoadedModel, Candidate] | None:
        """The candidate on trial, loaded, and the requests that it gets. None without a trial, or if the candidate does not serve."""
        entry = self._follower.entries[name]
        candidate = None if entry.serving is None else entry.serving.candidate
        loaded = None if candidate is None else entry.ready.get(candidate.version)
        return None if candidate is None or loaded is None or loaded.shard is not None else (loaded, candidate)

    def check_whole(self, name: str) -> None:
        """Raise Conflict if the default version of a model is a shard, NotFound if there is no such model."""
        if (loaded := self.entry(name).loaded) is not None and loaded.shard is not None:
            raise _is_shard(loaded, loaded.shard)

    async def unknown(self, name: str, ids: Sequence[str]) -> list[str]:
        """The ids that are not in the catalogue of the default version. Raises NotFound."""
        entry = self.entry(name)
        if entry.loaded is None:
            return []
        rows = await asyncio.to_thread(entry.loaded.live.items.rows_of, ids)
        return [item_id for item_id, row in zip(ids, rows.tolist(), strict=True) if row < 0]

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and finish the accepted ones, within `timeout_s`."""
        self.draining = True
        self._follower.stop()
        if self._mirror is not None:
            self._mirror.stop()
        if self._backups is not None:
            self._backups.stop()
        await self.changes.stop()
        await self.catalogues.stop()
        entries = self.entries.values()
        versions = [(entry.name, loaded.batcher) for entry in entries for loaded in entry.ready.values()]
        versions += [(entry.name, retired.model.batcher) for entry in entries for retired in entry.retired]
        finished = await asyncio.gather(*(batcher.drain(timeout_s) for _, batcher in versions))
        for (name, _), done in zip(versions, finished, strict=True):
            if not done:
                log.warning("%s: accepted requests were not finished within %g s", name, timeout_s)
        self._workers.leave()


def _is_shard(model: LoadedModel, shard: ShardVersion) -> Conflict:
    return Conflict(f"{spelled(model.name)} is {shard}: a part of a catalogue. Ask the router of {spelled(shard.info.of)} instead.")


class ServedShards:
    """The shards that a process serves, and the room that all answers to routers share.

    process  identifies one start of the service; all its workers have the same
    """

    def __init__(self, settings: Settings, metrics: Metrics, entries: Callable[[], Mapping[str, Entry]]) -> None:
        self.settings, self.metrics, self._entries = settings, metrics, entries
        run = settings.run_folder
        self.process = secrets.token_hex(8) if run is None else hashlib.sha256(str(run).encode()).hexdigest()[:16]
        self._values_left = MAX_LARGE_ANSWERS * settings.max_search_values

    def find(self, pin: Pin) -> tuple[LoadedModel, ShardVersion]:
        """The version with this pin; its time of the last search becomes now. Raises Gone."""
        entry = self._entries().get(str(pin.index))
        loaded = None if entry is None else entry.ready.get(pin.version)
        if loaded is None or loaded.shard is None or loaded.shard.pin != pin:
            raise Gone(f"shard {pin.index} of {pin.count} of {pin.of[:64]} version {pin.version} ({pin.digest[:12]}) is not served here.")
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
        """Reserve room for so many values while an answer is searched and written. Raises QueueFull."""
        if values > self._values_left:
            raise QueueFull("Too many large answers are being made.", 1)
        self._values_left -= values
        try:
            yield
        finally:
            self._values_left += values
