"""Writes keep their order, versions that were behind lack nothing, and a write that is refused leaves nothing behind."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from espalier.errors import EspalierError, InvalidData, JournalError
from espalier.live import journal as journal_module
from espalier.live import state as state_module
from espalier.live.journal import Journal
from espalier.live.journal_file import locked
from espalier.live.operations import ItemBody, Operation
from espalier.live.state import LiveState
from espalier.search import SearchResult
from service.errors import CatalogueFull, NotReady, NotWritable
from service.live import catalogue as module
from service.live import group as group_module
from service.live.catalogue_types import Delete, ItemOutcome, Put
from service.live.compaction import Compaction
from service.live.group import Write
from service.live.journal_thread import TOGETHER, JournalThread
from service.live.live_version import LiveVersion
from service.live.notices import Notices
from tests.espalier.live.journals import put
from tests.service.live_running import Live, Nearest, add_version, live_service, models
from tests.service.running import document, ids
from tests.waiting import until

__all__ = ["models"]

LIMIT_S = 20.0
"""How long a step that is held up waits at most, so that a test fails and does not hang."""


def test_a_version_that_could_not_read_the_journal_has_all_items_once_it_can(
    live: Live, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes later does not hide what it lacks: the write is refused, or the version has the earlier ones first."""
    live.put("one", like=("item-1",))
    live.put("two", like=("item-1",))
    add_version(models, 2, seed=1)
    with monkeypatch.context() as broken:

        def fail(*_: object) -> list[Operation]:
            raise JournalError("books/live.db: disk I/O error")

        broken.setattr(Journal, "current", fail)
        live.admin("POST", "load", {"version": 2, "default": False})
        with suppress(NotWritable):
            live.put("three", like=("item-1",))
        assert "one" in live.found("item-1", version=1)
    live.put("three", like=("item-1",))
    for version in (1, 2):
        assert {"one", "two", "three"} < {*live.found("item-1", version=version)}


def test_of_two_writes_of_an_item_the_later_wins_though_the_first_was_put_back(
    live: Live, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default version is dropped while a group is placed, so that the next one must place it; another write has come meanwhile."""
    placing, came = threading.Event(), threading.Event()
    add_version(models, 2, seed=1)
    live.admin("POST", "load", {"version": 2, "default": False})
    entry = live.running.app.state.service.registry.entries["books"]

    def dropped(items: object) -> None:
        placing.set()
        came.wait(LIMIT_S)
        entry.loaded = entry.ready[2]
        raise NotReady("The service is shutting down.")

    monkeypatch.setattr(live.catalogue.thread.versions[1], "candidates", dropped)

    def put(item: str, price: float) -> Put:
        return Put(item, ItemBody(like=("item-1",), fields={"price": price}))

    async def write() -> None:
        first = asyncio.create_task(live.catalogue.bulk([put("other", 1), put("new", 2)]))
        await asyncio.to_thread(placing.wait, LIMIT_S)
        second = asyncio.create_task(live.catalogue.write(put("new", 3)))
        await asyncio.sleep(0)  # it is handed over in its first step
        came.set()
        outcomes, _ = await asyncio.gather(first, second)
        assert [one.placed and one.placed.version for one in outcomes if isinstance(one, ItemOutcome)] == [2, 2]

    live.running.client.runner.run(write())
    assert live.get("new").body.fields == {"price": 3}
    (found,) = live.running.retrieve(queries=[{"history": ["item-1"]}], filter={"id": ["new"]}, m=2, beam_size=64, fields=["price"])[
        "results"
    ][0]["items"]
    assert found["fields"] == {"price": 3.0}


def test_an_item_is_read_while_others_are_applied(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    applying, read = threading.Event(), threading.Event()
    in_time: list[bool] = []
    apply = LiveState.apply

    def held_up(self: LiveState, *rest: Any) -> None:
        applying.set()
        in_time.append(read.wait(LIMIT_S))
        apply(self, *rest)

    live.put("before", like=("item-1",))
    monkeypatch.setattr(LiveState, "apply", held_up)

    async def write_and_read() -> None:
        writing = asyncio.create_task(live.catalogue.write(Put("new", ItemBody(like=("item-1",)))))
        await asyncio.to_thread(applying.wait, LIMIT_S)
        for item in ("item-1", "before"):
            assert (await live.catalogue.get(item)).placed is not None
        read.set()
        await writing

    live.running.client.runner.run(write_and_read())
    assert in_time == [True]


def test_items_that_come_to_pass_a_filter_before_the_search_are_found_with_a_beam_for_all(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A beam of 8 for two items that pass, and six more pass when the search begins."""
    green = ItemBody(fields={"colour": "green"})
    live.put("item-0", fields=green.fields)
    live.put("item-1", fields=green.fields)
    engine = live.version().engine
    reached, go = threading.Event(), threading.Event()
    search = engine.search

    def held_up(*rest: Any) -> SearchResult:
        reached.set()
        assert go.wait(LIMIT_S)
        return search(*rest)

    monkeypatch.setattr(engine, "search", held_up)
    request = {"model": "books", "queries": [{"history": ["item-1"]}], "m": 8, "beam_size": 8, "filter": {"colour": ["green"]}}

    async def ask_and_write() -> dict[str, Any]:
        asking = asyncio.create_task(live.running.client.http.post("/retrieve", json=request))
        await asyncio.to_thread(reached.wait, LIMIT_S)
        for number in range(2, 8):
            await live.catalogue.write(Put(f"item-{number}", green))
        go.set()
        return document(await asking)

    result = live.running.client.runner.run(ask_and_write())["results"][0]
    assert {*ids(result)} == {f"item-{number}" for number in range(8)}
    assert result["complete"]
    assert result["beam_size"] == 2, "what two items need, when the request came"


def test_other_workers_are_told_of_a_commit_and_not_of_a_write_that_changes_nothing(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(Notices, "committed", lambda _, model: told.append(model))
    for _ in range(2):
        live.put("new", like=("item-1",))
    assert told == ["books"]


def test_where_a_read_item_hangs_is_what_its_write_said(live: Live) -> None:
    trained = live.get("item-3").placed
    assert trained is not None
    assert (trained.by, trained.version) == ("trained", 1)
    assert live.put("new", like=("item-9",)).placed == live.get("new").placed
    moved = live.put("item-3", like=("item-9",)).placed
    assert moved is not None
    assert (moved.by, moved.parent) == ("like", trained.parent)
    assert live.get("item-3").placed == moved
    live.delete("item-3")
    back = live.put("item-3").placed
    assert back is not None
    assert back.parent == trained.parent


def test_a_write_says_where_its_item_hangs_in_the_default_version(live: Live, models: Path) -> None:
    add_version(models, 2, seed=1)
    live.admin("POST", "load", {"version": 2, "default": False})
    for default in (1, 2):
        live.admin("POST", "default", {"version": default})
        said = live.put(f"new-{default}", like=("item-1",)).placed
        places = {number: version.placed(f"new-{default}") for number, version in live.catalogue.thread.versions.items()}
        assert said == places[default]
        assert len({place.parent for place in places.values() if place is not None}) == 2, "each version has a tree of its own"


def test_workers_that_have_seen_different_ids_agree_when_handles_run_out(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch) as first:
        for item in "abcd":
            first.put(item, like=("item-1",))
            first.delete(item)
        with live_service(models, monkeypatch) as second:  # to it the four that are gone are no ids
            for module in (state_module, group_module):
                monkeypatch.setattr(module, "MAX_HANDLES", 4)
            with pytest.raises(CatalogueFull, match="Deletes are taken"):
                first.put("refused", like=("item-1",))
            assert second.put("new", like=("item-1",)).outcome == "inserted"
            assert second.delete("item-3").outcome == "deleted"
            assert first.delete("item-4").outcome == "deleted"
            expected = {"new", *(f"item-{i}" for i in range(32) if i not in (3, 4))}
            until(lambda: {*first.found("item-1")} == {*second.found("item-1")} == expected, "each has what the other one has")


def test_a_write_whose_place_cannot_be_stored_leaves_nothing_behind(live: Live, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live.put("new", like=("item-1",))
    with monkeypatch.context() as small:
        small.setattr(journal_module, "MAX_ROW_BYTES", 1)
        with pytest.raises(InvalidData, match="row"):
            live.put("large", like=("item-1",))
        outcomes = live.bulk(Put("large", ItemBody(like=("item-1",))), Put("item-2", ItemBody(fields={"price": 1})))
        assert [type(outcome) for outcome in outcomes] == [InvalidData, ItemOutcome]
    with Journal(models / "books" / "live.db").writing() as transaction:
        assert transaction.last_sequence() == 2
    assert live.put("last", like=("item-1",)).sequence == 3
    assert {"new", "last"} < {*live.found("item-1")}
    assert "large" not in live.found("item-1")


def test_a_write_that_is_refused_takes_no_room_from_those_after_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch, max_live=1) as live:
        live.put("again", like=("item-1",))
        live.delete("again")
        monkeypatch.setattr(group_module, "MAX_HANDLES", 1)
        refused, taken = live.bulk(Put("new", ItemBody(like=("item-1",))), Put("again", ItemBody(like=("item-1",))))
        assert isinstance(refused, CatalogueFull)
        assert isinstance(taken, ItemOutcome), taken
        assert taken.outcome == "inserted"


class StopsMeanwhile(Sequence[Write]):
    """Writes that are submitted while their thread is being stopped."""

    def __init__(self, thread: JournalThread, write: Write) -> None:
        self._thread, self._write = thread, write

    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: Any) -> Any:
        return [self._write][place]

    def __iter__(self) -> Iterator[Write]:
        self._thread.stop()
        return iter([self._write])


def test_no_write_is_taken_that_comes_behind_the_end(tmp_path: Path) -> None:
    thread = JournalThread("books", Journal(tmp_path / "live.db"), Notices(), 10, lambda: None, lambda _: None)
    write = Write(Put("new", ItemBody(like=("item-1",))))
    try:
        thread.submit(*StopsMeanwhile(thread, write))
    except NotReady:
        return
    assert write.outcome.done()


# -- what other workers have committed ------------------------------------------------------------------------------------


def test_a_worker_that_could_not_write_sees_by_others_commits_that_it_can(tmp_path: Path) -> None:
    others = Journal(tmp_path / "live.db")
    thread = JournalThread("books", Journal(others.file), Notices(), 10, lambda: None, lambda _: None)
    for item in ("one", "two"):
        thread.call(lambda: thread._remark("books/live.db: no room"))
        thread.look()
        thread.call(lambda: None)
        assert thread.reason == "books/live.db: no room"
        with others.writing() as transaction:
            transaction.append(put(item))
        thread.look()
        until(lambda: thread.reason is None)
    assert thread.applied == 2
    thread.stop()
    others.close()


# -- a process that holds the journal's lock and does nothing, or a disk that does not answer, holds up no request for ever


def test_while_another_process_holds_the_lock_all_writes_that_wait_are_refused(live: Live, models: Path) -> None:
    """Each write of an item is a group of its own, and no group waits for the lock in its turn."""
    live.put("new", like=("item-1",))
    lines = [Put(f"new-{i % 2}", ItemBody(like=("item-1",), fields={"price": i})) for i in range(200)]

    async def write() -> Sequence[ItemOutcome | EspalierError]:
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


class HeldUp:
    """From now on a placement waits until it may go on, and then fails where there is an error."""

    def __init__(self, patch: pytest.MonkeyPatch, error: EspalierError | None = None) -> None:
        self.go_on, self._placing = threading.Event(), threading.Event()
        place = Nearest.place

        def held_up(nearest: Nearest, *rest: Any) -> Any:
            self._placing.set()
            self.go_on.wait(3 * LIMIT_S)
            if error is not None:
                raise error
            return place(nearest, *rest)

        patch.setattr(Nearest, "place", held_up)

    async def write(self, live: Live, *others: Coroutine[Any, Any, Any]) -> list[Any]:
        """What becomes of a write that is held up, and of others that come after it, none of which wait for long."""
        with pytest.MonkeyPatch.context() as short:
            for wait in ("WRITE_S", "BULK_S"):
                short.setattr(module, wait, 0.2)
            first = asyncio.create_task(live.catalogue.write(liked("begun")))
            await asyncio.to_thread(self._placing.wait, LIMIT_S)
            return await asyncio.gather(first, *others, return_exceptions=True)


def liked(item: str) -> Put:
    return Put(item, ItemBody(like=("item-1",)))


def test_a_write_that_has_not_begun_in_time_is_not_done(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldUp(monkeypatch)
    monkeypatch.setattr(Compaction, "look", lambda _: time.sleep(0.5))  # what was begun is seen before the thread takes the next
    begun, waits, line = live.running.client.runner.run(
        held.write(live, live.catalogue.write(liked("waits")), live.catalogue.bulk([liked("line")]))
    )
    held.go_on.set()
    assert {type(outcome) for outcome in (begun, waits, line[0])} == {NotWritable}
    assert "not known" in str(begun)
    assert "Nothing was written" in str(waits)
    until(lambda: "begun" in live.found("item-1"), "what was begun is done")
    live.put("begun", fields={"price": 1.0})
    assert not {"waits", "line"} & {*live.found("item-1")}


def test_after_a_write_that_was_refused_late_the_next_one_is_taken(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the journal's thread has refused the first one, and has not taken the second."""
    refused = threading.Event()

    def expire(*_: Any) -> bool:
        refused.set()
        time.sleep(0.5)
        return False

    with live_service(models, monkeypatch) as live, monkeypatch.context() as failing:
        held = HeldUp(failing, InvalidData("like", "item-1", "another item"))

        async def write() -> list[Any]:
            late = await held.write(live, live.catalogue.write(liked("second")))
            monkeypatch.setattr(LiveVersion, "expire", expire)
            held.go_on.set()
            await asyncio.to_thread(refused.wait, LIMIT_S)
            failing.undo()
            return [*late, await live.catalogue.write(liked("third"))]

        first, second, third = live.running.client.runner.run(write())
        assert isinstance(first, NotWritable)
        assert isinstance(second, NotWritable)
        assert third.sequence == 1


def test_behind_a_write_that_does_not_end_no_others_gather(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clients have long been answered, so nothing else would bound them."""
    held = HeldUp(monkeypatch)

    async def write() -> list[Any]:
        found = await held.write(live, live.catalogue.write(liked("waits")))
        async with asyncio.timeout(LIMIT_S / 2):
            later = live.catalogue.write(liked("later")), live.catalogue.bulk([Delete("item-1")])
            return [*found, *await asyncio.gather(*later, return_exceptions=True)]

    try:
        outcomes = live.running.client.runner.run(write())
    finally:
        held.go_on.set()
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


def test_a_journal_that_does_not_answer_holds_up_no_get_for_ever(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_S", 0.2, raising=False)
    answers = threading.Event()
    latest, asked = Journal.latest, []

    def held_up(self: Journal, item: str) -> Any:
        asked.append(item)
        answers.wait(LIMIT_S)
        return latest(self, item)

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


# -- which writes are committed together, and when more of them are waited for --------------------------------------------


class Committed:
    """A thread that is driven turn by turn; its commits take a while, and are noted."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.thread = JournalThread("books", Journal(folder / "live.db"), Notices(), 10, lambda: None, lambda lag: None)
        self.patch = patch
        self.groups: list[str] = []
        self.meanwhile: list[Write] = []
        patch.setattr(self.thread, "_commit", self._commit)

    def put(self, ids: str) -> None:
        for item_id in ids:
            self.thread._queue.put(Write(Put(item_id, ItemBody(like=("x",)))))

    def turns(self, count: int) -> None:
        for _ in range(count):
            assert self.thread._turn()

    def _commit(self, group: Sequence[Write]) -> None:
        self.groups.append("".join(write.request.id for write in group))
        time.sleep(0.002)
        for write in self.meanwhile:
            self.thread._queue.put(write)
        self.meanwhile.clear()


@pytest.fixture
def committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Committed:
    return Committed(tmp_path, monkeypatch)


def test_writes_that_come_while_one_is_committed_wait_for_more(committed: Committed) -> None:
    committed.put("a")
    committed.meanwhile.append(Write(Put("b", ItemBody(like=("x",)))))
    committed.turns(1)
    assert committed.thread._begin_at > -math.inf
    committed.put("c")
    looked: list[bool] = []
    committed.patch.setattr(committed.thread, "_catch_up", lambda: looked.append(True))
    committed.thread._queue.put(committed.thread._catch_up)  # others wait for that
    committed.turns(2)
    assert (committed.groups, looked) == (["a", "bc"], [True])


def test_one_write_after_the_other_waits_for_nothing(committed: Committed) -> None:
    for item_id in "abc":
        committed.put(item_id)
        committed.turns(1)
        assert committed.thread._begin_at == -math.inf
    assert committed.groups == ["a", "b", "c"]


def test_writes_that_cannot_go_together_do_not_wait_for_more(committed: Committed) -> None:
    committed.put("aaab")
    committed.turns(3)
    assert committed.groups == ["a", "a", "ab"]
    assert committed.thread._begin_at == -math.inf


def test_a_larger_group_and_enough_that_wait_begin_at_once(committed: Committed) -> None:
    many = "abcdefgh"[:TOGETHER]
    committed.put(many)
    committed.meanwhile.append(Write(Put("x", ItemBody(like=("x",)))))
    committed.turns(2)
    assert committed.groups == [many, "x"]
    committed.put("a")
    committed.meanwhile += [Write(Put(item_id, ItemBody(like=("x",)))) for item_id in many]
    committed.turns(1)
    committed.thread._begin_at = time.monotonic() + 600
    committed.turns(2)
    assert committed.groups[2:] == ["a", many]


def test_the_end_ends_a_pause(committed: Committed) -> None:
    committed.put("a")
    committed.meanwhile.append(Write(Put("b", ItemBody(like=("x",)))))
    committed.turns(1)
    committed.thread._begin_at = time.monotonic() + 600
    committed.thread._queue.put(None)
    committed.turns(2)
    assert committed.groups == ["a", "b"]
    assert not committed.thread._turn()
