"""What a host has comes back after its disk is lost, and a backup or a restore that is killed is begun again. Real processes."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from espalier.live.journal import Journal
from espalier.store.backups import WORK, find_backups
from espalier.store.objects import Objects
from espalier.store.publishing import publish
from tests.espalier.live.journals import appended, put
from tests.service.deadly_journal import journal
from tests.service.processes import Service, service
from tests.service.running import small_model
from tests.waiting import until

pytestmark = pytest.mark.slow

WRITE_KEY = "a-write-key-of-a-test"


def asked(running: Service, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    return running.request(method, path, body, Authorization=f"Bearer {WRITE_KEY}")


def found(running: Service) -> set[str]:
    status, answer = running.request("POST", "/retrieve", {"queries": [{"history": ["item-1"]}], "m": 40, "beam_size": 64})
    assert status == 200, answer
    return {item["id"] for item in answer["results"][0]["items"]}


def test_a_service_whose_disk_is_lost_has_everything_again_that_the_backup_had(tmp_path: Path) -> None:
    models, url = tmp_path / "models", f"file://{tmp_path}/store"
    small_model(models, kind="product")
    publish(Objects(url, create=True), [models / "books" / "1"])
    settings = {"ESPALIER_BACKUP": url, "ESPALIER_BACKUP_EVERY_S": "0.2", "ESPALIER_WRITE_KEYS": WRITE_KEY}
    with service(models, 2, **settings) as running:
        numbers = []
        for item in range(5):
            status, outcome = asked(running, "PUT", f"/models/books/items/new-{item}", {"events": [["item-1"]]})
            assert status == 201, outcome
            numbers.append(outcome["sequence"])
        assert asked(running, "DELETE", "/models/books/items/new-4")[0] == 200
        assert running.request("PUT", "/models/books/removed", {"ids": ["item-3"]})[0] == 200
        assert running.request("POST", "/models/books/default", {"version": 1})[0] == 200
        before = found(running)
        stored = [asked(running, "GET", f"/models/books/items/new-{item}")[1] for item in range(4)]
        since = running.metric('espalier_live_backup_timestamp_seconds{model="books"}')
        until(lambda: running.metric('espalier_live_backup_timestamp_seconds{model="books"}') > since + 1)
        assert running.metric('espalier_live_backup_failures_total{model="books"}') == 0
        for pid in [running.process.pid, *running.workers()]:
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(models)
    assert journal(["restore", "--models", str(models), "--store", url]) == 0
    with service(models, 2, **settings) as running:
        assert found(running) == before
        assert {f"new-{item}" for item in range(4)} <= before
        assert not {"new-4", "item-3"} & before
        assert [asked(running, "GET", f"/models/books/items/new-{item}")[1] for item in range(4)] == stored
        assert running.request("GET", "/models/books/removed")[1]["ids"] == ["item-3"]
        status, outcome = asked(running, "PUT", "/models/books/items/newer", {"events": [["item-1"]]})
        assert (status, outcome["sequence"] > max(numbers) + 1) == (201, True)
        assert "newer" in found(running)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A models folder with a journal of three operations, a removal and a default."""
    books = tmp_path / "models" / "books"
    books.mkdir(parents=True)
    (books / "serving.json").write_text('{"generation": 2, "versions": [1], "default": 1}\n')
    (books / "removed.json").write_text('{"generation": 3, "ids": ["item-3"]}\n')
    live = Journal(books / "live.db")
    appended(live, [put("a"), put("b"), put("c")])
    live.close()
    return tmp_path / "models"


def whole(models: Path) -> bool:
    ids = [operation.id for operation in Journal.open(models / "books" / "live.db").since(0, 9)]
    return ids == ["a", "b", "c"] and "item-3" in (models / "books" / "removed.json").read_text()


def test_a_backup_that_is_killed_anywhere_is_not_seen_and_the_next_is_whole(models: Path, tmp_path: Path) -> None:
    store = Objects(f"file://{tmp_path}/store", create=True)
    backup = ["backup", "--models", str(models), "--model", "books", "--store", store.url]
    steps = 0
    while journal(backup, models, steps + 1) == -signal.SIGKILL:
        steps += 1
        if there := find_backups(store, "books"):  # it was killed when it had finished
            (tmp_path / "store" / "backups" / "books" / there[0] / "manifest.json").unlink()
    assert steps > 5
    assert not (models / "books" / WORK).exists()
    assert len(find_backups(store, "books")) == 1
    shutil.rmtree(models)
    assert journal(["restore", "--models", str(models), "--store", store.url]) == 0
    assert whole(models)


def test_a_restore_that_is_killed_anywhere_is_repeated(models: Path, tmp_path: Path) -> None:
    store = Objects(f"file://{tmp_path}/store", create=True)
    small_model(tmp_path / "trained")
    publish(store, [tmp_path / "trained" / "books" / "1"])
    assert journal(["backup", "--models", str(models), "--model", "books", "--store", store.url]) == 0
    restore = ["restore", "--models", str(models), "--store", store.url]
    steps, repeated = 0, 0
    shutil.rmtree(models)
    while journal(restore, models, steps + 1) == -signal.SIGKILL:
        steps += 1
        if not (models / "books" / "live.db").exists():  # else it was killed when it had finished
            repeated += 1
            assert journal(restore) == 0
        assert whole(models)
        assert (models / "books" / "1" / "manifest.json").is_file()
        shutil.rmtree(models)
    assert whole(models)
    assert repeated > 10
