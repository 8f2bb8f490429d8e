"""Which models and versions serve, which one a request means, and how that is changed from outside.

A change is written to the models folder (desired_state.py) and followed by every worker (follower.py). It is answered when all have; when
one of them cannot, it is taken back everywhere. Knows models and versions, not HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any, NamedTuple, TypeVar

from espalier.bundle import find_versions
from espalier.engines import open_engine
from espalier.errors import BundleNotFound, InvalidData, InvalidQuery
from service.errors import BeingChanged, Conflict, ModelNotFound, NotReady
from service.models.desired_state import Removed, Serving
from service.models.follower import Follower
from service.models.loading import LoadedModel, OpenEngine
from service.models.registry_entry import Entry
from service.models.worker_progress import WorkerProgress, Workers
from service.settings import Settings, metrics_folder
from service.watch.metrics import Metrics

__all__ = ["Entry", "LoadedModel", "OpenEngine", "Registry"]
log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 0.02
"""Between two looks at how far the workers are."""
EDIT_WAIT_S = 5.0
"""How long a change of removals waits for others to end. A change of versions does not wait: loading can take minutes."""


class Served(NamedTuple):
    """What a model serves: its versions, ascending, and the one that answers where a request names none."""

    versions: tuple[int, ...]
    default: int


class Edited(NamedTuple):
    """The removed ids before a change and after it."""

    before: tuple[str, ...]
    after: tuple[str, ...]


class Registry:
    """The models of one folder. Raises BundleNotFound when it holds none.

    open_engine  how an engine is opened; tests bring their own
    leaving      the process will stop soon: /readyz says so, requests are still served
    draining     nothing is accepted any more
    """

    def __init__(self, settings: Settings, metrics: Metrics, open_engine: OpenEngine = open_engine) -> None:
        self._settings, self._metrics = settings, metrics
        if settings.run_folder is not None:
            metrics.share(metrics_folder(settings.run_folder))
        self._workers = Workers(settings.run_folder)
        self._follower = Follower(settings, metrics, open_engine, self._workers)
        if not self.entries:
            raise BundleNotFound(
                f"{settings.models}: no model there; expected <name>/<version>/manifest.json, as `python -m training fit` writes them"
            )
        self.leaving = self.draining = False
        self._changes: set[asyncio.Task[Any]] = set()

    @property
    def entries(self) -> dict[str, Entry]:
        """Every model by its name; never changed, only replaced."""
        return self._follower.entries

    def start_loading(self) -> None:
        """Load in the background, and follow the models folder from then on."""
        self._follower.start()

    def wait_until_loaded(self, timeout_s: float | None = None) -> bool:
        """Block until everything that should serve was tried once. False when that took longer."""
        return self._follower.wait_until_loaded(timeout_s)

    async def take_over(self) -> None:
        """Where other workers serve already, wait until this one serves what they do: until then connections are theirs."""
        said: set[str] = set()
        while not self.leaving and self._workers.others_serve():
            if self._follower.wait_until_loaded(0):
                behind = self._workers.behind()
                if not behind:
                    return
                if behind - said:
                    log.error("this worker takes no connections: others serve %s, and it cannot", ", ".join(sorted(behind)))
                    said = behind
            await asyncio.sleep(LOOK_S)

    def not_ready(self) -> list[str]:
        """Why the service is not ready, one line per reason; empty when it is."""
        if self.draining or self.leaving:
            return ["shutting down"]
        lines = []
        for entry in self.entries.values():
            if entry.state != "ready" and not entry.late:
                lines.append(f"{entry.name} version {entry.version}: {entry.state}" + (f": {entry.reason}" if entry.reason else ""))
            elif not entry.tried and not entry.late:
                waiting = [info.version for info in entry.states() if info.state == "loading"]
                lines += [f"{entry.name} version {version}: loading" for version in waiting]
        return lines

    def entry(self, name: str) -> Entry:
        """A model by name. Raises ModelNotFound."""
        try:
            return self.entries[name]
        except KeyError:
            raise ModelNotFound(f"There is no model {name!r}. Models: {', '.join(self.entries)}.") from None

    def only(self) -> LoadedModel | None:
        """The version that serves, where there is just one of one model."""
        if len(self.entries) > 1 or self.draining:
            return None
        entry = next(iter(self.entries.values()))
        return entry.loaded if len(entry.ready) == 1 else None

    def choose(self, name: str | None, version: int | None) -> LoadedModel:
        """The version that a request means: by name, or of the only model; by number, or the default.

        It serves as long as somebody holds it, so that a swap fails no request: keep it no longer than the request.
        Raises InvalidQuery when no name is given and there are several, ModelNotFound, NotReady.
        """
        if name is None:
            if len(self.entries) > 1:
                raise InvalidQuery("model", None, f"one of {', '.join(self.entries)}")
            name = next(iter(self.entries))
        entry = self.entry(name)
        found = entry.loaded if version is None else entry.ready.get(version)
        if self.draining:
            raise NotReady("The service is shutting down.")
        if found is not None:
            return found
        if version is not None and version not in entry.desired:
            serving = ", ".join(f"version {number}" for number in sorted(entry.ready)) or "none"
            raise ModelNotFound(f"Version {version} of {name!r} is not loaded; loaded: {serving}.")
        raise NotReady(f"Model {name!r}{f' version {version}' if version else ''} is not ready; see /readyz and /models/{name}.")

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and finish the accepted ones, within `timeout_s`."""
        self.draining = True
        self._follower.stop()
        await asyncio.gather(*self._changes, return_exceptions=True)
        entries = self.entries.values()
        versions = [(entry.name, loaded.batcher) for entry in entries for loaded in entry.ready.values()]
        versions += [(entry.name, retired.batcher) for entry in entries for retired in entry.retired]
        finished = await asyncio.gather(*(batcher.drain(timeout_s) for _, batcher in versions))
        for (name, _), done in zip(versions, finished, strict=True):
            if not done:
                log.warning("%s: accepted requests were not finished within %g s", name, timeout_s)
        self._workers.leave()

    # -- changes --------------------------------------------------------------------------------------------------------

    async def load(self, name: str, version: int, default: bool = False) -> tuple[Served, Served]:
        """Load a version on every worker, beside those that serve; make it the default if asked. What was served, and what is now.

        Raises ModelNotFound when it is not on disk, Conflict when a worker cannot load it: then nothing has changed.
        """
        entry = await asyncio.to_thread(self._on_disk, name, version)
        return await self._whole(self._load(entry, version, default))

    async def set_default(self, name: str, version: int) -> tuple[Served, Served]:
        """Make a version the one that answers where a request names none, on all workers; it is loaded first. Raises as `load` does."""
        return await self.load(name, version, default=True)

    async def unload(self, name: str, version: int) -> tuple[Served, Served]:
        """Drop a version on every worker. Requests that have it are finished. Raises ModelNotFound, Conflict for the default version."""
        return await self._whole(self._unload(self.entry(name), version))

    async def set_removed(self, name: str, ids: Sequence[str]) -> list[str]:
        """From now on no answer holds these items, of whatever version; the list replaces the former one.

        Returns the ids that the default version does not know; they are kept, since another version may. Raises ModelNotFound, Conflict.
        """
        listed = tuple(dict.fromkeys(ids))
        await self.edit_removed(name, lambda _: listed, whole=True)
        return await self.unknown(name, listed)

    async def edit_removed(self, name: str, edit: Callable[[tuple[str, ...]], tuple[str, ...] | None], whole: bool = False) -> Edited:
        """Make the removed ids of a model another list, on all workers. Nobody else changes them meanwhile, in whatever process.

        edit   called in a thread with the list as it is; returns what it should be, None to leave it. What it raises ends the change
        whole  whether `edit` does not care what the list was, so that a malformed file can be replaced
        Raises ModelNotFound, BeingChanged when others do not end in time, Conflict.
        """
        return await self._whole(self._edit_removed(self.entry(name), edit, whole))

    async def unknown(self, name: str, ids: Sequence[str]) -> list[str]:
        """Those of these ids that the default version's catalogue does not have. Raises ModelNotFound."""
        entry = self.entry(name)
        if entry.loaded is None:
            return []
        rows = await asyncio.to_thread(entry.loaded.bundle.items.rows_of, ids)
        return [item_id for item_id, row in zip(ids, rows.tolist(), strict=True) if row < 0]

    def removed(self, name: str) -> list[str]:
        """The standing exclusions of a model. Raises ModelNotFound."""
        return list(self.entry(name).removed)

    def _on_disk(self, name: str, version: int) -> Entry:
        """The model of a version that can be loaded, or is."""
        versions = find_versions(self._settings.models).get(name, ())
        entry = self._follower.add(name, versions) if versions else self.entry(name)
        if version not in versions and version not in entry.ready:
            there = ", ".join(map(str, versions)) or "none"
            raise ModelNotFound(f"There is no version {version} of {name!r} in the models folder; there: {there}.")
        entry.versions = versions or entry.versions
        return entry

    async def _load(self, entry: Entry, version: int, default: bool) -> tuple[Served, Served]:
        with entry.disk.locked():
            now = await self._serving(entry)
            before = _served(entry, now)
            desired, answers = _desired(entry, now)
            if version not in desired or version not in entry.ready:
                answers = answers if answers in entry.ready else version
                now = await self._serve(entry, now, {version}, set(), answers)
            if default and (now is None or answers != version):
                now = await self._serve(entry, now, {version}, set(), version)
            log.info("%s: version %d is loaded%s", entry.name, version, " and the default" if default else "")
            return before, _served(entry, now)

    async def _unload(self, entry: Entry, version: int) -> tuple[Served, Served]:
        with entry.disk.locked():
            now = await self._serving(entry)
            desired, answers = _desired(entry, now)
            if version not in desired:
                raise ModelNotFound(f"Version {version} of {entry.name!r} is not loaded.")
            if version == answers:
                raise Conflict(f"Version {version} is the default of {entry.name!r}; make another version the default first.")
            before = _served(entry, now)
            now = await self._serve(entry, now, set(), {version}, answers)
            log.info("%s: version %d is dropped", entry.name, version)
            return before, _served(entry, now)

    async def _serve(self, entry: Entry, now: Serving | None, add: set[int], drop: set[int], default: int) -> Serving:
        """Change what should serve, on all workers. What should and does not, since it failed, is given up: it would fail the change."""
        desired, _ = _desired(entry, now)
        versions = ({version for version in desired if version in entry.ready} | add | {default}) - drop
        generation = max(entry.progress.serving, now.generation if now else 0) + 1
        after = Serving(generation=generation, versions=tuple(sorted(versions)), default=default)
        await self._change(entry, now, after)
        return after

    async def _edit_removed(self, entry: Entry, edit: Callable[[tuple[str, ...]], tuple[str, ...] | None], whole: bool) -> Edited:
        async with _alone(entry):
            try:
                before = await asyncio.to_thread(entry.disk.read, Removed)
            except InvalidData as error:
                if not whole:
                    raise Conflict(f"{error}; replace the whole list (PUT without If-Match), or repair the file") from error
                before = None  # what is written now is well-formed
            ids = entry.removed if before is None else before.ids  # without a file, what holds is what was read last
            after = await asyncio.to_thread(edit, ids)
            if after is None:
                return Edited(ids, ids)
            generation = max(entry.progress.removed, before.generation if before else 0) + 1
            if before is None:  # what is in force, to be written should the change be taken back
                before = Removed(generation=generation, ids=ids)
            await self._change(entry, before, Removed(generation=generation, ids=after))
            return Edited(ids, after)

    async def _serving(self, entry: Entry) -> Serving | None:
        if not entry.tried and not entry.late:
            raise NotReady(f"{entry.name!r} is still being loaded; see /readyz.")
        try:
            return await asyncio.to_thread(entry.disk.read, Serving)
        except InvalidData as error:
            raise Conflict(f"{error}; repair or delete the file") from error

    async def _change(self, entry: Entry, before: Serving | Removed | None, after: Serving | Removed) -> None:
        """Write a state and wait until all workers have followed; take it back when one cannot."""
        await asyncio.to_thread(entry.disk.write, after)
        try:
            problems = await self._followed(
                entry, lambda progress: _generation(progress, after) >= after.generation, isinstance(after, Serving)
            )
        except NotReady:  # nobody will see whether it could be followed
            await self._take_back(entry, before, after)
            raise
        if not problems:
            return
        log.error("%s: a change is taken back: %s", entry.name, "; ".join(problems))
        await self._take_back(entry, before, after)
        await self._followed(entry, lambda progress: _generation(progress, after) != after.generation, False)
        raise Conflict(f"Nothing was changed, because not every worker could follow: {'; '.join(problems)}")

    async def _take_back(self, entry: Entry, before: Serving | Removed | None, after: Serving | Removed) -> None:
        """Write the former state, as a newer one. Removals always have one: that their file is gone would not end them."""
        self._metrics.reload(entry.name, "rolled_back")
        if before is None:
            await asyncio.to_thread(entry.disk.delete, Serving if isinstance(after, Serving) else Removed)
        else:
            await asyncio.to_thread(entry.disk.write, before.model_copy(update={"generation": after.generation + 1}))

    async def _followed(self, entry: Entry, done: Callable[[WorkerProgress], bool], loads: bool) -> list[str]:
        """Wait until every living worker is done. What kept them from it, one line per worker.

        loads  whether a version that a worker cannot load counts: it keeps nobody from removing items
        """
        self._follower.wake()
        until = time.monotonic() + self._settings.load_timeout_s
        while True:
            progress = await asyncio.to_thread(self._workers.progress, entry.name)
            behind = [pid for pid, found in progress.items() if not done(found)]
            failed = [f"worker {pid}: {found.failed}" for pid, found in progress.items() if loads and found.failed and pid not in behind]
            if not behind:
                return failed
            if time.monotonic() >= until:
                limit = f"{self._settings.load_timeout_s:g} s (ESPALIER_LOAD_TIMEOUT_S)"
                return failed + [f"worker {pid} did not follow within {limit}" for pid in behind]
            if self.draining:
                raise NotReady("The service is shutting down.")
            await asyncio.sleep(LOOK_S)

    async def _whole(self, change: Coroutine[Any, Any, T]) -> T:
        """Finish a change even when nobody waits for it any more."""
        task = asyncio.ensure_future(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)


@asynccontextmanager
async def _alone(entry: Entry) -> AsyncIterator[None]:
    """Nobody else changes the model meanwhile. Raises BeingChanged when others do not end within EDIT_WAIT_S."""
    until = time.monotonic() + EDIT_WAIT_S
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(entry.disk.locked())
                break
            except BeingChanged:
                if time.monotonic() >= until:
                    raise
            await asyncio.sleep(LOOK_S)
        yield


def _served(entry: Entry, serving: Serving | None) -> Served:
    versions, default = _desired(entry, serving)
    return Served(tuple(sorted(versions)), default)


def _desired(entry: Entry, serving: Serving | None) -> tuple[set[int], int]:
    """The versions that should serve, and the default one; without a serving.json those that do."""
    return ({*serving.versions}, serving.default) if serving is not None else ({*entry.ready}, entry.version)


def _generation(progress: WorkerProgress, state: Serving | Removed) -> int:
    return progress.serving if isinstance(state, Serving) else progress.removed
