"""Backs up the state that only this host has, every ESPALIER_BACKUP_EVERY_S seconds: journals, removed.json and serving.json, to a store.

One process of a host does so: the one that holds a lock on the models folder. A model's next backup is due so long after its newest one in
the store. A service that restarts again and again therefore makes no more backups. A failure is logged once and tried again; requests do
not notice. Knows models by their folders. Does not know how a backup is made (espalier/store/backups.py).
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from espalier.errors import EspalierError
from espalier.store.backups import LOCK, BeingBackedUp, back_up, find_backups, made_at, models_with_state, prune
from espalier.store.objects import Objects

from ..host_thread import HostThread, Stopped
from ..models.loading import lower_priority
from ..settings import Settings
from ..watch.metrics import Metrics

log = logging.getLogger(__name__)

TICK_S = 1.0
"""Seconds between two checks for backups that are due."""
RETRY_S = 60.0
"""Longest pause after a failure, unless ESPALIER_BACKUP_EVERY_S is shorter."""


class Backups(HostThread):
    def __init__(self, settings: Settings, url: str, metrics: Metrics) -> None:
        super().__init__("backups", settings.models / LOCK, f"journals, removals and defaults are backed up to {url}")
        self._settings, self._url, self._metrics = settings, url, metrics
        self._store: Objects | None = None
        self._due: dict[str, float] = {}  # model → when, of time.monotonic(), because the clock may be set
        self._next: dict[str, float] = {}  # model → when another backup may be made; before, only old ones are deleted
        self._problems: dict[str, str] = {}  # model → what failed last time, which was logged
        self._logged_error = ""

    def _work(self) -> None:
        lower_priority()
        while not self._stopped.wait(min(TICK_S, self._settings.backup_every_s)):
            try:
                if self._elected():
                    self._back_up_due()
            except Stopped:
                raise
            except Exception as error:  # no error may end the backups
                if self._logged_error != str(error):
                    log.exception("backups are tried again after")
                self._logged_error = str(error)

    def _back_up_due(self) -> None:
        for name in models_with_state(self._settings.models):
            if time.monotonic() >= self._due.get(name, 0.0) and not self._stopped.is_set():
                self._back_up(name, self._settings.models / name)

    def _back_up(self, name: str, folder: Path) -> None:
        """Back a model up, and note when the next backup is due."""
        every_s, now = self._settings.backup_every_s, time.monotonic()
        problem, retry_at = "is not backed up; it is tried again", now + min(RETRY_S, every_s)
        self._metrics.count("espalier_live_backup_failures_total", name, by=0)  # so that Prometheus sees the first one as an increase
        try:
            self._store = self._store or Objects(self._url, create=True)
            if name not in self._due and (ids := find_backups(self._store, name)):
                age_s = time.time() - (newest := made_at(self._store, name, ids[-1]))
                if age_s >= 0:
                    self._metrics.show("espalier_live_backup_timestamp_seconds", newest, name)
                    self._due[name] = now + max(every_s - age_s, 0.0)
                    return
                # a clock is wrong, so the age is unknown: another backup is due
            if now >= self._next.get(name, 0.0):
                if back_up(self._store, folder, on_bytes=lambda _: self._check_stopped()) is not None:
                    self._metrics.show("espalier_live_backup_timestamp_seconds", time.time(), name)
                self._next[name] = now + every_s
            problem = "is backed up, but its old backups are not deleted"
            prune(self._store, name, self._settings.backup_keep)
            self._due[name] = self._next[name]
        except BeingBackedUp:  # a command does so
            self._due[name] = retry_at
        except (EspalierError, OSError) as error:
            self._due[name] = retry_at
            self._metrics.count("espalier_live_backup_failures_total", name)
            if self._problems.get(name) != problem:
                log.error("%s %s: %s", name, problem, error)
            self._problems[name] = problem
        else:
            if self._problems.pop(name, None) is not None:
                log.info("%s is backed up again, and its old backups are deleted", name)
