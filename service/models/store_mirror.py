"""Follows a store: brings the versions that should serve into the models folder, and serving.json, which follower.py follows there.

One process of a host does so at a time, with a lock on the models folder, and tells the other workers through the run folder what it waits
for. What is here goes on serving, whatever the store does. Versions that came from the store and are not needed any more are deleted. Knows
versions and desired state. Does not know engines or requests.
"""

from __future__ import annotations

import fcntl
import logging
import os
import random
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from espalier.bundle import MAX_MANIFEST_BYTES, find_versions, parse_manifest
from espalier.errors import CacheFull, EspalierError, StoreDamaged, StoreError, StoreMissing, StoreUnavailable
from espalier.serving import Serving
from espalier.store.fetching import FETCH, FETCHED, BeingFetched, Progress, drop, drop_unfinished, fetch
from espalier.store.models import MANIFEST, StoredModel, find_models, read_serving, version_of
from espalier.store.objects import Objects

from ..errors import BeingChanged
from ..models.desired_state import DesiredState, InvalidState
from ..models.follower import Follower
from ..models.loading import lower_priority, relative_paths
from ..models.store_state import StoreState, Wait
from ..models.swapping import SHARD_VERSIONS
from ..models.worker_progress import Workers
from ..settings import Settings
from ..watch.metrics import Metrics

log = logging.getLogger(__name__)

LOCK = ".store.lock"
NOTE = ".store"
TICK_S = 0.5
"""Between two looks at who follows the store, and what it says."""
MAX_BACKOFF_S = 60.0
"""Longest pause after failures, unless ESPALIER_STORE_POLL_S is longer."""
RETRY_S, MAX_RETRY_S = 30.0, 600.0
"""A version that is damaged in the store is tried again after so long; doubled each time."""
LINGER_S = 60.0
"""A version is deleted when no worker has needed it for so long; each says every few seconds what it needs."""
REASONS = {StoreUnavailable: "unreachable", StoreMissing: "missing", StoreDamaged: "damaged", CacheFull: "disk_full", Exception: "other"}
"""Why something did not come, by its error, as the metric of failures has it."""


class _Stopped(Exception):
    """The service ends while a version is being downloaded; the next one goes on with it."""


class StoreMirror:
    """state: how far the host is; replaced as a whole, so that any thread may read it."""

    def __init__(self, settings: Settings, url: str, metrics: Metrics, workers: Workers, follower: Follower) -> None:
        self._settings, self._url, self._workers, self._follower = settings, url, workers, follower
        self._metrics = metrics
        for reason in REASONS.values():
            metrics.count("espalier_store_failures_total", reason, by=0)  # so that Prometheus sees the first one as an increase
        self._folder = settings.models
        self.state = StoreState()
        self._store: Objects | None = None
        self._lock: int | None = None
        self._settled = False
        self._failures, self._next, self._answered, self._noted = 0, 0.0, time.monotonic(), 0.0
        self._bad: dict[tuple[str, int], tuple[float, float, StoreError]] = {}
        self._shards: dict[tuple[str, int], bool] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Follow no more. A download ends soon, and is resumed by whoever follows next."""
        self._stopped.set()

    def starting(self) -> bool:
        """Whether the models that the store had at the start are still to come; /readyz waits for them, unless they are damaged there."""
        if not self._settled:
            listed, here = self.state.listed, {*self._follower.entries}
            damaged = {name for name, wait in self.state.waits.items() if wait.damaged}
            self._settled = bool(here) and (here | damaged >= {*listed} if listed is not None else self.state.problem is not None)
        return not self._settled

    def lines(self) -> list[str]:
        """What the service waits for since it started, a line each."""
        return self.state.lines(dict.fromkeys(self._follower.entries)) if self.starting() else []

    # -- the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        lower_priority()
        try:
            while True:
                self._step()
                if self._stopped.wait(min(TICK_S, self._settings.store_poll_s)):
                    return
        except _Stopped:
            return
        finally:
            if self._lock is not None:
                os.close(self._lock)

    def _step(self) -> None:
        try:
            if not self._elected():
                self._listen()
            elif time.monotonic() >= self._next:
                self._round()
            self.starting()
        except _Stopped:
            raise
        except Exception:  # no error may end the following
            log.exception("the store cannot be followed")
            self._pause(failed=True)

    def _elected(self) -> bool:
        """Whether this process follows the store, from now on until it ends."""
        if self._lock is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            self._lock = descriptor
            log.info("models follow the store %s", self._url)
        return True

    def _listen(self) -> None:
        """Another worker follows the store: say what it says, and what is needed here."""
        text = self._workers.noted(NOTE)
        if text is not None:
            self.state = StoreState.of_json(text)
        if time.monotonic() >= self._next:
            for name in self._follower.entries:
                self._touch(name)
            self._pause(failed=False)

    def _say(self, state: StoreState) -> None:
        if state != self.state:
            self.state = state
            self._workers.note(NOTE, state.to_json())

    def _pause(self, failed: bool) -> None:
        poll_s = self._settings.store_poll_s
        self._failures = self._failures + 1 if failed else 0
        pause_s = max(poll_s, min(poll_s * 2.0 ** min(self._failures, 16), MAX_BACKOFF_S)) if failed else poll_s
        self._next = time.monotonic() + pause_s * random.uniform(0.9, 1.1)

    # -- one round ------------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        try:
            self._store = self._store or Objects(self._url)
            found = find_models(self._store)
            if (shard := self._settings.shard) is not None:
                found = {name: stored for name, stored in found.items() if name == str(shard)}
        except StoreError as error:
            self._count_failure(error)
            self._metrics.show("espalier_store_silent_seconds", time.monotonic() - self._answered)
            if self.state.problem is None:
                log.warning("the store does not answer; what is here goes on serving: %s", error)
            self._say(replace(self.state, problem=self._told(error)))
            self._pause(failed=True)
            return
        if self.state.problem is not None:
            log.info("the store answers again")
        self._heard()
        for folder in {path.parent for path in self._folder.glob(f"*/{FETCH}*")}:
            if folder.name not in found:
                drop_unfinished(folder, set())
        waits = {name: wait for name, wait in self.state.waits.items() if name in found}
        self._say(StoreState(tuple(found), waits))
        failed = False
        for name, stored in found.items():
            failed |= not self._follow(self._store, name, stored)
        self._pause(failed)

    def _heard(self) -> None:
        self._answered = time.monotonic()
        self._metrics.show("espalier_store_silent_seconds", 0.0)

    def _count_failure(self, error: Exception) -> None:
        self._metrics.count("espalier_store_failures_total", next(reason for kind, reason in REASONS.items() if isinstance(error, kind)))

    def _follow(self, store: Objects, name: str, stored: StoredModel) -> bool:
        """Bring what a model should serve. False where something failed, which the state then says."""
        before, needed, failed = self.state.waits.get(name), {stored.versions[-1]}, False
        try:
            serving = self._serving(store, name, stored)
            if serving is None:
                needed |= self._bring_highest(store, name, stored.versions)
            else:
                needed = {*serving.versions}
                for version in (serving.default, *serving.versions):
                    self._bring(store, name, version)
            self._copy_serving(name, serving)
            self._say(replace(self.state, waits={other: wait for other, wait in self.state.waits.items() if other != name}))
        except BeingFetched as error:
            self._wait(name, replace(self.state.waits.get(name) or Wait(stored.versions[-1]), reason=str(error)))
        except (EspalierError, OSError) as error:
            wait, failed = self.state.waits.get(name) or Wait(stored.versions[-1]), True
            self._wait(name, replace(wait, reason=self._told(error), damaged=(name, wait.version) in self._bad))
            if before is None or before.reason != self._told(error):
                log.error("%s version %d does not come from the store: %s", name, wait.version, error)
        if name in self.state.waits:
            needed.add(self.state.waits[name].version)
        self._clean(name, needed)  # after a failure too: it may make the room that was missing
        return not failed

    def _serving(self, store: Objects, name: str, stored: StoredModel) -> Serving | None:
        """What the store's serving.json says; None where there is none."""
        try:
            return None if stored.etag is None else read_serving(store, name)[0]
        except StoreError as error:
            self._count_failure(error)
            raise

    def _bring_highest(self, store: Objects, name: str, versions: tuple[int, ...]) -> set[int]:
        """Bring the highest versions that are whole, as many as serve. Raises StoreError where a higher one is not.

        Where none is here yet, one for which there is no room is passed over, too.
        """
        here: set[int] = set()
        wrong: tuple[int, StoreError] | None = None
        for version in reversed(versions):
            try:
                self._bring(store, name, version)
            except (StoreDamaged, StoreMissing, CacheFull) as error:
                if isinstance(error, CacheFull) and find_versions(self._folder).get(name):
                    raise
                wrong = wrong or (version, error)
                continue
            here.add(version)
            if len(here) == (SHARD_VERSIONS if self._is_shard(name, version) else 1):
                break
        if wrong is not None:
            if self.state.waits[name].version != wrong[0]:
                self._wait(name, Wait(wrong[0]))
            raise wrong[1]
        return here

    def _bring(self, store: Objects, name: str, version: int) -> None:
        """Have a version on disk. Raises what `fetch` raises; one that was damaged a moment ago is not tried again yet."""
        if (self._folder / name / str(version) / MANIFEST).is_file():
            return
        retry_at, pause_s, wrong = self._bad.get((name, version), (0.0, RETRY_S, None))
        before = self.state.waits.get(name)
        self._wait(name, before if before is not None and before.version == version else Wait(version))
        if wrong is not None and time.monotonic() < retry_at:
            raise wrong
        began = time.monotonic()

        def on_progress(progress: Progress, count: int) -> None:
            if self._stopped.is_set():
                raise _Stopped
            self._metrics.count("espalier_store_bytes_total", by=count)
            self._heard()
            now = time.monotonic()
            if now - self._noted >= TICK_S:
                self._noted = now
                self._wait(name, Wait(version, progress.bytes_on_disk, progress.size))

        try:
            came = fetch(store, name, version, self._folder, on_progress)
        except BeingFetched:
            raise
        except (StoreError, OSError) as error:
            self._count_failure(error)
            if isinstance(error, StoreDamaged | StoreMissing):
                self._bad[name, version] = time.monotonic() + pause_s, min(2 * pause_s, MAX_RETRY_S), error
            raise
        finally:
            self._metrics.count("espalier_store_seconds_total", by=time.monotonic() - began)
        self._bad.pop((name, version), None)
        log.info("%s version %d came from the store: %.1f MB in %.1f s", name, version, came / 1e6, time.monotonic() - began)
        self._follower.appeared(name, find_versions(self._folder).get(name, ()), late=not self.starting())

    def _wait(self, name: str, wait: Wait) -> None:
        self._say(replace(self.state, waits={**self.state.waits, name: wait}))

    def _is_shard(self, name: str, version: int) -> bool:
        if (name, version) not in self._shards:
            file = self._folder / name / str(version) / MANIFEST
            try:
                with file.open("rb") as stream:
                    self._shards[name, version] = parse_manifest(stream.read(MAX_MANIFEST_BYTES), str(file)).shard is not None
            except (EspalierError, OSError):  # loading it will say what is wrong
                return False
        return self._shards[name, version]

    def _copy_serving(self, name: str, serving: Serving | None) -> None:
        """Make the serving.json of the models folder the store's."""
        disk = DesiredState(self._folder / name)
        try:
            if disk.read(Serving) == serving:
                return
        except InvalidState as error:
            log.warning("%s is replaced by the store's: %s", disk.name_of(Serving), error)
        with suppress(BeingChanged), disk.locked(Serving):
            if serving is None:
                disk.delete(Serving)
            else:
                disk.write(serving)
            log.info("%s: the store says that %s", name, "the highest version serves" if serving is None else _described(serving))

    # -- versions that are not needed any more --------------------------------------------------------------------------

    def _clean(self, name: str, needed: set[int]) -> None:
        """Delete what came from the store and no worker has needed for a while, but for the highest few."""
        folder = self._folder / name
        if not folder.is_dir():
            return
        self._touch(name, needed)
        drop_unfinished(folder, needed)
        came = sorted(_came(folder))
        linger_s = max(LINGER_S, 3 * self._settings.store_poll_s)
        for version in came[: max(len(came) - self._settings.store_keep, 0)]:
            with suppress(FileNotFoundError):
                if time.time() - (folder / f"{FETCHED}{version}").stat().st_mtime > linger_s and drop(folder, version):
                    log.info("%s version %d is deleted here: nobody needs it, and the store has it", name, version)

    def _touch(self, name: str, needed: Iterable[int] = ()) -> None:
        """Say which versions are needed, by the time of their marks."""
        for version in {*needed, *self._follower.in_use(name)} & _came(self._folder / name):
            with suppress(OSError):
                os.utime(self._folder / name / f"{FETCHED}{version}")

    def _told(self, error: Exception) -> str:
        """What users may read: neither the store's address nor paths of this host."""
        text = str(error).replace(f"{self._url}/", "").replace(self._url, "the store")
        return relative_paths(text, self._folder)


def _described(serving: Serving) -> str:
    return f"version {serving.default} serves" + (f", of {list(serving.versions)}" if len(serving.versions) > 1 else "")


def _came(folder: Path) -> set[int]:
    marks = (path.name.removeprefix(FETCHED) for path in folder.glob(f"{FETCHED}*"))
    return {version for mark in marks if (version := version_of(mark)) is not None}
