"""Follows the files of desired_state.py: changes what serves to what should serve.

Two threads. The follower reads the files four times a second, and does what is quick at once: removals, another default, files that were
changed in place, unused versions. The loader loads one version after the other. Knows when to change what serves; swapping.py knows how.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Literal

from espalier.bundle import find_versions
from espalier.errors import spelled
from espalier.serving import Serving

from ..errors import BeingChanged, Conflict, NotFound, ShardsMissing
from ..live.catalogues import LiveCatalogues
from ..models.desired_state import DesiredState, FollowedFile, Removed
from ..models.loading import EngineSource, LoadFailed, lower_priority, relative_paths, short_switch_interval
from ..models.openings import Openings
from ..models.registry_entry import Entry
from ..models.swapping import SHARD_VERSIONS, Swapper, known_bad
from ..models.worker_progress import Workers
from ..settings import Settings
from ..watch.metrics import Metrics

log = logging.getLogger(__name__)

TICK_S = 0.25
"""Seconds between two looks at the files of desired state."""
SCAN_S = 1.0
"""Seconds between two scans for new versions."""
STALE_S = 1.0
"""A process that has not looked for so long was stopped, or is very busy. It reads the removals before it answers again."""
LOOK_WAIT_S = 0.1
"""How long a request waits for another thread's look. On a file system that hangs, that look may never end."""


class Follower:
    """The entries of a models folder, and the two threads that keep them.

    entries   by model name; replaced as a whole, so that any thread may iterate over it
    openings  which versions ended the process that opened them
    starting  whether models are still missing that the service waits for since its start
    """

    def __init__(self, settings: Settings, metrics: Metrics, engines: EngineSource, workers: Workers, catalogues: LiveCatalogues) -> None:
        self._settings, self._metrics, self._workers = settings, metrics, workers
        self._catalogues = catalogues
        self.openings = Openings(settings.run_folder)
        self._swapper = Swapper(settings, metrics, engines, workers, self.openings, self.wake)
        self._removed: dict[str, FollowedFile[Removed]] = {}
        self._serving: dict[str, FollowedFile[Serving]] = {}
        self.starting: Callable[[], bool] = lambda: False
        self.entries = {name: self._entry(name, versions) for name, versions in self.find_versions().items()}
        self._adding, self._looking = threading.Lock(), threading.Lock()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._queued: set[tuple[str, str]] = set()  # (task, model) pairs that wait for the loader
        self._applying: Entry | None = None
        self._scan_at, self._poll_at = 0.0, 0.0
        self._unreadable = ""
        self._logged_waits: dict[str, str] = {}  # model → why it waits, as logged last
        self._wake, self._stopped, self._tried = threading.Event(), threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True) for target, name in ((self._follow, "follower"), (self._load, "loader"))
        ]

    def start(self) -> None:
        self._workers.join()
        self._catalogues.start()
        for name in self.entries:
            self._workers.report(name, self.entries[name].progress)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop following. A version that is being loaded is finished and dropped."""
        self._stopped.set()
        self.openings.stop()
        self._wake.set()
        self._jobs.put(None)

    def wake(self) -> None:
        self._wake.set()

    def wait_until_loaded(self, timeout_s: float | None = None) -> bool:
        """Block until every version that should serve was tried once. False after the timeout."""
        return self._tried.wait(timeout_s)

    def entry(self, name: str) -> Entry:
        """A model by name. Raises NotFound."""
        try:
            return self.entries[name]
        except KeyError:
            raise NotFound(f"There is no model {spelled(name)}.") from None  # names no other: the key may not use them all

    def add(self, name: str, versions: tuple[int, ...], late: bool = True) -> Entry:
        """Add a model that appeared after this process started. late: other workers do not serve it yet."""
        with self._adding:
            if name not in self.entries:
                entry = self._entry(name, versions)
                entry.late = late
                self.entries = self.entries | {name: entry}
            return self.entries[name]

    def find_versions(self) -> dict[str, tuple[int, ...]]:
        """The models of the folder with their versions, ascending. With ESPALIER_SHARD, only the model of that shard."""
        versions_by_name, shard = find_versions(self._settings.models), self._settings.shard
        return versions_by_name if shard is None else {name: v for name, v in versions_by_name.items() if name == str(shard)}

    def in_use(self, name: str) -> set[int]:
        """The versions of a model that serve, or should, or are being loaded or closed."""
        entry = self.entries.get(name)
        if entry is None:
            return set()
        loading = set() if entry.loading is None else {entry.loading}
        return {*entry.ready, *entry.desired, *(retired.model.version for retired in entry.retired), *loading}

    def appeared(self, name: str, versions: tuple[int, ...], late: bool) -> None:
        """The mirror has brought versions into the folder. late: as in `add`, if they are the model's first."""
        if versions:
            self.add(name, versions, late).versions = versions
            self.wake()

    def _entry(self, name: str, versions: tuple[int, ...]) -> Entry:
        self._metrics.add_model(name)
        disk = DesiredState(self._settings.models / name)
        self._removed[name] = FollowedFile(disk, Removed, partial(self._recall, name))
        self._serving[name] = FollowedFile(disk, Serving)
        entry = Entry(name, disk, versions, self._catalogues.new(name))
        entry.catalogue.thread.default = lambda: None if (loaded := entry.loaded) is None else loaded.version
        return entry

    # -- the thread that looks ------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        first = True
        while not self._stopped.is_set():
            for entry in self.entries.values():
                try:
                    self._look(entry)
                except Exception:  # one broken model must not end the following of the others
                    log.exception("%s: cannot be followed", entry.name)
            if first:
                self._jobs.put(self._first_pass_done)
                first = False
            self._wake.wait(TICK_S)
            self._wake.clear()
            if self._stopped.is_set():
                return
            unreadable = ""
            try:
                self._scan()
            except OSError as error:
                unreadable = str(error.strerror)
            if unreadable != self._unreadable:  # once, not at every look
                log.warning("the models folder %s", f"cannot be read: {unreadable}" if unreadable else "can be read again")
                self._unreadable = unreadable
            self._metrics.measure_queues()
            self._metrics.measure_process()
            self._metrics.measure_disk()

    def _look(self, entry: Entry) -> None:
        if entry.disk.is_changing:
            self._take_back(entry)
        with self._looking:
            observed = self._observe(entry)
        if observed:
            if self._loads_nothing(entry):
                self._apply(entry)
            else:
                self._soon("apply", entry)
        for loaded in entry.ready.values():
            if self._swapper.check_files(entry, loaded) and entry.serving is None:
                self._soon("apply", entry)  # the next lower version
        for loaded in entry.ready.values():
            if self._swapper.why_reopen(loaded):
                self._soon("reopen", entry)
        self._swapper.retire_unsearched(entry)
        for retired in entry.retired:
            if retired.handle() is None:
                self._swapper.close(entry, retired)
        self._report_default(entry)
        self._report(entry)

    def look_again(self, entry: Entry) -> None:
        """Read the removals before a request is answered, if they were not read for STALE_S. Called by the event loop's thread."""
        if not self._looking.acquire(timeout=LOOK_WAIT_S):
            entry.looked_at = time.monotonic()  # the state that was read last stays in force
            return
        try:
            if self._observe(entry):
                self._soon("apply", entry)
        finally:
            self._looking.release()

    def _take_back(self, entry: Entry) -> None:
        """Take back a change of versions if its author has ended."""
        try:
            with entry.disk.locked(Serving):  # takes it back
                pass
        except BeingChanged:
            return
        except Conflict as error:
            if str(error) != self._logged_waits.get(entry.name):
                log.error("%s: a change whose author has ended cannot be taken back: %s", entry.name, error)
            self._logged_waits[entry.name] = str(error)

    def _report_default(self, entry: Entry) -> None:
        """Set the metric of the default version, but not while other workers answer and this one cannot yet."""
        if entry.loaded is not None:
            self._metrics.show("espalier_model_default_version", entry.loaded.version, entry.name)
        elif entry.late:
            self._metrics.show("espalier_model_default_version", math.nan, entry.name)
        elif entry.tried or not self._workers.others_serve():
            self._metrics.show("espalier_model_default_version", 0, entry.name)

    def _loads_nothing(self, entry: Entry) -> bool:
        """Whether all versions that should serve are loaded, so that a change of default need not wait for the loader."""
        if entry.serving is None or not entry.tried or ("apply", entry.name) in self._queued or self._applying is entry:
            return False
        return entry.ready.keys() >= {*entry.serving.versions}

    def _observe(self, entry: Entry) -> bool:
        """Read the files of desired state. True if another state is in force than before, or the default does not serve yet."""
        removed, serving = self._removed[entry.name], self._serving[entry.name]
        before, now = (removed.state, serving.state), time.monotonic()
        changed = removed.look() | serving.look()
        if not changed:
            entry.looked_at = now
            return False
        if removed.state != before[0]:
            self._remove(entry, removed.state)
        entry.serving = serving.state
        problems = {
            kind: relative_paths(text, self._settings.models)
            for kind, text in (("removed", removed.problem), ("serving", serving.problem))
            if text
        }
        for text in problems.values():
            if text not in entry.file_problems.values():
                log.error("%s stays as it is: %s", entry.name, text)
        if entry.file_problems and not problems:
            log.info("%s: its files of desired state are valid again", entry.name)
        entry.file_problems = problems
        self._metrics.show("espalier_desired_state_wrong", bool(problems), entry.name)
        entry.looked_at = now
        return entry.loaded is None or (removed.state, serving.state) != before

    def _remove(self, entry: Entry, removed: Removed | None) -> None:
        with entry.lock:
            self._swapper.remove(entry, () if removed is None else removed.ids)
            entry.progress = replace(entry.progress, removed=0 if removed is None else removed.generation)
        if removed is not None:
            self._workers.note(entry.name, removed.model_dump_json())

    def _recall(self, name: str) -> Removed | None:
        """The removals that other workers read last, for a worker that starts when the file is gone."""
        note = self._workers.noted(name)
        return None if note is None else Removed.model_validate_json(note)

    def _report(self, entry: Entry) -> None:
        with entry.lock:
            entry.progress = replace(entry.progress, serves=entry.loaded is not None, versions=tuple(sorted(entry.ready)))
        self._workers.report(entry.name, entry.progress)

    def _scan(self) -> None:
        """Find the versions on disk. If polling is on, load the new ones."""
        now, poll_s = time.monotonic(), self._settings.poll_s
        if now < self._scan_at:
            return
        self._scan_at = now + min(SCAN_S, poll_s or SCAN_S)
        poll = poll_s is not None and now >= self._poll_at
        self._poll_at = now + (poll_s or 0.0) if poll else self._poll_at
        for name, versions in self.find_versions().items():
            entry = self.entries.get(name)
            if entry is None:
                served = name in self._workers.behind()
                if poll or served or (self._settings.models / name / "serving.json").exists():
                    log.info("%s is new", name)
                    self.add(name, versions, late=not served and not self.starting())
                continue
            entry.versions = versions
            if entry.tried and (entry.waiting or self._may_be_repaired(entry)):
                self._soon("apply", entry)
            if poll and entry.tried and entry.serving is None and (self._newer(entry) or self._is_gone(entry)):
                self._soon("apply", entry)

    def _may_be_repaired(self, entry: Entry) -> bool:
        """Whether the default does not serve, and files of a failed version have changed since it failed."""
        if entry.loaded is not None:
            return False
        versions = entry.versions if entry.serving is None else entry.serving.versions
        return any(version in entry.bad_files and not known_bad(entry, version) for version in versions)

    def _newer(self, entry: Entry) -> list[int]:
        """Versions above the one that serves, highest first. A version that failed counts only if its files have changed since.

        If fewer than SHARD_VERSIONS versions of a shard serve, lower versions count too: they may have come after the higher one.
        """
        above = 0 if entry.loaded is None else entry.loaded.version
        if entry.loaded is not None and entry.loaded.shard is not None and len(entry.ready) < SHARD_VERSIONS:
            above = 0
        return [v for v in reversed(entry.versions) if v > above and v not in entry.ready and not known_bad(entry, v)]

    def _is_gone(self, entry: Entry) -> bool:
        """Whether the mirror has deleted the version that serves, and another one may serve."""
        if entry.loaded is None or not self._swapper.is_gone(entry, entry.loaded):
            return False
        return any(not known_bad(entry, version) for version in entry.versions)

    # -- the thread that loads ------------------------------------------------------------------------------------------

    def _load(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                with short_switch_interval() if self._tried.is_set() else nullcontext():
                    job()
            except Exception:  # expected failures are LoadFailed; an unexpected one must not end this thread
                log.exception("the loader goes on after")
        self._tried.set()

    def _first_pass_done(self) -> None:
        gc.collect()
        gc.freeze()  # the objects of models live long; collections need not visit them
        lower_priority()
        self._tried.set()

    def _soon(self, task: Literal["apply", "reopen"], entry: Entry) -> None:
        """Queue a task for the loader, unless the same is queued already."""

        def job() -> None:
            self._applying = entry if task == "apply" else None
            self._queued.discard((task, entry.name))
            try:
                (self._apply if task == "apply" else self._reopen)(entry)
            finally:
                self._applying = None

        if (task, entry.name) not in self._queued:
            self._queued.add((task, entry.name))
            self._jobs.put(job)

    def _reopen(self, entry: Entry) -> None:
        for loaded in tuple(entry.ready.values()):
            why = self._swapper.why_reopen(loaded)
            if why and not self._stopped.is_set():
                log.info("%s version %d is opened anew: %s", entry.name, loaded.version, why)
                self._swapper.reopen(entry, loaded)

    def _apply(self, entry: Entry) -> None:
        """Make an entry serve the versions that it should, and report this worker's progress."""
        if self._stopped.is_set():
            return
        serving, failure = entry.serving, None
        try:
            if not (self._removed[entry.name].is_known and self._serving[entry.name].is_known):
                raise LoadFailed("; ".join(entry.file_problems.values()))
            if serving is not None:
                self._swapper.serve(entry, serving)
            elif entry.loaded is not None or not entry.late or self._settings.poll_s is not None:
                self._swapper.serve_highest(entry)
        except LoadFailed as error:
            failure = str(error)
        except ShardsMissing as error:
            if str(error) != self._logged_waits.get(entry.name):
                log.info("%s: %s", entry.name, error)
            self._logged_waits[entry.name] = str(error)
            return
        finally:
            entry.tried = True
        self._logged_waits.pop(entry.name, None)
        with entry.lock:
            entry.progress = replace(entry.progress, serving=0 if serving is None else serving.generation, failed=failure)
        self._report(entry)
