"""A process that holds the journal's lock and does nothing, or a disk that does not answer, holds up no request for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from espalier.errors import EspalierError, InvalidData
from espalier.live.journal import Journal
from espalier.live.journal_file import locked
from espalier.live.operations import ItemBody
from service.errors import NotWritable
from service.live import catalogue as module
from service.live.catalogue_types import Delete, Outcome, Put
from service.live.compaction import Compaction
from service.live.live_version import LiveVersion
from tests.service.live_running import Nearest, live_service, models
from tests.waiting import until

__all__ = ["models"]

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
        monkeypatch.setattr(Compaction, "look", lambda _: time.sleep(0.5))  # what was begun is seen before the thread takes the next

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
        monkeypatch.setattr(module, "WRITE_S", LIMIT_S)
        live.put("begun", fields={"price": 1.0})
        assert not {"waits", "line"} & {*live.found("item-1")}


def test_after_a_write_that_was_refused_late_the_next_one_is_taken(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the journal's thread has refused the first one, and has not taken the second."""
    monkeypatch.setattr(module, "WRITE_S", 0.2)
    placing, go_on, refused = threading.Event(), threading.Event(), threading.Event()
    place = Nearest.place

    def fails(*_: Any) -> Any:
        placing.set()
        go_on.wait(LIMIT_S)
        raise InvalidData("like", "item-1", "another item")

    def expire(*_: Any) -> None:
        refused.set()
        time.sleep(0.5)

    with live_service(models, monkeypatch) as live:
        monkeypatch.setattr(Nearest, "place", fails)

        async def write() -> list[Any]:
            first = asyncio.create_task(live.catalogue.put(Put("first", ItemBody(like=("item-1",)))))
            await asyncio.to_thread(placing.wait, LIMIT_S)
            second = live.catalogue.put(Put("second", ItemBody(like=("item-1",))))
            late = await asyncio.gather(first, second, return_exceptions=True)
            monkeypatch.setattr(LiveVersion, "expire", expire)
            go_on.set()
            await asyncio.to_thread(refused.wait, LIMIT_S)
            monkeypatch.setattr(Nearest, "place", place)
            monkeypatch.setattr(module, "WRITE_S", LIMIT_S)
            return [*late, await live.catalogue.put(Put("third", ItemBody(like=("item-1",))))]

        first, second, third = live.running.client.runner.run(write())
        assert isinstance(first, NotWritable)
        assert isinstance(second, NotWritable)
        assert third.sequence == 1


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
