"""Several workers have one catalogue: what one of them has answered is seen by all, and no kill loses it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
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
ALL = {"queries": [{"history": ["item-1"]}], "m": 100, "beam_size": 128}
SETTINGS = {"ESPALIER_WRITE_KEYS": "a-write-key-of-a-test", "ESPALIER_SAMPLE_QUERIES": "9"}


def made(folder: Path) -> Path:
    """A models folder with `books`."""
    small_model(folder, kind="product", max_m=100, max_beam_size=128)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("live") / "models")


@pytest.fixture(scope="module")
def running(models: Path) -> Iterator[Service]:
    """Two workers, whom no test kills. Each test puts items of its own."""
    with service(models, 2, **SETTINGS) as started:
        yield started


def found(running: Service) -> set[str]:
    status, answer = running.request("POST", "/retrieve", ALL)
    assert status == 200, answer
    return {item["id"] for item in answer["results"][0]["items"]}


def put(running: Service, item_id: str) -> int:
    status, outcome = running.request("PUT", f"/models/books/items/{item_id}", EVENTS)
    assert status == 201, outcome
    sequence: int = outcome["sequence"]
    return sequence


def test_what_is_answered_is_seen_by_every_worker_at_once(running: Service) -> None:
    items: set[str] = set()
    first = put(running, "new%2F0")
    for i in range(20):
        assert i == 0 or put(running, f"new%2F{i}") == first + i
        items.add(f"new/{i}")
        for _ in range(4):
            assert items <= found(running)
    for i in range(0, 20, 2):
        assert running.request("DELETE", f"/models/books/items/new%2F{i}")[0] == 200
        assert not {f"new/{i}"} & (found(running) | found(running))


def test_of_writers_that_race_for_an_id_one_wins_and_no_sequence_is_given_twice(running: Service) -> None:
    answers: list[tuple[str, int, Any]] = []

    def write(_: int) -> None:
        for i in range(10):
            item = f"raced-{i}"
            answers.append((item, *running.request("PUT", f"/models/books/items/{item}", EVENTS, **{"If-None-Match": "*"})))

    with ThreadPoolExecutor(6) as writers:
        list(writers.map(write, range(6)))
    won = [(item, answer["sequence"]) for item, status, answer in answers if status == 201]
    sequences = sorted(sequence for _, sequence in won)
    assert sorted(item for item, _ in won) == sorted(f"raced-{i}" for i in range(10))
    assert sequences == [*range(sequences[0], sequences[0] + 10)]
    assert {status for _, status, _ in answers} == {201, 412}


def test_a_stopped_worker_makes_writes_202_and_is_waited_for_again_when_it_goes_on(running: Service) -> None:
    put(running, "first")
    with paused(running.workers()[0]):
        for i in range(5):
            status, outcome = running.request("PUT", f"/models/books/items/late-{i}", EVENTS)
            assert (status, outcome["visible"]) == (202, False)
    tries = 0

    def seen() -> bool:
        nonlocal tries
        tries += 1
        return running.request("PUT", f"/models/books/items/later-{tries}", EVENTS)[0] == 201

    until(seen, "it is waited for again")
    assert {"first", *(f"late-{i}" for i in range(5)), f"later-{tries}"} <= found(running) & found(running)


def test_an_erasure_reaches_the_memory_of_every_worker(running: Service, models: Path) -> None:
    def kept() -> list[int]:
        return [len(running.request("GET", "/models/books/samples")[1]["queries"]) for _ in range(16)]

    status, _ = running.request("PUT", "/models/books/items/of-a-user", EVENTS | {"users": ["u"]})
    assert status == 201
    until(lambda: (found(running), all(kept()))[1], "every worker has a query")
    erase_user(Journal(models / "books" / "live.db"), "u")
    until(lambda: not any(kept()), "no worker has one")


def test_a_killed_worker_loses_nothing_and_its_replacement_has_everything(tmp_path: Path) -> None:
    models = made(tmp_path / "models")
    with service(models, 2, **SETTINGS) as running:
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
    with service(models, 1, **SETTINGS) as running:
        assert {"first", "during", "after"} <= found(running)
        assert put(running, "last") == 4
