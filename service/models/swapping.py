"""Changes of what one model serves: versions are loaded, published, retired and closed, each change as a whole.

A version that fails to load never disturbs the others. Knows entries and versions. Does not know when to change them, nor the files of
desired state; follower.py does.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from time import monotonic

from espalier.serving import Serving

from ..errors import ShardsMissing
from ..models.loading import (
    MANIFEST,
    EngineSource,
    LoadedModel,
    LoadFailed,
    compare_contents,
    compare_files,
    files_of,
    is_replaced,
    load_version,
    lower_priority,
)
from ..models.openings import Openings
from ..models.registry_entry import Entry, Retired
from ..models.worker_progress import Workers
from ..settings import Settings
from ..watch.metrics import Metrics
from ..watched_files import Signature, signature

log = logging.getLogger(__name__)

SHARD_VERSIONS = 2
"""How many versions of a shard serve without a serving.json: the highest, and the one that routers still ask. Routers change to the highest
only when all shards have it."""
MAX_DEATHS_BESIDE_OTHERS = 2
"""If other workers serve a version, so many processes may end while they open it before it is left out: they may have been killed for
another reason."""
_Present = tuple[int | None, Signature | None]
"""What opening a version anew depends on: the shards' layout, and the manifest that is in its folder now."""


class Swapper:
    """Changes entries.

    openings  which versions ended the process that opened them
    on_free   called, from any thread, when the last reference to a retired version has gone
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        engines: EngineSource,
        workers: Workers,
        openings: Openings,
        on_free: Callable[[], None],
    ) -> None:
        self._settings, self._metrics, self._engines, self._on_free = settings, metrics, engines, on_free
        self._workers, self._openings = workers, openings
        self._warned_models: weakref.WeakSet[LoadedModel] = weakref.WeakSet()
        self._tried_at_reopening: weakref.WeakKeyDictionary[LoadedModel, _Present] = weakref.WeakKeyDictionary()
        self._overwritten_models: weakref.WeakSet[LoadedModel] = weakref.WeakSet()
        self._comparer = threading.Thread()

    def serve_highest(self, entry: Entry) -> None:
        """Serve only the highest version that loads; of a shard the SHARD_VERSIONS highest.

        Without polling, the version that serves stays, unless a higher one had to wait. Raises LoadFailed when no version loads,
        ShardsMissing when none loads and one may later.
        """
        serving_version = None if entry.loaded is None else entry.loaded.version
        eligible_versions = entry.versions
        if serving_version is not None and self._settings.poll_s is None:
            eligible_versions = tuple(v for v in entry.versions if v > serving_version and v in entry.waiting)
        entry.waiting = {}
        loaded_models: dict[int, LoadedModel] = {}
        deadly_versions = [version for version in reversed(eligible_versions) if self._is_deadly(entry, version)]
        failed_versions = deadly_versions[:]
        order = [version for version in reversed(eligible_versions) if version not in deadly_versions]
        order += [] if serving_version is None or serving_version in eligible_versions else [serving_version]
        gone = {version for version, loaded in entry.ready.items() if self.is_gone(entry, loaded)}
        for version in (*order, *deadly_versions):
            if version in gone and loaded_models:
                continue
            loaded = entry.ready.get(version)
            if loaded is None and (version in deadly_versions or not known_bad(entry, version)):
                if version in deadly_versions and (loaded_models or entry.waiting):
                    break  # a deadly version is opened only if nothing else serves
                loaded = self._open(entry, version)
            if loaded is None:
                if not (loaded_models or version in entry.waiting or version in deadly_versions):
                    failed_versions.append(version)
                continue
            loaded_models[version] = loaded
            if len(loaded_models) == 1 and failed_versions:
                log.error("%s: version %d serves, because version %s failed", entry.name, version, ", ".join(map(str, failed_versions)))
            with entry.lock:
                ready_before = {v: other for v, other in entry.ready.items() if v not in gone and loaded.shard is not None}
                self._publish(entry, {**ready_before, **loaded_models}, max(loaded_models))
            if loaded.shard is None or len(loaded_models) == SHARD_VERSIONS:
                break
        if not loaded_models and entry.waiting:
            raise ShardsMissing("; ".join(entry.waiting.values()))
        if not loaded_models:
            raise LoadFailed("; ".join(entry.reasons.get(version, "") for version in failed_versions))
        self.retire_unsearched(entry)

    def is_gone(self, entry: Entry, loaded: LoadedModel) -> bool:
        """Whether the mirror of a store has deleted a version that serves."""
        return self._settings.store is not None and loaded.version not in entry.versions and not loaded.bundle.path.exists()

    def retire_unsearched(self, entry: Entry) -> None:
        """Retire shard versions that no router has searched for a while, except the highest. With a serving.json, retire none.

        Versions stay until a router has searched the highest after them, too: at night no router may ask for minutes, and they are still
        its default and its candidate.
        """
        if entry.serving is not None or len(entry.ready) <= SHARD_VERSIONS:
            return
        with entry.lock:
            highest = sorted(entry.ready, reverse=True)[:SHARD_VERSIONS]
            search_of_highest = shard.searched_at if (shard := entry.ready[highest[0]].shard) is not None else inf
            ready = {
                version: loaded
                for version, loaded in entry.ready.items()
                if version in highest
                or loaded.shard is None
                or monotonic() - loaded.shard.searched_at < self._settings.shard_linger_s
                or loaded.shard.searched_at > search_of_highest
            }
            if len(ready) < len(entry.ready):
                self._publish(entry, ready, entry.version)

    def serve(self, entry: Entry, serving: Serving) -> None:
        """Serve the versions of serving.json. Once the default version serves, a change applies to all versions or to none.

        Raises LoadFailed, and ShardsMissing when a version cannot be opened yet.
        """
        fresh: dict[int, LoadedModel] = {}
        failed_version: int | None = None
        first = entry.loaded is None
        entry.waiting = {}
        unready = [version for version in serving.versions if version not in entry.ready]
        if not first and [version for version in unready if self._waits(entry, version)]:
            raise ShardsMissing("; ".join(entry.waiting.values()))
        for version in (serving.default, *(v for v in serving.versions if v != serving.default)):
            if version in entry.ready or version in fresh:
                continue
            left_out = not (first and version == serving.default) and self._is_deadly(entry, version)
            loaded = None if left_out else self._open(entry, version)
            if loaded is None and version in entry.waiting and first:
                continue
            if loaded is None:
                failed_version = failed_version or version
                if not first:
                    break
                continue
            fresh[version] = loaded
            if first:
                with entry.lock:
                    self._publish(entry, {**entry.ready, **fresh}, serving.default)
        with entry.lock:
            if failed_version is None or first:
                ready = {v: loaded for v, loaded in {**entry.ready, **fresh}.items() if v in serving.versions}
                self._publish(entry, ready, serving.default)
            else:
                entry.retired += tuple(self._retire(entry, loaded) for loaded in fresh.values())
        if entry.waiting:
            raise ShardsMissing("; ".join(entry.waiting.values()))
        if failed_version is not None:
            raise LoadFailed(entry.reasons[failed_version])

    def reopen(self, entry: Entry, before: LoadedModel) -> None:
        """Open a version that serves once more, and let the new copy serve in its place."""
        self._tried_at_reopening[before] = self._present(before)
        loaded = self._open(entry, before.version)
        if loaded is None and before.version in entry.waiting:  # its shards have gone again: reopen it when they are back
            entry.waiting = {version: text for version, text in entry.waiting.items() if version != before.version}
            self._tried_at_reopening.pop(before, None)
        if loaded is not None:
            with entry.lock:
                serves = entry.ready.get(before.version) is before
                ready = {**entry.ready, before.version: loaded} if serves else dict(entry.ready)
                self._publish(entry, ready, entry.version)
                entry.retired += () if serves else (self._retire(entry, loaded),)

    def why_reopen(self, loaded: LoadedModel) -> str:
        """Why a version must be opened anew; empty if it need not, or if that was tried with the present layout and content."""
        if loaded in self._tried_at_reopening and self._tried_at_reopening[loaded] == self._present(loaded):
            return ""
        layout = self._engines.layout(loaded.bundle.path)
        if why := loaded.live.why_reopen:
            return why
        served = layout is not None or loaded.searched_shards is None  # a router waits for the shards of the other version
        if self._settings.store is not None and served and is_replaced(loaded):
            return "the store's version has replaced it on this host"
        if layout in (None, loaded.searched_shards):
            return ""
        return f"it is cut into {layout} shards now, not {loaded.searched_shards}"

    def _present(self, loaded: LoadedModel) -> _Present:
        return self._engines.layout(loaded.bundle.path), signature(loaded.bundle.path / MANIFEST)

    def remove(self, entry: Entry, ids: tuple[str, ...]) -> None:
        """Replace the list of items that no answer may hold. The caller holds the entry's lock."""
        before, entry.removed = entry.removed, ids
        for loaded in entry.ready.values() if ids != before else ():
            loaded.live.set_removed(ids)

    def check_files(self, entry: Entry, loaded: LoadedModel) -> bool:
        """Check whether a version's files are still those that were loaded. If they changed, stop the version and return True.

        If a file was written to and kept its size, a thread compares the contents. The version serves until the result is known.
        """
        change = compare_files(loaded.files)
        if change == "elsewhere" and loaded not in self._warned_models:
            self._warned_models.add(loaded)
            log.warning("%s version %d: its files were deleted or replaced; the loaded content serves on", loaded.name, loaded.version)
        if change == "written" and not self._comparer.is_alive():
            self._comparer = threading.Thread(target=self._compare, args=(loaded,), name="comparer", daemon=True)
            self._comparer.start()
        if change == "changed" or loaded in self._overwritten_models:
            self._stop(entry, loaded)
            return True
        return False

    def _compare(self, loaded: LoadedModel) -> None:
        lower_priority()
        same = compare_contents(loaded)
        if same:
            log.warning("%s version %d: its files were written to, with the same content; it serves on", loaded.name, loaded.version)
        elif same is not None:
            self._overwritten_models.add(loaded)

    def _stop(self, entry: Entry, loaded: LoadedModel) -> None:
        reason = "its files were changed in place while it was serving; a version is never overwritten: write a new one"
        log.error("%s version %d stops: %s", loaded.name, loaded.version, reason)
        self._metrics.count("espalier_reload_total", entry.name, "failed")
        with entry.lock:
            entry.fail(loaded.version, reason, files_of(loaded.bundle.path))
            self._publish(entry, {v: other for v, other in entry.ready.items() if other is not loaded}, entry.version)

    def close(self, entry: Entry, retired: Retired) -> None:
        """Free a version that nothing references any more."""
        model, version = retired.model, retired.model.version
        asyncio.run(model.batcher.drain(self._settings.drain_s))
        model.metrics.close()
        model.batcher.on_call = lambda batch, seconds: None  # breaks a cycle, so that memory comes back now
        model.engine.close()
        with entry.lock:
            entry.retired = tuple(other for other in entry.retired if other is not retired)
            if version not in entry.ready:  # its last requests have counted since it was retired
                self._metrics.forget_version(entry.name, version)
        self._metrics.count("espalier_reload_total", entry.name, "unloaded")
        log.info("%s version %d is unloaded", entry.name, version)

    def _waits(self, entry: Entry, version: int) -> bool:
        """Whether a version cannot be opened yet; the entry says why."""
        text = self._engines.awaits(entry.disk.folder / str(version))
        if text is not None:
            entry.waiting = {**entry.waiting, version: text}
        return text is not None

    def _is_deadly(self, entry: Entry, version: int) -> bool:
        """Whether too many processes ended while they opened a version. Only an admin's request opens it again; the entry says so."""
        if version in entry.ready:
            return False
        folder = entry.disk.folder / str(version)
        deaths = self._openings.deaths(folder)
        if deaths <= (MAX_DEATHS_BESIDE_OTHERS if deaths and self._workers.others_have(entry.name, version) else 0):
            return False
        reason = (
            f"a process ended while it opened the version, as where memory has no room for it. It is not opened again by itself: "
            f"POST /models/{entry.name}/load asks for it"
        )
        with entry.lock:
            entry.fail(version, reason, files_of(folder))
        self._metrics.count("espalier_reload_total", entry.name, "failed")
        log.error("%s version %d is left out: %s", entry.name, version, reason)
        return True

    def _open(self, entry: Entry, version: int) -> LoadedModel | None:
        """A version ready to serve. None if it failed or must wait; the entry says why. (An exception would keep its engine alive.)"""
        if self._waits(entry, version):
            return None
        entry.loading = version
        loaded, reason = None, ""
        folder = entry.disk.folder / str(version)
        files = files_of(folder)
        try:
            join = partial(self._join, entry)
            with self._openings.noted(folder):
                loaded = load_version(self._settings, self._metrics, self._engines, entry.name, version, join)
            self._openings.forgive(folder)
        except LoadFailed as error:
            reason = str(error)
        except ShardsMissing as error:
            entry.waiting = {**entry.waiting, version: str(error)}
            entry.loading = None
            return None
        with entry.lock:
            entry.fail(version, reason, files)
        entry.loading = None
        if loaded is None and version not in entry.ready:
            self._metrics.forget_version(entry.name, version)
        self._metrics.count("espalier_reload_total", entry.name, "failed" if loaded is None else "loaded")
        return loaded

    def _join(self, entry: Entry, loaded: LoadedModel) -> None:
        """Bring the live items of a version up to date before it serves."""
        loaded.live.parents = partial(loaded.batcher.parents_now, loaded.live.parents)
        loaded.live.set_removed(entry.removed)  # before operations are applied
        if self._settings.write_keys or self._settings.follow or entry.catalogue.journal.exists():
            loaded.live.warm_up()
        entry.catalogue.join(loaded.live)

    def _publish(self, entry: Entry, ready: dict[int, LoadedModel], default: int) -> None:
        """Serve these versions from now on, and no others. The caller holds the entry's lock."""
        before = entry.ready
        if not before:
            entry.looked_at = -inf  # nobody waited for this worker before, so it reads the removals before its first answer
        fresh = {version: loaded for version, loaded in ready.items() if before.get(version) is not loaded}
        for loaded in fresh.values():
            loaded.live.set_removed(entry.removed)  # the list may have changed, or become empty, while the version was opened
        entry.ready, entry.loaded = ready, ready.get(default)
        for version, loaded in fresh.items():  # after `ready` is set: readers of this line send requests at once
            self._metrics.show("espalier_model_info", True, entry.name, version, loaded.engine.name)
            log.info("%s version %d is ready on %s", entry.name, version, loaded.engine.name)
        dropped_models = [loaded for version, loaded in before.items() if ready.get(version) is not loaded]
        entry.retired += tuple(self._retire(entry, loaded) for loaded in dropped_models)
        for loaded in dropped_models:
            if loaded.version not in ready:
                self._metrics.forget_version(entry.name, loaded.version)

    def _retire(self, entry: Entry, loaded: LoadedModel) -> Retired:
        entry.catalogue.thread.leave(loaded.live)
        return Retired(weakref.ref(loaded, lambda _: self._on_free()), replace(loaded))


def known_bad(entry: Entry, version: int) -> bool:
    """Whether a version failed and has not changed since."""
    return version in entry.bad_files and entry.bad_files[version] == files_of(entry.disk.folder / str(version))
