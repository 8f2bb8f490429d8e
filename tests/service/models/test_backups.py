"""A service backs up what only its host has: when it is due, if it has changed, and without a word to those who ask."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from espalier.errors import StoreUnavailable
from espalier.live.journal import Journal
from espalier.serving import Serving
from espalier.store.backups import BACKUPS, find_backups, read_backup, time_of
from espalier.store.objects import Objects
from espalier.store.restoring import host_lock
from service.models import backups
from service.models.backups import Backups
from service.models.desired_state import DesiredState
from service.settings import Settings
from service.watch.metrics import Metrics
from tests.espalier.live.journals import appended, put
from tests.service.models.registry import Running, run
from tests.service.running import total
from tests.waiting import until

TIMESTAMP = "espalier_live_backup_timestamp_seconds"
FAILURES = "espalier_live_backup_failures_total"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backups, "TICK_S", 0.02)


class Looks:
    """Counts how often a process has looked at what it has to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, elected = 0, Backups._elected
        self._holds, self._held, self._go_on = False, threading.Event(), threading.Event()

        def look(backups: Backups) -> bool:
            self.count += 1
            if self._holds:
                self._held.set()
                self._go_on.wait(20)
            return elected(backups)

        monkeypatch.setattr(Backups, "_elected", look)

    def several(self) -> None:
        """Wait until it has looked so often that it has done what it would do."""
        enough = self.count + 20
        until(lambda: self.count >= enough)

    @contextmanager
    def none(self) -> Iterator[None]:
        """Meanwhile it looks at nothing."""
        self._holds = True
        assert self._held.wait(20)
        yield
        self._holds = False
        self._held.clear()
        self._go_on.set()
        self._go_on = threading.Event()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


@pytest.fixture
def live(models: Path) -> Iterator[Journal]:
    """The journal of `books`, with one operation."""
    journal = Journal(models / "books" / "live.db")
    appended(journal, [put("a")])
    yield journal
    journal.close()


def backed_up(models: Path, store: Objects, every_s: float = 0.05, **settings: Any) -> AbstractContextManager[Running]:
    return run(models, backup=store.url, backup_every_s=every_s, **settings)


def value(running: Running, name: str) -> float | None:
    """A metric of `books`; None where there is none."""
    return total(running.metrics, name, model="books")


def confirmed(running: Running) -> Callable[[], bool]:
    """Whether the newest backup was looked at since now."""
    now = time.time()
    return lambda: (value(running, TIMESTAMP) or 0.0) > now


def test_a_backup_is_made_at_once_and_again_only_when_something_has_changed(models: Path, store: Objects, live: Journal) -> None:
    with backed_up(models, store) as running:
        until(confirmed(running))
        assert len(find_backups(store, "books")) == 1
        appended(live, [put("b")])
        until(lambda: len(find_backups(store, "books")) == 2)
        until(confirmed(running))
        running.remove("item-3")
        until(lambda: len(find_backups(store, "books")) == 3)
        until(confirmed(running))
        assert len(find_backups(store, "books")) == 3
        assert value(running, FAILURES) == 0


def test_a_model_with_nothing_of_its_own_is_not_backed_up(models: Path, store: Objects) -> None:
    with backed_up(models, store) as running:
        until(lambda: (models / ".backup.lock").exists())
        assert value(running, TIMESTAMP) is None
        running.remove("item-3")
        until(lambda: value(running, TIMESTAMP) is not None)


def test_a_service_whose_models_folder_is_still_to_come_waits_for_it(
    tmp_path: Path, store: Objects, looks: Looks, caplog: pytest.LogCaptureFixture
) -> None:
    backups = Backups(Settings(models=tmp_path / "cache", backup_every_s=0.05), store.url, Metrics())
    backups.start()
    try:
        looks.several()
        assert not [record for record in caplog.records if record.exc_info]
        (tmp_path / "cache" / "books").mkdir(parents=True)
        (tmp_path / "cache" / "books" / "removed.json").write_text("{}")
        until(lambda: find_backups(store, "books"))
    finally:
        backups.stop()


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0], ids=["the store's clock is right", "both clocks were ahead"])
def test_a_backup_of_a_time_to_come_delays_no_other(models: Path, store: Objects, live: Journal, tmp_path: Path, ahead_s: float) -> None:
    with backed_up(models, store) as running:
        until(confirmed(running))
    (first,) = (tmp_path / "store" / BACKUPS / "books").iterdir()
    ahead = first.rename(first.with_name(f"2199{first.name[4:]}"))
    os.utime(ahead / "manifest.json", (time.time() + ahead_s,) * 2)
    appended(live, [put("b")])
    with backed_up(models, store, every_s=3600.0):
        until(lambda: len(find_backups(store, "books")) == 2)


def test_a_restart_reads_the_time_from_the_store_and_makes_no_backup_before_it_is_due(
    models: Path, store: Objects, live: Journal, looks: Looks
) -> None:
    with backed_up(models, store) as running:
        until(confirmed(running))
    (first,) = find_backups(store, "books")
    appended(live, [put("b")])
    with backed_up(models, store, every_s=3600.0) as running:
        until(lambda: value(running, TIMESTAMP) is not None)
        assert value(running, TIMESTAMP) == time_of(first)
        looks.several()
        assert find_backups(store, "books") == [first]


def holds(store: Objects, sequence: int) -> bool:
    return any(f"-{sequence}-" in found for found in find_backups(store, "books"))


def test_old_backups_are_deleted(models: Path, store: Objects, live: Journal) -> None:
    with backed_up(models, store, backup_keep=2):
        for number in range(4):
            (last,) = appended(live, [put(f"more-{number}")])
            until(partial(holds, store, last))
        until(lambda: len(find_backups(store, "books")) == 2)


def test_a_failure_is_counted_and_logged_once_and_backups_go_on_when_it_is_over(
    models: Path, store: Objects, live: Journal, looks: Looks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with backed_up(models, store) as running:
        until(confirmed(running))
        with looks.none():
            shutil.move(tmp_path / "store" / BACKUPS, tmp_path / "away")
            (tmp_path / "store" / BACKUPS).write_text("no folder")
        until(lambda: (value(running, FAILURES) or 0) >= 3)
        assert running.found()  # it answers
        before = value(running, TIMESTAMP)
        with looks.none():
            (tmp_path / "store" / BACKUPS).unlink()
            shutil.move(tmp_path / "away", tmp_path / "store" / BACKUPS)
        until(confirmed(running))
        assert (value(running, TIMESTAMP) or 0.0) > (before or 0.0)
        until(lambda: "books is backed up again" in caplog.text, "the log says so, which is after the backup")
    lines = [record.message for record in caplog.records if "backed up" in record.message]
    recovered = "books is backed up again, and its old backups are deleted"
    assert [line.split(":")[0] for line in lines[1:]] == ["books is not backed up; it is tried again", recovered]


def test_a_store_that_lets_nothing_be_deleted_gets_no_more_backups_than_are_due(
    models: Path, store: Objects, live: Journal, looks: Looks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    refused, deletions = True, 0

    def refuse(*_: Any) -> None:
        nonlocal deletions
        deletions += 1
        if refused:
            raise StoreUnavailable("backups/books: 403 Forbidden (AccessDenied)")

    monkeypatch.setattr(backups, "prune", refuse)
    monkeypatch.setattr(backups, "RETRY_S", 0.02)
    with backed_up(models, store, every_s=3600.0) as running:
        until(lambda: value(running, FAILURES))
        appended(live, [put("b")])
        until(lambda: (value(running, FAILURES) or 0) >= 5, "an alert sees that the failure lasts")
        assert len(find_backups(store, "books")) == 1
        refused = False
        until(lambda: "its old backups are deleted" in caplog.text)
        before = deletions
        looks.several()
        assert deletions == before
    lines = [record.message for record in caplog.records if "backup" in record.message and record.levelno >= logging.ERROR]
    assert lines == ["books is backed up, but its old backups are not deleted: backups/books: 403 Forbidden (AccessDenied)"]


def test_one_process_of_a_host_makes_the_backups(models: Path, store: Objects, live: Journal, looks: Looks) -> None:
    with host_lock(models):  # another one does
        with backed_up(models, store) as running:
            looks.several()
            assert value(running, FAILURES) is None
        assert find_backups(store, "books") == []
    with backed_up(models, store) as running:
        until(confirmed(running))
        assert len(find_backups(store, "books")) == 1


def test_a_host_that_follows_another_makes_no_backups(models: Path, store: Objects, live: Journal) -> None:
    before = threading.enumerate()  # one of another test may be about to end
    with backed_up(models, store, follow="http://127.0.0.1:1"):
        assert not [thread for thread in threading.enumerate() if thread.name == "backups" and thread not in before]


def test_a_default_that_may_be_changed_back_is_not_backed_up(models: Path, store: Objects, live: Journal) -> None:
    state = DesiredState(models / "books")
    with state.locked(Serving):
        state.begin_change(None, Serving(generation=1, versions=(1,), default=1))
        with backed_up(models, store) as running:
            until(confirmed(running))
    assert manifest_of(store).keys() == {"live.db"}


def manifest_of(store: Objects) -> dict[str, Any]:
    """The files of the newest backup."""
    found = read_backup(store, "books", find_backups(store, "books")[-1])
    assert found is not None
    return dict(found.files)


def test_a_clock_that_is_set_back_stops_no_backups(models: Path, store: Objects, live: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_s = 40 * 86_400.0

    class Clock:
        monotonic = staticmethod(time.monotonic)

        @staticmethod
        def time() -> float:
            return time.time() + ahead_s

    monkeypatch.setattr(backups, "time", Clock)
    with backed_up(models, store):
        until(lambda: len(find_backups(store, "books")) == 1)
        ahead_s = 0.0
        appended(live, [put("b")])
        until(lambda: len(find_backups(store, "books")) == 2)
