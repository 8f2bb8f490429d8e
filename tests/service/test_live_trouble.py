"""Live items while clocks are wrong, journals cannot be written, and versions come and go under the writes."""

from __future__ import annotations

import itertools
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from espalier.errors import JournalBusy, JournalFull
from espalier.live import journal
from espalier.live.journal import Journal, Transaction
from espalier.live.operations import ItemBody, Operation
from service.errors import CatalogueFull, NotFound, NotReady, NotWritable, ShardsMissing
from service.live import compaction, group, journal_thread, live_version
from service.live.catalogue_types import Put
from service.live.live_version import LiveVersion
from service.live.replay import apply_all
from service.models.loading import LoadedModel
from tests.service.live_running import ALL, Live, Nearest, add_version, live_service, models
from tests.service.running import ITEMS, counted
from tests.waiting import until

__all__ = ["models"]


# -- time -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def passed_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is added to the system's clock."""
    right, added = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: right() + added[0])
    return added


def test_an_item_is_gone_when_its_time_has_passed_and_back_when_the_clock_was_wrong(live: Live, passed_s: list[float]) -> None:
    live.put("short", like=("item-1",), valid_until=time.time() + 3600)
    live.put("item-5", valid_until=time.time() + 3600)
    assert {"short", "item-5"} <= {*live.found("item-1")}
    passed_s[0] = 7200
    live.put("other", like=("item-9",))
    until(lambda: not {"short", "item-5"} & {*live.found("item-1")}, "they have expired")
    with pytest.raises(NotFound):
        live.get("short")
    passed_s[0] = 0
    until(lambda: {"short", "item-5", "other"} <= {*live.found("item-1")}, "they are back")
    passed_s[0] = 7200
    assert live.put("short", valid_until=time.time() + 100).outcome == "inserted"  # by its stored evidence
    assert "short" in live.found("item-1")


def test_metrics_count_items_that_expire_while_nobody_writes(live: Live, passed_s: list[float]) -> None:
    live.put("short", like=("item-1",), valid_until=time.time() + 3600)
    live.put("item-5", valid_until=time.time() + 3600)
    names = [f'espalier_live_{name}{{model="books",version="1"}}' for name in ("items", "tombstones")]
    before = [counted(live.running)[name] for name in names]
    passed_s[0] = 7200
    until(lambda: [counted(live.running)[name] for name in names] == [before[0] - 1, before[1] + 1])


def reopened(live: Live, before: LoadedModel) -> Any:
    """The state of the version that was opened anew while it served."""
    until(lambda: live.version() is not before, "it was opened anew")
    return live.version().live.state


def test_a_version_that_has_seen_many_ids_is_opened_anew_while_it_serves(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    live.put("stays", like=("item-1",))
    before = live.version()
    for i in range(12):
        live.put(f"new-{i}", like=("item-1",))
        live.delete(f"new-{i}")
    monkeypatch.setattr(live_version, "REOPENED_AT", 12)
    assert reopened(live, before).table.handles == 1  # deletes of ids that were never trained take none
    assert "stays" in live.found("item-1")
    live.put("last", like=("item-1",))
    assert {"stays", "last"} < {*live.found("item-1")}


def test_items_that_have_expired_take_no_room_in_a_version_that_is_opened_anew(
    live: Live, monkeypatch: pytest.MonkeyPatch, passed_s: list[float]
) -> None:
    before = live.version()
    live.put("stays", like=("item-1",))
    for i in range(11):
        live.put(f"new-{i}", like=("item-1",), valid_until=time.time() + 3600)
    live.put("item-5", valid_until=time.time() + 3600)
    passed_s[0] = 7200
    monkeypatch.setattr(live_version, "REOPENED_AT", 12)
    state = reopened(live, before)
    assert (state.table.handles, state.tombstones) == (2, 1)
    assert not live.version().live.why_reopen
    for i in range(100):  # nor do those that come too late
        live.put(f"late-{i}", like=("item-1",), valid_until=1.0)
    assert state.table.handles == 2
    assert {*live.found("item-1")} == {f"item-{i}" for i in range(ITEMS) if i != 5} | {"stays"}


FAILING = 'espalier_live_journal_failing{model="books"}'


# -- the journal ----------------------------------------------------------------------------------------------------------


def test_a_journal_that_cannot_be_written_refuses_writes_until_it_can_and_retrieval_goes_on(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise JournalFull("books/live.db: no room")

    live.put("new", like=("item-1",))
    with monkeypatch.context() as broken:
        broken.setattr(Transaction, "append", full)
        with pytest.raises(NotWritable, match="no room"):
            live.put("newer", like=("item-1",))
        with pytest.raises(NotWritable, match="no room"):
            live.delete("new")
        assert live.catalogue.status().reason == "books/live.db: no room"
        assert counted(live.running)[FAILING] == 1
        assert {"new", "newer"} & {*live.found("item-1")} == {"new"}
    assert live.put("newer", like=("item-1",)).sequence == 2
    assert live.catalogue.status().reason is None
    assert counted(live.running)[FAILING] == 0
    assert {"new", "newer"} < {*live.found("item-1")}


def test_a_journal_that_is_damaged_leaves_the_version_as_it_was_trained(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch) as live:
        trained = live.found("item-1")
        live.put("new", like=("item-1",))
    (models / "books" / "live.db").write_bytes(b"no database" * 1000)
    for file in (models / "books").glob("live.db-*"):
        file.unlink()
    with live_service(models, monkeypatch) as live:
        with pytest.raises(NotWritable):
            live.put("new", like=("item-1",))
        assert live.found("item-1") == trained
        assert live.catalogue.status().reason


# -- what happens between two looks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("explained", [[], ["first", "item-3"]])
def test_a_request_that_came_before_an_item_may_find_it(live: Live, monkeypatch: pytest.MonkeyPatch, explained: list[str]) -> None:
    """Between its look at the catalogue and its search, items came; the engine has them, the request had not."""
    before, trained = live.version().live.view(), live.found("item-1")
    live.put("first", events=(["item-1"],), fields={"title": "First"})
    live.put("second", events=(["item-2"],))
    with monkeypatch.context() as earlier:
        earlier.setattr(live.version().live, "view", lambda live: before)
        body = {"queries": [{"history": ["item-1"]}], "fields": ["title"], "explain_items": explained, **ALL}
        result = live.running.retrieve(**body)["results"][0]
    assert {item["id"] for item in result["items"]} == {*trained, "first", "second"}
    assert [item["fields"]["title"] for item in result["items"] if item["id"] == "first"] == ["First"]
    assert live.found("item-1", live=False) == trained


def drained(items: object) -> None:
    raise NotReady("The service is shutting down.")


def test_a_version_that_is_being_dropped_refuses_no_write(live: Live, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_version(models, 2, seed=1)
    live.admin("POST", "load", {"version": 2, "default": False})
    monkeypatch.setattr(live.catalogue.thread.versions[1], "candidates", drained)
    with pytest.raises(NotReady):
        live.put("new", like=("item-1",))
    live.admin("POST", "default", {"version": 2})
    assert live.put("new", like=("item-1",)).sequence == 1


def test_defaults_that_are_dropped_and_places_that_are_gone_are_followed_by_what_there_is(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its stored place is gone, as of a version that was loaded before the write was.
    first = live.put("new", like=("item-1",))
    monkeypatch.setattr(Transaction, "placements", lambda *_: {})
    changed = live.put("new", fields={"title": "Another"})
    assert (changed.sequence, changed.outcome, changed.placed) == (2, "updated", first.placed)
    assert live.get("new").body.like == ("item-1",)
    thread, numbers = live.catalogue.thread, itertools.chain([1], itertools.repeat(2))
    monkeypatch.setattr(thread, "served", {2: thread.served[1]})
    monkeypatch.setattr(thread, "default", lambda: next(numbers))
    assert live.get("item-1").body.fields is not None


def test_what_nobody_foresaw_of_one_item_fails_no_other_write(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Nearest.place

    def fail(self: Nearest, items: Sequence[ItemBody], *rest: Any) -> Any:
        if any(body.like == ("item-2",) for body in items):
            raise ZeroDivisionError
        return place(self, items, *rest)

    monkeypatch.setattr(Nearest, "place", fail)
    with pytest.raises(ZeroDivisionError):
        live.bulk(*(Put(f"new-{i}", ItemBody(like=(f"item-{i}",))) for i in (1, 2, 3)))
    assert {f"new-{i}" for i in range(4)} & {*live.found("item-1")} == {"new-1", "new-3"}


def test_a_write_that_a_version_must_wait_for_is_applied_later(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([JournalBusy("a shard does not answer")])

    def apply_late(*arguments: Any) -> None:
        for failure in failures:
            raise failure
        apply_all(*arguments)

    monkeypatch.setattr(journal_thread, "apply_all", apply_late)
    assert live.put("new", like=("item-1",)).outcome == "inserted"
    until(lambda: "new" in live.found("item-1"))
    until(lambda: live.catalogue.status().reason is None)


def shards_missing_in(function: str, versions: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of these versions gets no answer of a shard."""
    original = getattr(LiveVersion, function)

    def of_present(version: LiveVersion, items: Any) -> Any:
        if version.version in versions:
            raise ShardsMissing("no answer of shard 1")
        return original(version, items)

    monkeypatch.setattr(LiveVersion, function, of_present)
    monkeypatch.setattr(journal_thread, "SHARDS_S", 0.1)


def test_while_the_default_version_waits_for_shards_only_deletes_are_taken(
    live: Live, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not know which slots the operations take that it has not applied. A shard that did not answer may do so at the next put."""
    assert live.put("gone", like=("item-1",)).visible
    shards_missing_in("new_placements", missing := {1}, monkeypatch)
    with Journal(models / "books" / "live.db").writing() as transaction:
        transaction.append(Operation(0, "late", "put", ItemBody(like=("item-1",))))
    until(lambda: counted(live.running)['espalier_live_lag{model="books"}'] == 1)
    with pytest.raises(NotReady, match="does not have all live items yet"):
        live.put("new", like=("item-1",))
    deleted = live.delete("gone")
    assert (deleted.outcome, deleted.visible) == ("deleted", False)
    missing.clear()
    until(lambda: "late" in live.found("item-1"))
    assert live.put("new", like=("item-1",)).visible
    found = {*live.found("item-1")}
    assert {"late", "new"} <= found
    assert "gone" not in found


def test_a_version_on_trial_whose_shards_are_missing_holds_up_no_write(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards_missing_in("candidates", missing := set[int](), monkeypatch)
    add_version(models, 2)
    (models / "books" / "serving.json").write_text('{"generation": 1, "versions": [1, 2], "default": 2}')
    with live_service(models, monkeypatch) as live:
        asked = {"queries": [{"history": ["item-1"]}], "version": 1}
        until(lambda: live.running.client.post("/retrieve", json=asked).status_code == 200)
        missing.add(1)
        assert live.put("new", like=("item-1",)).outcome == "inserted"
        assert live.put("newer", like=("item-1",)).outcome == "inserted"
        assert live.delete("new").outcome == "deleted"
        assert "newer" in live.found("item-1")
        assert "newer" not in live.found("item-1", version=1)
        missing.clear()
        until(lambda: "newer" in live.found("item-1", version=1))
        assert "new" not in live.found("item-1", version=1)


# -- a journal that has grown is compacted beside the writes, and nothing that counts is lost -----------------------------


def operations(folder: Path) -> int:
    with closing(sqlite3.connect(f"file:{folder / 'live.db'}?mode=ro", uri=True)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM ops").fetchone()
    return int(count)


def test_a_journal_that_has_grown_loses_what_was_replaced_and_nothing_else(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "LEAST_BYTES", 1 << 18)
    monkeypatch.setattr(journal, "CHECKPOINT_BYTES", 1 << 16)
    with live_service(models, monkeypatch) as live:
        live.put("stays", like=("item-1",), fields={"title": "Stays"})
        live.delete("item-2")
        for number in range(60):
            live.put("new", like=("item-1",), fields={"title": f"{number} " + 8192 * "x"})
        (file,) = models.rglob("live.db")
        until(lambda: operations(file.parent) < 62)
        last = live.put("new", like=("item-1",), fields={"title": "Last"})
        assert last.sequence == 63
        assert {"stays", "new"} <= {*live.found("item-1")}
    with live_service(models, monkeypatch) as live:
        assert {"stays", "new"} <= {*live.found("item-1")}
        assert "item-2" not in live.found("item-1")
        assert live.get("new").body.fields == {"title": "Last"}


def test_a_small_journal_is_left_as_it_is(live: Live, models: Path) -> None:
    for number in range(20):
        live.put("new", like=("item-1",), fields={"title": str(number)})
    (file,) = models.rglob("live.db")
    assert operations(file.parent) == 20


def _put(live: Live, item_id: str, characters: int) -> None:
    live.put(item_id, like=("item-1",), fields={"title": characters * "x"})


def test_the_fields_of_all_live_items_have_a_limit_and_a_delete_gives_room(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "MAX_CHARACTERS", 3 * (100 + len("title")))
    for item_id in ("one", "two", "three"):
        _put(live, item_id, 100)
    with pytest.raises(CatalogueFull, match="fields of live items have 315 characters"):
        _put(live, "four", 1)
    with pytest.raises(CatalogueFull, match="characters"):  # a trained item's changed fields are held too
        _put(live, "item-5", 1)
    live.put("bare", like=("item-1",))
    live.delete("two")
    _put(live, "four", 100)


def test_the_rows_of_all_live_items_have_a_limit_and_a_delete_gives_room(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    width = live.version().bundle.node_rows_ND.shape[1]
    monkeypatch.setattr(group, "MAX_NUMBERS", 2 * width)
    live.put("one", like=("item-1",))
    live.put("two", like=("item-1",))
    with pytest.raises(CatalogueFull, match=f"rows of live items have {2 * width} numbers"):
        live.put("three", like=("item-1",))
    live.put("item-5", fields={"colour": "red"})  # it has the row of training
    live.delete("one")
    live.put("three", like=("item-1",))
