"""What a host has comes back after its disk is lost, and a backup or a restore that is killed is begun again. Real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from espalier.live.journal import Journal
from espalier.store.backups import find_backups
from espalier.store.objects import Objects
from espalier.store.publishing import publish
from tests import ROOT
from tests.espalier.live.journals import appended, put
from tests.service.processes import Service, service
from tests.service.running import small_model
from tests.waiting import until

pytestmark = pytest.mark.slow

WRITE_KEY = "a-write-key-of-a-test"
KILLED = """
import os, pathlib, signal, sys, threading
from service.journal import main
begun, lock = 0, threading.Lock()
def hook(event, arguments):
    global begun
    if event in ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "sqlite3.connect") and "/wt/" in str(arguments[0]):
        with lock:
            begun += 1
        if begun == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
sys.exit(main(sys.argv[2:]))
"""
"""The command, killed before its n-th change of the models folder."""


def journal(*arguments: str) -> Any:
    done = subprocess.run([sys.executable, "-m", "service.journal", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
    (restored,) = journal("restore", "--models", str(models), "--store", url)["restored"]
    assert (restored["came"], restored["missing"]) == ([1], [])
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
    """A models folder whose path the killed command knows."""
    books = tmp_path / "wt" / "books"
    books.mkdir(parents=True)
    (books / "serving.json").write_text('{"generation": 2, "versions": [1], "default": 1}\n')
    (books / "removed.json").write_text('{"generation": 3, "ids": ["item-3"]}\n')
    live = Journal(books / "live.db")
    appended(live, [put(f"item-{number}") for number in range(3)])
    live.close()
    return tmp_path / "wt"


def killed(step: int, *arguments: str) -> bool:
    """Whether the command was killed at a step; else it is done."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(step), *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def test_a_backup_that_is_killed_anywhere_is_not_seen_and_the_next_is_whole(models: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    store = Objects(url, create=True)
    for step in count(1):
        was_killed = killed(step, "backup", "--models", str(models), "--model", "books", "--store", url)
        there = find_backups(store, "books")
        if not was_killed:
            break
        if there:  # it was killed behind its end
            (tmp_path / "store" / "backups" / "books" / there[0] / "manifest.json").unlink()
    assert step > 5
    assert [*(models / "books").glob(".backup")] == []
    shutil.rmtree(models)
    journal("restore", "--models", str(models), "--store", url)
    assert [operation.id for operation in Journal.open(models / "books" / "live.db").since(0, 9)] == ["item-0", "item-1", "item-2"]


def test_a_restore_that_is_killed_anywhere_is_repeated(models: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    small_model(tmp_path / "trained")
    publish(Objects(url, create=True), [tmp_path / "trained" / "books" / "1"])
    journal("backup", "--models", str(models), "--model", "books", "--store", url)
    for step in count(1):
        shutil.rmtree(models, ignore_errors=True)
        models.mkdir()
        if not killed(step, "restore", "--models", str(models), "--store", url):
            break
        books = models / "books"
        if not (books / "live.db").exists():  # else it was killed behind its end
            journal("restore", "--models", str(models), "--store", url)
        assert [operation.id for operation in Journal.open(books / "live.db").since(0, 9)] == ["item-0", "item-1", "item-2"]
        assert (books / "1" / "manifest.json").is_file()
        assert "item-3" in (books / "removed.json").read_text()
    assert step > 8
