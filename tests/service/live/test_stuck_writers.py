"""A process that holds the journal's lock and does nothing, or a disk that does not answer, holds up no request for ever."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.checks.random_bundles import make_bundle
from espalier.errors import EspalierError
from espalier.live.journal import Journal
from espalier.live.journal_file import locked
from espalier.live.operations import ItemBody
from espalier.tree import complete_tree
from service.errors import NotWritable
from service.live import catalogue as module
from service.live.catalogue_types import Delete, Outcome, Put
from tests.service.live_running import Nearest, live_service, models
from tests.service.processes import Service, process_state, service
from tests.service.running import ITEMS, LIMITS
from tests.waiting import until

__all__ = ["models"]

KEY = "a-write-key-of-a-test"
LIMIT_S = 20.0
"""How long a step that is held up waits at most, so that a test fails and does not hang."""


def test_while_another_process_holds_the_lock_all_writes_that_wait_are_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write of an item is a group of its own, and no group waits for the lock in its turn."""
    with live_service(models, monkeypatch) as live:
        live.put("new", like=("item-1",))
        lines = [Put(f"new-{i % 2}", ItemBody(like=("item-1",), fields={"price": i})) for i in range(200)]

        async def write() -> Sequence[Outcome | EspalierError]:
            deadline = asyncio.timeout(LIMIT_S)
            async with deadline:
                return [*await live.catalogue.bulk(lines), *await live.catalogue.bulk([Delete("new")])]

        with locked(models / "books" / "live.db"):
            outcomes = live.running.client.runner.run(write())
            assert {type(outcome) for outcome in outcomes} == {NotWritable}
            assert "another process holds its lock" in str(outcomes[0])
            assert live.get("new").sequence == 1
            assert "new" in live.found("item-1")
        assert live.put("newer", like=("item-1",)).sequence == 2


def test_a_write_that_has_not_begun_in_time_is_not_done(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_S", 0.2, raising=False)
    monkeypatch.setattr(module, "BULK_S", 0.2, raising=False)
    placing, go_on = threading.Event(), threading.Event()
    place = Nearest.place

    def held_up(self: Nearest, *rest: Any) -> Any:
        placing.set()
        go_on.wait(LIMIT_S)
        return place(self, *rest)

    with live_service(models, monkeypatch) as live:
        monkeypatch.setattr(Nearest, "place", held_up)

        async def write() -> list[Any]:
            first = asyncio.create_task(live.catalogue.put(Put("begun", ItemBody(like=("item-1",)))))
            await asyncio.to_thread(placing.wait, LIMIT_S)
            others = (
                live.catalogue.put(Put("waits", ItemBody(like=("item-1",)))),
                live.catalogue.bulk([Put("line", ItemBody(like=("item-1",)))]),
            )
            found = await asyncio.gather(first, *others, return_exceptions=True)
            go_on.set()
            return list(found)

        begun, waits, line = live.running.client.runner.run(write())
        assert isinstance(begun, NotWritable)
        assert "not known" in str(begun)
        assert isinstance(waits, NotWritable)
        assert "Nothing was written" in str(waits)
        assert isinstance(line[0], NotWritable)
        until(lambda: "begun" in live.found("item-1"), "what was begun is done")
        live.put("begun", fields={"price": 1.0})
        assert not {"waits", "line"} & {*live.found("item-1")}


def test_behind_a_write_that_does_not_end_no_others_gather(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clients have long been answered, so nothing else would bound them."""
    placing, go_on = threading.Event(), threading.Event()
    place = Nearest.place

    def held_up(self: Nearest, *rest: Any) -> Any:
        placing.set()
        go_on.wait(3 * LIMIT_S)
        return place(self, *rest)

    with live_service(models, monkeypatch) as live:

        async def write() -> list[Any]:
            monkeypatch.setattr(module, "WRITE_S", 0.2)
            first = asyncio.create_task(live.catalogue.put(Put("begun", ItemBody(like=("item-1",)))))
            await asyncio.to_thread(placing.wait, LIMIT_S)
            found = await asyncio.gather(first, live.catalogue.put(Put("waits", ItemBody(like=("item-1",)))), return_exceptions=True)
            monkeypatch.setattr(module, "WRITE_S", LIMIT_S)
            monkeypatch.setattr(module, "BULK_S", LIMIT_S)
            refused = live.catalogue.put(Put("later", ItemBody(like=("item-1",)))), live.catalogue.bulk([Delete("item-1")])
            async with asyncio.timeout(LIMIT_S / 2):
                return [*found, *await asyncio.gather(*refused, return_exceptions=True)]

        monkeypatch.setattr(Nearest, "place", held_up)
        try:
            outcomes = live.running.client.runner.run(write())
        finally:
            go_on.set()
        assert {type(outcome) for outcome in outcomes} == {NotWritable}
        assert "do not end" in str(outcomes[-1])
        until(lambda: "begun" in live.found("item-1"), "what was begun is done")
        until(lambda: _is_written(live), "writes are taken again")
        assert live.get("newer").sequence == 2


def _is_written(live: Any) -> bool:
    try:
        return bool(live.put("newer", like=("item-1",)))
    except NotWritable:
        return False


def test_a_journal_that_does_not_answer_holds_up_no_get_for_ever(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_S", 0.2, raising=False)
    answers = threading.Event()
    latest, asked = Journal.latest, []

    def held_up(self: Journal, item: str) -> Any:
        asked.append(item)
        answers.wait(LIMIT_S)
        return latest(self, item)

    with live_service(models, monkeypatch) as live:
        live.put("new", like=("item-1",))
        monkeypatch.setattr(Journal, "latest", held_up)
        for _ in range(3):
            with pytest.raises(NotWritable, match="could not be read"):
                live.get("new")
        assert asked == ["new"]  # those that nobody waits for any more are not read
        answers.set()
        until(lambda: _is_read(live), "it is read again")


def _is_read(live: Any) -> bool:
    try:
        return bool(live.get("new").sequence == 1)
    except NotWritable:
        return False


HOLDER = """
import sys
from pathlib import Path
from espalier.live.journal_file import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def stopped_holder(journal: Path) -> Iterator[None]:
    """A process that was stopped while it held the journal's lock."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, journal], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"locked\n"
            os.kill(holder.pid, signal.SIGSTOP)
            until(lambda: process_state(holder.pid) == "T", "it has stopped")
            yield
        finally:
            holder.kill()


def asked(running: Service, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> tuple[int, Any, Any]:
    """Status, headers and body of a request that is not waited for longer than LIMIT_S."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=LIMIT_S)
    try:
        connection.request(method, path, body, {"Content-Type": kind, "Authorization": f"Bearer {KEY}"})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


@pytest.mark.slow
def test_beside_a_process_that_was_stopped_with_the_lock_writes_are_refused_and_reads_go_on(tmp_path: Path) -> None:
    rng, folder = np.random.default_rng(0), tmp_path / "models"
    make_bundle(folder, rng, complete_tree(rng.permutation(ITEMS), 2), name="books", kind="product", **LIMITS)
    evidence = json.dumps({"events": [["item-1"]]}).encode()
    with service(folder, 2, ESPALIER_WRITE_KEYS=KEY) as running:
        assert asked(running, "PUT", "/models/books/items/new", evidence)[0] == 201
        with stopped_holder(folder / "books" / "live.db"):
            lines = [{"id": f"new-{i % 10}", "events": [["item-1"]], "fields": {"title": f"{i}"}} for i in range(200)]
            body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
            bulks = [
                threading.Thread(target=asked, args=(running, "POST", "/models/books/items", body, "application/x-ndjson"))
                for _ in range(3)
            ]
            for bulk in bulks:
                bulk.start()
            for i in range(4):
                status, headers, document = asked(running, "PUT", f"/models/books/items/more-{i}", evidence)
                assert (status, headers["Retry-After"]) == (503, "1")
                assert b"lock" in document
                assert asked(running, "GET", "/models/books/items/new")[0] == 200
            for bulk in bulks:
                bulk.join()
        status, _, document = asked(running, "PUT", "/models/books/items/after", evidence)
        assert (status, json.loads(document)["sequence"]) == (201, 2)
