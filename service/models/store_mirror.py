"""Follows a store: downloads the versions that should serve, and serving.json, into the models folder, where follower.py follows them.

One process of a host does so at a time, the one that locks the models folder; of services with ESPALIER_SHARD, one for each shard. Through
the run folder it tells the other workers what it waits for. Versions on this host go on serving while the store is away. Versions that came
from a store are replaced if this one has them with other content. They are deleted if it has them no more, or if nobody needs them. Knows
versions and desired state. Does not know engines or requests.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from espalier.bundle import MAX_MANIFEST_BYTES, find_versions, parse_manifest
from espalier.errors import CacheFull, EspalierError, StoreConflict, StoreDamaged, StoreError, StoreMissing, StoreUnavailable
from espalier.serving import Serving
from espalier.store.fetching import FETCH, FETCHED, BeingFetched, Progress, drop, drop_unfinished, fetch, holds
from espalier.store.models import MANIFEST, StoredModel, find_models, read_manifest, read_serving, version_of
from espalier.store.objects import Objects

from ..errors import BeingChanged
from ..host_thread import HostThread, Stopped
from ..models.desired_state import DesiredState, InvalidState
from ..models.follower import Follower
from ..models.loading import lower_priority, relative_paths
from ..models.store_state import STATE_JSON, StoreState, StoreWait
from ..models.swapping import SHARD_VERSIONS
from ..models.worker_progress import Workers
from ..settings import Settings
from ..watch.metrics import Metrics

log = logging.getLogger(__name__)

LOCK = ".store.lock"
NOTE = ".store"
TICK_S = 0.5
"""Seconds between two steps: the store is followed, or the state of the worker that follows it is read."""
MAX_BACKOFF_S = 60.0
"""Longest pause after failures, unless ESPALIER_STORE_POLL_S is longer."""
RETRY_S, MAX_RETRY_S = 30.0, 600.0
"""First and longest pause before a version that is damaged in the store is tried again; the pause doubles each time."""
LINGER_S = 60.0
"""A version is deleted when no worker has needed it for so long. Workers mark the versions that they need every few seconds."""
REASONS = {StoreUnavailable: "unreachable", StoreMissing: "missing", StoreDamaged: "damaged", CacheFull: "disk_full", Exception: "other"}
"""Error → the reason label of the metric of failures."""


class _Damage(NamedTuple):
    """A version that is damaged or incomplete in the store, and when it is tried again, of time.monotonic()."""

    error: StoreError
    retry_at: float
    next_pause_s: float


class _Overtaken(Exception):
    """While a version was being downloaded, the store's serving.json of a model has changed."""


class StoreMirror(HostThread):
    """state: how far this host has followed the store; replaced as a whole, so that any thread may read it.

    The next process that follows the store resumes a download that is abandoned at the stop.
    """

    def __init__(self, settings: Settings, url: str, metrics: Metrics, workers: Workers, follower: Follower) -> None:
        lock = LOCK if settings.shard is None else f"{LOCK}-{settings.shard}"
        super().__init__("store", settings.models / lock, f"models follow the store {url}")
        self._settings, self._url, self._workers, self._follower = settings, url, workers, follower
        self._metrics = metrics
        for reason in REASONS.values():
            metrics.count("espalier_store_failures_total", reason, by=0)  # so that Prometheus sees the first one as an increase
        self._folder = settings.models
        self.state = StoreState()
        self._store: Objects | None = None
        self._settled = False
        self._models: Mapping[str, StoredModel] = {}  # of the store, at the last round
        self._failures, self._next, self._answered, self._noted = 0, 0.0, time.monotonic(), 0.0
        self._look_at = 0.0  # when a download looks at the store's defaults
        self._changed: set[str] = set()  # models whose default changed since a round came to its end: they wait for no other's download
        self._damage: dict[tuple[str, int], _Damage] = {}
        self._unstored: set[str] = set()  # models that came from the store, which has them no more
        self._same: dict[tuple[str, int], str] = {}  # (model, version) → entity tag of the store's manifest that this host's is equal to

    def starting(self) -> bool:
        """Whether models are missing that the store had at the start. /readyz waits for them, but not for those that are damaged there."""
        if not self._settled:
            listed, present = self.state.listed, {*self._follower.entries}
            damaged = {name for name, wait in self.state.waits.items() if wait.damaged}
            self._settled = bool(present) and (present | damaged >= {*listed} if listed is not None else self.state.problem is not None)
        return not self._settled

    def lines(self) -> list[str]:
        """What the service has waited for since it started, a line each."""
        return self.state.lines(self._follower.entries) if self.starting() else []

    # -- the thread -----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        lower_priority()
        self._step()
        while not self._stopped.wait(min(TICK_S, self._settings.store_poll_s)):
            self._step()

    def _step(self) -> None:
        try:
            if self._lock is None:
                self._folder.mkdir(parents=True, exist_ok=True)
            if not self._elected():
                self._listen()
            elif time.monotonic() >= self._next:
                self._round()
            self.starting()
        except Stopped:
            raise
        except Exception:  # no error may end this thread
            log.exception("the store cannot be followed")
            self._pause(failed=True)

    def _listen(self) -> None:
        """Another worker follows the store: take its state over, and mark the versions that this worker needs."""
        text = self._workers.noted(NOTE)
        if text is not None:
            self.state = STATE_JSON.validate_json(text)
        if time.monotonic() >= self._next:
            for name in self._follower.entries:
                self._touch(name)
            self._pause(failed=False)

    def _say(self, state: StoreState) -> None:
        if state != self.state:
            self.state = state
            self._workers.note(NOTE, STATE_JSON.dump_json(state).decode())

    def _pause(self, failed: bool) -> None:
        poll_s = self._settings.store_poll_s
        self._failures = self._failures + 1 if failed else 0
        pause_s = max(poll_s, min(poll_s * 2.0 ** min(self._failures, 16), MAX_BACKOFF_S)) if failed else poll_s
        self._next = time.monotonic() + pause_s * random.uniform(0.9, 1.1)

    # -- one round ------------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        try:
            self._store = self._store or Objects(self._url)
            models = self._find_models(self._store)
        except StoreError as error:
            self._count_failure(error)
            self._metrics.show("espalier_store_silent_seconds", time.monotonic() - self._answered)
            if self.state.problem is None:
                log.warning("the store does not answer; the versions on this host go on serving: %s", error)
            self._say(replace(self.state, problem=self._public_text(error)))
            self._pause(failed=True)
            return
        if self.state.problem is not None:
            log.info("the store answers again")
        self._heard()
        for folder in {path.parent for path in self._folder.glob(f"*/{FETCH}*")}:
            if self._is_own(folder.name) and folder.name not in models:
                drop_unfinished(folder, set())
        unstored = {name for name in self._follower.entries if name not in models and _downloaded_versions(self._folder / name)}
        for name in sorted(unstored - self._unstored):
            log.warning("%s goes on serving, although the store has no version of it any more", name)
        self._unstored = unstored
        waits = {name: wait for name, wait in self.state.waits.items() if name in models}
        self._say(StoreState(tuple(models), waits))
        self._changed |= _changed_defaults(self._models, models)
        self._models, self._look_at, failed = models, time.monotonic() + self._settings.store_poll_s, False
        try:
            for name in sorted(models, key=lambda name: name not in self._changed):
                failed |= not self._follow(self._store, name, models[name])
        except _Overtaken:
            return  # the next round comes at once, and resumes the download
        self._changed.clear()
        self._pause(failed)

    def _find_models(self, store: Objects) -> dict[str, StoredModel]:
        """This service's models in the store."""
        return {name: stored for name, stored in find_models(store).items() if self._is_own(name)}

    def _is_own(self, name: str) -> bool:
        """Whether this process follows a model; with ESPALIER_SHARD, only that of the shard."""
        return self._settings.shard is None or name == str(self._settings.shard)

    def _heard(self) -> None:
        self._answered = time.monotonic()
        self._metrics.show("espalier_store_silent_seconds", 0.0)

    def _count_failure(self, error: Exception) -> None:
        self._metrics.count("espalier_store_failures_total", next(reason for kind, reason in REASONS.items() if isinstance(error, kind)))

    def _follow(self, store: Objects, name: str, stored: StoredModel) -> bool:
        """Bring the versions that a model should serve. False if one failed; the state then says why."""
        before, needed, failed = self.state.waits.get(name), {stored.versions[-1]}, False
        failure: StoreError | None = None
        try:
            serving = self._serving(store, name, stored)
            if serving is None:
                needed |= self._bring_highest(store, name, stored)
            else:
                needed = {*serving.versions}
                for version in (serving.default, *serving.versions):
                    try:
                        self._bring(store, name, version, stored)
                    except (StoreConflict, StoreMissing) as error:
                        if not (self._folder / name / str(version) / MANIFEST).is_file():
                            raise
                        failure = failure or error  # it serves as it is here
            self._copy_serving(name, serving)
            if failure is not None:
                raise failure
            self._say(replace(self.state, waits={other: wait for other, wait in self.state.waits.items() if other != name}))
        except BeingFetched as error:
            self._wait(name, replace(self.state.waits.get(name) or StoreWait(stored.versions[-1]), reason=str(error)))
        except (EspalierError, OSError) as error:
            wait, failed = self.state.waits.get(name) or StoreWait(stored.versions[-1]), True
            reason = self._public_text(error)
            self._wait(name, replace(wait, reason=reason, damaged=(name, wait.version) in self._damage))
            if before is None or before.reason != reason:
                log.error("%s version %d does not come from the store: %s", name, wait.version, error)
        if name in self.state.waits:
            needed.add(self.state.waits[name].version)
        self._clean(name, needed)  # after a failure too: this may free the disk space that was missing
        return not failed

    def _serving(self, store: Objects, name: str, stored: StoredModel) -> Serving | None:
        try:
            return None if stored.etag is None else read_serving(store, name)[0]
        except StoreError as error:
            self._count_failure(error)
            raise

    def _bring_highest(self, store: Objects, name: str, stored: StoredModel) -> set[int]:
        """Bring the highest undamaged versions, as many as should serve. Then raise the StoreError of a higher version that was skipped.

        If this host has no version yet, a version without room on the disk is skipped too.
        """
        present: set[int] = set()
        first_failure: tuple[int, StoreError] | None = None
        for version in reversed(stored.versions):
            try:
                self._bring(store, name, version, stored)
            except (StoreDamaged, StoreMissing, CacheFull) as error:
                if isinstance(error, CacheFull) and find_versions(self._folder).get(name):
                    raise
                first_failure = first_failure or (version, error)
                continue
            present.add(version)
            if len(present) == (SHARD_VERSIONS if self._is_shard(name, version) else 1):
                break
        if present:
            self._drop_unstored(name, stored)
        if first_failure is not None:
            failed_version, failure = first_failure
            if self.state.waits[name].version != failed_version:
                self._wait(name, StoreWait(failed_version))
            raise failure
        return present

    def _bring(self, store: Objects, name: str, version: int, stored: StoredModel) -> None:
        """Download a version that is not on disk as the store has it. Raises what `fetch` raises. After damage, wait for `retry_at`."""
        if self._is_here(store, name, version, stored.etags.get(version)):
            return
        damage = self._damage.get((name, version))
        before = self.state.waits.get(name)
        self._wait(name, before if before is not None and before.version == version else StoreWait(version))
        if damage is not None and time.monotonic() < damage.retry_at:
            raise damage.error
        began = time.monotonic()

        def on_progress(progress: Progress, count: int) -> None:
            self._check_stopped()
            self._metrics.count("espalier_store_bytes_total", by=count)
            self._heard()
            now = time.monotonic()
            if now - self._noted >= TICK_S:
                self._noted = now
                self._wait(name, StoreWait(version, progress.bytes_on_disk, progress.size))
            if now >= self._look_at:
                with suppress(StoreError):  # the download will raise it, too, or the next round
                    if _changed_defaults(self._models, self._find_models(store)):
                        raise _Overtaken
                self._look_at = time.monotonic() + self._settings.store_poll_s

        try:
            came = fetch(store, name, version, self._folder, on_progress)
        except BeingFetched:
            raise
        except (StoreError, OSError) as error:
            self._count_failure(error)
            if isinstance(error, StoreDamaged | StoreMissing):
                pause_s = RETRY_S if damage is None else damage.next_pause_s
                self._damage[name, version] = _Damage(error, time.monotonic() + pause_s, min(2 * pause_s, MAX_RETRY_S))
            raise
        finally:
            self._metrics.count("espalier_store_seconds_total", by=time.monotonic() - began)
        self._damage.pop((name, version), None)
        log.info("%s version %d came from the store: %.1f MB in %.1f s", name, version, came / 1e6, time.monotonic() - began)
        self._follower.appeared(name, find_versions(self._folder).get(name, ()), late=not self.starting())

    def _drop_unstored(self, name: str, stored: StoredModel) -> None:
        """Delete versions that came from a store and that the store has no more: the highest on disk serves, also after a restart."""
        for version in _downloaded_versions(self._folder / name) - {*stored.versions}:
            if drop(self._folder / name, version):
                log.warning("%s version %d is deleted here, because the store has it no more", name, version)

    def _is_here(self, store: Objects, name: str, version: int, etag: str | None) -> bool:
        """Whether a version is on disk as the store has it. Its manifest is read only if its entity tag has changed."""
        folder = self._folder / name / str(version)
        if not (folder / MANIFEST).is_file():
            return False
        if etag is None or self._same.get((name, version)) != etag:
            try:
                stored = read_manifest(store, name, version)
            except StoreError:  # `fetch` will raise and count it
                return False
            if stored is None or not holds(folder, stored):
                if stored is not None and name not in self.state.waits:
                    log.warning("%s version %d on this host is another one than the store's", name, version)
                return False
            if etag is not None:
                self._same[name, version] = etag
        return True

    def _wait(self, name: str, wait: StoreWait) -> None:
        self._say(replace(self.state, waits={**self.state.waits, name: wait}))

    def _is_shard(self, name: str, version: int) -> bool:
        file = self._folder / name / str(version) / MANIFEST
        try:
            with file.open("rb") as stream:
                return parse_manifest(stream.read(MAX_MANIFEST_BYTES), str(file)).shard is not None
        except (EspalierError, OSError):  # loading the version will report this
            return False

    def _copy_serving(self, name: str, serving: Serving | None) -> None:
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
        """Delete versions that came from the store and that no worker has needed for a while, except the highest few."""
        folder = self._folder / name
        if not folder.is_dir():
            return
        now = time.time()  # before the marks are set, however long this process is stopped after it
        self._touch(name, needed)
        drop_unfinished(folder, needed)
        downloaded = sorted(_downloaded_versions(folder))
        linger_s = max(LINGER_S, 3 * self._settings.store_poll_s)
        for version in downloaded[: max(len(downloaded) - self._settings.store_keep, 0)]:
            with suppress(FileNotFoundError):
                if now - (folder / f"{FETCHED}{version}").stat().st_mtime > linger_s and drop(folder, version):
                    log.info("%s version %d is deleted here: nobody needs it, and the store has it", name, version)

    def _touch(self, name: str, needed: Iterable[int] = ()) -> None:
        """Mark the versions that are needed: set the time of their mark files."""
        for version in {*needed, *self._follower.in_use(name)} & _downloaded_versions(self._folder / name):
            with suppress(OSError):
                os.utime(self._folder / name / f"{FETCHED}{version}")

    def _public_text(self, error: Exception) -> str:
        """An error's text without the store's address and paths of this host, so that users may read it."""
        text = str(error).replace(f"{self._url}/", "").replace(self._url, "the store")
        return relative_paths(text, self._folder)


def _changed_defaults(before: Mapping[str, StoredModel], now: Mapping[str, StoredModel]) -> set[str]:
    """The models whose serving.json is another one in the store than before."""
    return {name for name, stored in now.items() if stored.etag != (before[name].etag if name in before else None)}


def _described(serving: Serving) -> str:
    return f"version {serving.default} serves" + (f", of {list(serving.versions)}" if len(serving.versions) > 1 else "")


def _downloaded_versions(folder: Path) -> set[int]:
    marks = (path.name.removeprefix(FETCHED) for path in folder.glob(f"{FETCHED}*"))
    return {version for mark in marks if (version := version_of(mark)) is not None}
