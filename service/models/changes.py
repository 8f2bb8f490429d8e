"""An admin's changes: which versions serve, which one is the default, and which items are removed.

A change is written to the models folder (desired_state.py), and every worker follows it (follower.py). A change of versions is answered
when all workers have followed. If one of them cannot, the former state is written again. A change of removals stays: its answer names the
workers that are behind. Knows models and versions, not HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from espalier.errors import InvalidData, spelled
from espalier.serving import Candidate, Serving

from ..errors import BeingChanged, Conflict, NotFound, NotReady
from ..models.desired_state import Removed
from ..models.follower import Follower
from ..models.registry_entry import Entry
from ..models.worker_progress import WorkerProgress, Workers
from ..settings import Settings
from ..watch.metrics import Metrics

log = logging.getLogger(__name__)

T = TypeVar("T")

CHECK_S = 0.02
"""Between two looks at the progress of the workers."""
REMOVALS_WAIT_S = 5.0
"""How long a change of removals waits for other changes of removals."""
TAKE_BACK_WAIT_S = 1.0
"""How long a change of versions waits for another one. A worker takes back the change of an ended process within this time. A change in
progress can take minutes, so that waiting longer would not help."""
REMOVALS_VISIBLE_S = 1.0
"""How long a change of removals waits for workers to follow before its answer names those that are behind."""


class ServedVersions(NamedTuple):
    """The versions of a model that serve, ascending; the default, which answers requests that name none; the candidate on trial."""

    versions: tuple[int, ...]
    default: int
    candidate: Candidate | None = None


class RemovedChange(NamedTuple):
    """The removed ids before and after a change. behind: process ids of workers that have not applied it yet."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    behind: tuple[int, ...]


class Changes:
    """Changes entries of `follower` on all workers."""

    def __init__(self, settings: Settings, metrics: Metrics, follower: Follower, workers: Workers) -> None:
        self._settings, self._metrics, self._follower, self._workers = settings, metrics, follower, workers
        self._stopped = False
        self._behind_at_timeout: dict[str, dict[int, int]] = {}  # model → worker → generation, when a change of removals timed out
        self._tasks: set[asyncio.Task[Any]] = set()

    def interrupt(self) -> None:
        """End the changes that wait for workers, soon. Changes of versions are taken back and raise NotReady."""
        self._stopped = True

    async def stop(self) -> None:
        """`interrupt`, and wait for their ends."""
        self.interrupt()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def load(self, name: str, version: int, default: bool = False) -> tuple[ServedVersions, ServedVersions]:
        """Load a version on every worker, beside those that serve. Returns the served versions before and after.

        Raises NotFound when the version is not on disk, Conflict when a worker cannot load it or a store says which versions serve.
        After an error nothing has changed.
        """
        self._check_store(name)
        entry = await asyncio.to_thread(self._on_disk, name, version)
        return await self._shielded(self._load(entry, version, default))

    async def set_candidate(self, name: str, candidate: Candidate | None) -> tuple[ServedVersions, ServedVersions]:
        """Load a version and try it on some requests, on all workers. None ends the trial. Raises as `load` does."""
        self._check_store(name)
        entry = self._follower.entry(name)
        if candidate is not None:
            entry = await asyncio.to_thread(self._on_disk, name, candidate.version)
        return await self._shielded(self._set_candidate(entry, candidate))

    async def unload(self, name: str, version: int) -> tuple[ServedVersions, ServedVersions]:
        """Drop a version on every worker; its requests are finished first. Raises NotFound, Conflict for the default version."""
        self._check_store(name)
        return await self._shielded(self._unload(self._follower.entry(name), version))

    async def edit_removed(
        self, name: str, edit: Callable[[tuple[str, ...]], tuple[str, ...] | None], replace: bool = False
    ) -> RemovedChange:
        """Change the removed ids of a model, under a lock that all processes respect. Workers that are behind follow later.

        edit     called in a thread with the current list; returns the new one, or None to leave it. An exception of it ends the change
        replace  whether `edit` ignores the current list, so that a malformed file can be replaced
        Raises NotFound, BeingChanged when other changes do not end in time, Conflict.
        """
        return await self._shielded(self._edit_removed(self._follower.entry(name), edit, replace))

    def _check_store(self, name: str) -> None:
        """Raise Conflict if a store says which versions serve: this host would differ from the others until it reads the store again."""
        if self._settings.store is not None:
            self._follower.entry(name)
            raise Conflict(
                f"What serves of {spelled(name)} follows the store (ESPALIER_STORE), for all hosts alike: "
                f"`espalier set-default --store URL --model {name} --version N` changes it, and --candidate."
            )

    def is_on_disk(self, name: str) -> bool:
        """Whether the models folder has a version of the model, even if nobody has loaded one."""
        return name in self._follower.find_versions()

    # -- versions -------------------------------------------------------------------------------------------------------

    def _on_disk(self, name: str, version: int) -> Entry:
        """The model of a version that is on disk or loaded. Raises NotFound."""
        versions = self._follower.find_versions().get(name, ())
        entry = self._follower.add(name, versions) if versions else self._follower.entry(name)
        if version not in versions and version not in entry.ready:
            on_disk = ", ".join(map(str, versions)) or "none"
            raise NotFound(f"There is no version {version} of {spelled(name)} in the models folder; there: {on_disk}.")
        entry.versions = versions or entry.versions
        return entry

    async def _load(self, entry: Entry, version: int, default: bool) -> tuple[ServedVersions, ServedVersions]:
        async with _locked(entry, Serving, TAKE_BACK_WAIT_S):
            now = await self._serving(entry)
            before = _served(entry, now)
            now = await self._loaded(entry, now, version)
            if default and (now is None or now.default != version):
                now = await self._serve(entry, now, {version}, set(), version, before.candidate)
            log.info("%s: version %d is loaded%s", entry.name, version, " and the default" if default else "")
            return before, _served(entry, now)

    async def _loaded(self, entry: Entry, now: Serving | None, version: int) -> Serving | None:
        """Load a version everywhere; returns what should serve then. The caller holds the lock."""
        served = _served(entry, now)
        if version in served.versions and await asyncio.to_thread(self._is_everywhere, entry, version):
            return now
        await asyncio.to_thread(self._follower.openings.forgive, entry.disk.folder / str(version))
        return await self._serve(
            entry, now, {version}, set(), served.default if served.default in entry.ready else version, served.candidate
        )

    async def _set_candidate(self, entry: Entry, candidate: Candidate | None) -> tuple[ServedVersions, ServedVersions]:
        async with _locked(entry, Serving, TAKE_BACK_WAIT_S):
            now = await self._serving(entry)
            before = _served(entry, now)
            if candidate is None:
                if before.candidate is not None:
                    now = await self._serve(entry, now, set(), set(), before.default)
                log.info("%s: version %d answers all requests that name none", entry.name, before.default)
                return before, _served(entry, now)
            default = before.default
            if candidate.version == default:
                raise Conflict(f"Version {default} is the default of {spelled(entry.name)}; the candidate must be another one.")
            if default not in entry.ready:  # else loading would make the candidate the default
                raise Conflict(f"Version {default}, the default of {spelled(entry.name)}, does not serve: set another default first.")
            now = await self._loaded(entry, now, candidate.version)
            now = await self._serve(entry, now, {candidate.version}, set(), default, candidate)
            log.info("%s: version %d is tried on some requests", entry.name, candidate.version)
            return before, _served(entry, now)

    def _is_everywhere(self, entry: Entry, version: int) -> bool:
        """Whether a version answers in all living workers. A worker may have left out a version that had ended processes."""
        progress = self._workers.progress(entry.name)
        return version in entry.ready and all(version in worker.versions for pid, worker in progress.items() if pid != os.getpid())

    async def _unload(self, entry: Entry, version: int) -> tuple[ServedVersions, ServedVersions]:
        async with _locked(entry, Serving, TAKE_BACK_WAIT_S):
            now = await self._serving(entry)
            before = _served(entry, now)
            if version not in before.versions:
                raise NotFound(f"Version {version} of {spelled(entry.name)} is not loaded.")
            if version == before.default:
                raise Conflict(f"Version {version} is the default of {spelled(entry.name)}; make another version the default first.")
            now = await self._serve(entry, now, set(), {version}, before.default, before.candidate)
            log.info("%s: version %d is dropped", entry.name, version)
            return before, _served(entry, now)

    async def _serving(self, entry: Entry) -> Serving | None:
        if not entry.tried and not entry.late:
            raise NotReady(f"{spelled(entry.name)} is still being loaded; see /readyz.")
        try:
            return await asyncio.to_thread(entry.disk.read, Serving)
        except InvalidData as error:
            raise Conflict(f"{error}; repair or delete the file") from error

    async def _serve(
        self, entry: Entry, now: Serving | None, add: set[int], drop: set[int], default: int, candidate: Candidate | None = None
    ) -> Serving:
        """Change what should serve, on all workers. Versions that failed to load are dropped: they would fail the change.

        candidate  dropped if its version is the default now, or does not serve
        """
        versions = ({version for version in _served(entry, now).versions if version in entry.ready} | add | {default}) - drop
        generation = max(entry.progress.serving, now.generation if now else 0) + 1
        if candidate is not None and candidate.version not in versions - {default}:
            candidate = None
        after = Serving(generation=generation, versions=tuple(sorted(versions)), default=default, candidate=candidate)
        await self._change(entry, now, after)
        return after

    # -- removals -------------------------------------------------------------------------------------------------------

    async def _edit_removed(self, entry: Entry, edit: Callable[[tuple[str, ...]], tuple[str, ...] | None], replace: bool) -> RemovedChange:
        async with _locked(entry, Removed, REMOVALS_WAIT_S):
            try:
                before = await asyncio.to_thread(entry.disk.read, Removed)
            except InvalidData as error:
                if not replace:
                    raise Conflict(f"{error}; replace the whole list (PUT without If-Match), or repair the file") from error
                before = None  # the file is replaced
            ids = entry.removed if before is None else before.ids  # without a file, the last list that was read is in force
            after = await asyncio.to_thread(edit, ids)
            generation = before.generation if before else 0
            if after is not None:
                generation = max(entry.progress.removed, generation) + 1
                await asyncio.to_thread(entry.disk.write, Removed(generation=generation, ids=after))
        return RemovedChange(ids, ids if after is None else after, await self._behind(entry, generation))

    async def _behind(self, entry: Entry, generation: int) -> tuple[int, ...]:
        """The living workers that serve a model and have not applied these removals after REMOVALS_VISIBLE_S.

        A worker that made an earlier change time out is not waited for again until it has followed some change. A worker that begins to
        serve has read the removals before.
        """
        self._follower.wake()
        until = time.monotonic() + REMOVALS_VISIBLE_S
        while True:
            progress = await asyncio.to_thread(self._workers.progress, entry.name)
            behind = {pid: worker.removed for pid, worker in progress.items() if worker.versions and worker.removed < generation}
            if behind.items() <= self._behind_at_timeout.get(entry.name, {}).items() or time.monotonic() >= until or self._stopped:
                break
            await asyncio.sleep(CHECK_S)
        self._behind_at_timeout[entry.name] = behind
        if behind:
            log.warning("%s: a change of removals is not yet followed by worker %s", entry.name, ", ".join(map(str, behind)))
        return tuple(behind)

    # -- following ------------------------------------------------------------------------------------------------------

    async def _change(self, entry: Entry, before: Serving | None, after: Serving) -> None:
        """Write what should serve and wait until all workers have followed. If one cannot, or ends meanwhile, take the change back."""
        new_folders = [entry.disk.folder / str(version) for version in after.versions if version not in entry.ready]
        await asyncio.to_thread(entry.disk.begin_change, before, after)
        try:
            problems = await self._followed(entry, lambda progress: progress.serving >= after.generation, new_folders)
        except NotReady:  # the service stops before all workers have followed
            await self._take_back(entry)
            raise
        if not problems:
            await asyncio.to_thread(entry.disk.end_change)
            return
        log.error("%s: a change is taken back: %s", entry.name, "; ".join(problems))
        await self._take_back(entry)
        await self._followed(entry, lambda progress: progress.serving != after.generation)
        raise Conflict(f"Nothing was changed, because not every worker could follow: {'; '.join(problems)}")

    async def _take_back(self, entry: Entry) -> None:
        self._metrics.count("espalier_reload_total", entry.name, "rolled_back")
        await asyncio.to_thread(entry.disk.take_back)

    async def _followed(self, entry: Entry, done: Callable[[WorkerProgress], bool], new_folders: Sequence[Path] | None = None) -> list[str]:
        """Wait until every living worker is done. Returns the problems, one line per worker.

        new_folders  of the versions that workers open now. With None, failures to load are no problems
        """
        self._follower.wake()
        until = time.monotonic() + self._settings.load_timeout_s
        while True:
            progress = await asyncio.to_thread(self._workers.progress, entry.name)
            behind = [pid for pid, worker in progress.items() if not done(worker)]
            failures = [
                f"worker {pid}: {worker.failed}"
                for pid, worker in progress.items()
                if new_folders is not None and worker.failed and pid not in behind
            ]
            for folder in new_folders or ():
                if await asyncio.to_thread(self._follower.openings.deaths, folder):
                    return [*failures, f"a worker ended while it opened version {folder.name}"]
            if not behind:
                return failures
            if time.monotonic() >= until:
                limit = f"{self._settings.load_timeout_s:g} s (ESPALIER_LOAD_TIMEOUT_S)"
                return failures + [f"worker {pid} did not follow within {limit}" for pid in behind]
            if self._stopped:
                raise NotReady("The service is shutting down.")
            await asyncio.sleep(CHECK_S)

    async def _shielded(self, change: Coroutine[Any, Any, T]) -> T:
        """Finish a change even if its client hangs up."""
        task = asyncio.ensure_future(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        finally:
            del task  # its error holds this frame


@asynccontextmanager
async def _locked(entry: Entry, kind: type[Serving] | type[Removed], wait_s: float) -> AsyncIterator[None]:
    """Hold the lock of a file of desired state. Raises BeingChanged when other changes do not end within `wait_s`."""
    until = time.monotonic() + wait_s
    with ExitStack() as locks:
        while True:
            try:
                locks.enter_context(entry.disk.locked(kind))
                break
            except BeingChanged:
                if time.monotonic() >= until:
                    raise
            await asyncio.sleep(CHECK_S)
        yield


def _served(entry: Entry, serving: Serving | None) -> ServedVersions:
    """The versions that should serve; without a serving.json, those that do."""
    if serving is None:
        return ServedVersions(tuple(sorted(entry.ready)), entry.version)
    return ServedVersions(tuple(sorted(serving.versions)), serving.default, serving.candidate)
