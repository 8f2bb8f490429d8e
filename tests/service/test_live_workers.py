"""Several workers have one catalogue: what one of them has answered is seen by all, and no kill loses it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from espalier.live.journal import Journal
from espalier.live.journal_upkeep import erase_user
from tests.service.processes import Service, paused, service
from tests.service.running import small_model
from tests.waiting import until

pytestmark = pytest.mark.slow

EVENTS = {"events": [["item-1"]]}
ALL = {"queries": [{"history": ["item-1"]}], "m": 40, "beam_size": 64}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    small_model(folder, kind="product")
    return folder


WRITE_KEY = "a-write-key-of-a-test"


def asked(running: Service, method: str, path: str, body: Any = None, **more: str) -> tuple[int, Any]:
    """A request on a connection of its own, and so of any worker."""
    return running.request(method, path, body, Authorization=f"Bearer {WRITE_KEY}", **more)


def found(running: Service) -> set[str]:
    status, answer = running.request("POST", "/retrieve", ALL)
    assert status == 200, answer
    return {item["id"] for item in answer["results"][0]["items"]}


def put(running: Service, item_id: str) -> int:
    status, outcome = asked(running, "PUT", f"/models/books/items/{item_id}", EVENTS)
    assert status == 201, outcome
    sequence: int = outcome["sequence"]
    return sequence


def test_what_is_answered_is_seen_by_every_worker_at_once(models: Path) -> None:
    with service(models, 2, ESPALIER_WRITE_KEYS=WRITE_KEY) as running:
        items: set[str] = set()
        for i in range(20):
            assert put(running, f"new%2F{i}") == i + 1
            items.add(f"new/{i}")
            for _ in range(4):
                assert items <= found(running)
        for i in range(0, 20, 2):
            assert asked(running, "DELETE", f"/models/books/items/new%2F{i}")[0] == 200
            assert not {f"new/{i}"} & (found(running) | found(running))


def test_a_killed_worker_loses_nothing_and_its_replacement_has_everything(models: Path) -> None:
    with service(models, 2, ESPALIER_WRITE_KEYS=WRITE_KEY) as running:
        put(running, "first")
        os.kill(running.workers()[0], signal.SIGKILL)
        put(running, "during")
        until(lambda: "".join(running.log).count("is ready on") == 3, "the replacement has loaded")
        until(lambda: all(running.request("GET", "/readyz")[0] == 200 for _ in range(16)), "every worker is ready")
        put(running, "after")
        for _ in range(8):
            assert {"first", "during", "after"} <= found(running)
        for pid in [*running.workers(), running.process.pid]:
            os.kill(pid, signal.SIGKILL)
    with service(models, 1, ESPALIER_WRITE_KEYS=WRITE_KEY) as running:
        assert {"first", "during", "after"} <= found(running)
        assert put(running, "last") == 4


def test_of_writers_that_race_for_an_id_one_wins_and_no_sequence_is_given_twice(models: Path) -> None:
    with service(models, 2, ESPALIER_WRITE_KEYS=WRITE_KEY) as running:
        answers: list[tuple[str, int, Any]] = []

        def write(_: int) -> None:
            for i in range(10):
                item = f"new-{i}"
                answers.append((item, *asked(running, "PUT", f"/models/books/items/{item}", EVENTS, **{"If-None-Match": "*"})))

        with ThreadPoolExecutor(6) as writers:
            list(writers.map(write, range(6)))
        won = [(item, answer["sequence"]) for item, status, answer in answers if status == 201]
        assert sorted(item for item, _ in won) == sorted(f"new-{i}" for i in range(10))
        assert sorted(sequence for _, sequence in won) == [*range(1, 11)]
        assert {status for _, status, _ in answers} == {201, 412}


def test_a_stopped_worker_makes_writes_202_and_is_waited_for_again_when_it_goes_on(models: Path) -> None:
    with service(models, 2, ESPALIER_WRITE_KEYS=WRITE_KEY) as running:
        put(running, "first")
        with paused(running.workers()[0]):
            for i in range(5):
                status, outcome = asked(running, "PUT", f"/models/books/items/new-{i}", EVENTS)
                assert (status, outcome["visible"]) == (202, False)
        sequence = 6

        def seen() -> bool:
            nonlocal sequence
            sequence += 1
            return asked(running, "PUT", f"/models/books/items/later-{sequence}", EVENTS)[0] == 201

        until(seen, "it is waited for again")
        assert {"first", *(f"new-{i}" for i in range(5)), f"later-{sequence}"} <= found(running) & found(running)


def test_an_erasure_reaches_the_memory_of_every_worker(models: Path) -> None:
    keys = {"ESPALIER_WRITE_KEYS": WRITE_KEY, "ESPALIER_ADMIN_KEYS": "an-admin-key-of-a-test"}

    def kept() -> list[int]:
        headers = {"Authorization": "Bearer an-admin-key-of-a-test"}
        return [len(running.request("GET", "/models/books/samples", **headers)[1]["queries"]) for _ in range(16)]

    with service(models, 2, ESPALIER_SAMPLE_QUERIES="9", **keys) as running:
        status, _ = asked(running, "PUT", "/models/books/items/new", EVENTS | {"users": ["u"]})
        assert status == 201
        until(lambda: (found(running), all(kept()))[1], "every worker has a query")
        erase_user(Journal(models / "books" / "live.db"), "u")
        until(lambda: not any(kept()), "no worker has one")
