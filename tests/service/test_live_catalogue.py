"""Items that are put are found by the next request, changed ones as they are now, deleted ones no more; also after a restart."""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.errors import EspalierError, InvalidInput, JournalFull
from espalier.live import journal
from espalier.live.journal import Transaction
from espalier.live.operations import ItemBody
from espalier.queries import HistoryKind, encode_histories
from espalier.search import SearchParams
from service.batching.parts import Answer
from service.entity_tags import Condition
from service.errors import CatalogueFull, Conflict, ItemNotFound, NotReady, NotWritable, PreconditionFailed
from service.live import live_version
from service.live.catalogue_types import Delete, Outcome, Put, tag_of
from tests.service.live_running import ALL, ITEMS, ByTitle, Live, Nearest, add_version, live_service, models
from tests.service.running import run
from tests.waiting import until

__all__ = ["models"]


def test_an_item_that_was_put_is_found_by_the_next_request(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch) as live:
        before = live.found("item-1")
        assert "sequence" not in live.running.retrieve(queries=[{"history": ["item-1"]}])
        outcome = live.put("new", like=("item-1",), fields={"title": "A new one", "colour": "green"})
        assert (outcome.sequence, outcome.outcome, outcome.visible, outcome.unknown) == (1, "inserted", True, ())
        assert sorted(live.found("item-1")) == sorted([*before, "new"])
        answer = live.running.retrieve(queries=[{"history": ["item-1", "new"]}], **{"m": 40, "beam_size": 64, "fields": ["title", "price"]})
        assert answer["sequence"] == 1
        assert answer["results"][0]["unknown"] == []
        (found,) = [item for item in answer["results"][0]["items"] if item["id"] == "new"]
        assert found["fields"] == {"title": "A new one", "price": None}


def test_queries_of_a_request_that_share_engine_calls_with_others_are_all_answered(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a request are searched alone or together with those of others; either way they bring no more than was asked for."""
    with live_service(models, monkeypatch, max_batch=2) as live:
        live.put("new", like=("item-1",))
        loaded = live.version()
        kind = loaded.bundle.manifest.query
        assert isinstance(kind, HistoryKind)
        queries, _ = encode_histories(kind, loaded.items, [[f"item-{i}"] for i in range(3)])
        params = SearchParams.uniform(3, 8, 20)

        async def at_once() -> list[Answer]:
            return await asyncio.gather(*(loaded.batcher.search(queries, params) for _ in range(5)))

        alone = [loaded.engine.search(queries.take(np.array([b])), params.take(np.array([b]))).item_rows_BM[0].tolist() for b in range(3)]
        for answer in live.running.client.runner.run(at_once()):
            assert answer.result.item_rows_BM.tolist() == alone
            assert answer.result.frontiers == ()


def test_what_was_put_and_deleted_is_there_after_a_restart(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch) as live:
        live.put("new", like=("item-1",))
        live.put("gone", like=("item-2",))
        live.delete("gone")
        live.delete("item-3")
        found = live.found("item-1")
        assert "new" in found
        assert not {"gone", "item-3"} & {*found}
    with live_service(models, monkeypatch) as live:
        assert live.found("item-1") == found
        assert live.put("newer", like=("item-1",)).sequence == 5


def test_an_item_comes_back_after_a_delete(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch) as live:
        live.put("new", like=("item-1",))
        assert live.delete("new").outcome == "deleted"
        assert live.delete("new").outcome == "unchanged"
        assert "new" not in live.found("item-1")
        with pytest.raises(InvalidInput, match="events"):
            live.put("new", fields={"title": "No evidence"})
        assert live.put("new", like=("item-2",)).outcome == "inserted"
        assert "new" in live.found("item-1")
        live.delete("item-5")
        assert "item-5" not in live.found("item-1")
        assert live.put("item-5").outcome == "inserted"  # training knows where it belongs
        assert "item-5" in live.found("item-1")
        with pytest.raises(ItemNotFound):
            live.delete("nobody-knows")


def test_a_put_changes_what_it_names_and_keeps_the_rest(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch) as live:
        placed = live.put("new", like=("item-1",), fields={"title": "One"}).placed
        changed = live.put("new", fields={"title": "Two"})
        assert (changed.outcome, changed.placed) == ("updated", placed)
        assert live.put("other", like=("nobody", "item-1"), events=(("new", "none"),)).unknown == ("nobody", "none")
        assert live.put("new", fields={"title": "Two"}).outcome == "unchanged"
        assert live.put("new", fields={"title": "Two"}).sequence == changed.sequence
        stored = live.get("new")
        assert (stored.body.fields, stored.body.like, stored.live) == ({"title": "Two"}, ("item-1",), True)
        moved = live.put("new", like=("item-9",))
        assert moved.placed is not None
        assert placed is not None
        assert moved.placed.parent != placed.parent
        assert live.get("item-4").body.fields == {"title": "Title 4", "colour": "red", "price": 4.0}
        live.put("item-4", fields={"title": "Another"})
        assert live.get("item-4").body.fields == {"title": "Another"}
        answer = live.running.retrieve(queries=[{"history": ["item-1"]}], m=40, beam_size=64, fields=["title", "colour"])
        fields = {item["id"]: item["fields"] for item in answer["results"][0]["items"]}
        assert fields["new"] == {"title": "Two", "colour": None}
        assert fields["item-4"] == {"title": "Another", "colour": None}
    with live_service(models, monkeypatch) as live:
        assert live.get("new").placed == moved.placed
        again = live.running.retrieve(queries=[{"history": ["item-1"]}], m=40, beam_size=64, fields=["title", "colour"])
        assert again["results"] == answer["results"]


def test_an_item_that_its_fields_have_placed_is_placed_anew_when_they_change(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_version.LiveVersion, "takes_fields", True)
    with live_service(models, monkeypatch, ByTitle) as live:

        def parent(item_id: str, by: str, **body: Any) -> int:
            placed = live.put(item_id, **body).placed
            assert placed is not None
            assert placed.by == by
            return placed.parent

        first = parent("new", "fields", fields={"title": "item-1"})
        second = parent("new", "fields", fields={"title": "item-9"})
        assert first != second == parent("other", "like", like=("item-9",))
        assert parent("new", "fields", valid_until=4e9) == second
        moved = parent("new", "like", like=("item-5",))
        assert parent("new", "like", fields={"title": "item-1"}) == moved  # other evidence counts for more
    with live_service(models, monkeypatch, ByTitle) as live:
        placed = live.get("new").placed
        assert placed is not None
        assert placed.parent == moved


def test_an_item_that_comes_back_goes_where_its_stored_evidence_says_and_not_its_new_fields(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_version.LiveVersion, "takes_fields", True)
    with live_service(models, monkeypatch, ByTitle) as live:
        by_like = live.put("other", like=("item-5",)).placed
        assert by_like is not None
        live.put("back", like=("item-5",), valid_until=time.time() - 1)
        back = live.put("back", fields={"title": "item-1"})
        assert back.outcome == "inserted"
        assert live.get("back").body.like == ("item-5",)
        assert back.placed is not None
        assert (back.placed.parent, back.placed.by) == (by_like.parent, "like")


def test_conditions_and_source_versions_are_looked_at_before_anything_changes(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch) as live:
        only_new = Condition(if_none_match="*")
        first = live.put("new", only_new, source_version=7, like=("item-1",))
        with pytest.raises(PreconditionFailed):
            live.put("new", only_new, like=("item-1",))
        with pytest.raises(PreconditionFailed):
            live.put("item-1", only_new, fields={})  # it was trained
        with pytest.raises(PreconditionFailed):
            live.delete("new", Condition(if_match=tag_of(99)))
        assert live.put("new", source_version=6, fields={"title": "Old"}) == Outcome(first.sequence, "stale", True, first.placed)
        second = live.put("new", Condition(if_match=tag_of(first.sequence)), source_version=7, fields={"title": "New"})
        assert (second.outcome, second.sequence) == ("updated", 2)
        assert live.put("item-1", Condition(if_match=tag_of(0)), fields={"title": "x"}).outcome == "updated"


def test_filters_go_by_the_fields_that_items_have_now(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    red = {"filter": {"colour": ["red"]}}
    with live_service(models, monkeypatch) as live:
        trained = live.found("item-1", **red)
        live.put("new", like=("item-1",), fields={"colour": "red", "price": 7.5})
        assert sorted(live.found("item-1", **red)) == sorted([*trained, "new"])
        assert live.found("item-1", filter={"price": {"min": 7.2, "max": 7.9}}) == ["new"]
        live.put("item-1", fields={"colour": "red"})  # it was blue
        assert sorted(live.found("item-1", **red)) == sorted([*trained, "new", "item-1"])
        live.put("new", fields={"colour": "blue"})
        live.put("item-2", fields={})
        assert sorted(live.found("item-1", **red)) == sorted({*trained, "item-1"} - {"item-2"})
        assert "new" in live.found("item-1", exclude_filter={"colour": ["red"]})
        live.delete("item-4")
        assert "item-4" not in live.found("item-1", **red)


def test_exclusions_and_standing_removals_hold_for_live_items(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch, admin_keys="an-admin-key-of-a-test") as live:
        live.put("new", like=("item-1",), fields={"colour": "red"})
        excluded = live.running.retrieve(queries=[{"history": ["new"], "exclude_seen": True}], m=40, beam_size=64)["results"][0]
        assert "new" not in [item["id"] for item in excluded["items"]]
        assert len(excluded["items"]) == 32
        assert excluded["complete"]
        headers = {"Authorization": "Bearer an-admin-key-of-a-test"}
        assert live.running.client.request("PUT", "/models/books/removed/new", headers=headers).json()["known"]
        assert "new" not in live.found("item-1")
        assert "new" not in live.found("item-1", filter={"colour": ["red"]})
        live.running.client.request("DELETE", "/models/books/removed/new", headers=headers)
        assert "new" in live.found("item-1", filter={"colour": ["red"]})


def test_a_request_without_live_items_is_that_of_the_bundle(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch) as live:
        before = live.found("item-1")
        live.put("new", like=("item-1",))
        live.delete("item-3")
        assert live.found("item-1", live=False) == before
        answer = live.running.retrieve(queries=[{"history": ["new"]}], live=False)
        assert "sequence" not in answer
        assert answer["results"][0]["unknown"] == ["new"]


def test_every_line_of_a_bulk_has_its_outcome_in_order(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch, max_live=3) as live:
        found = live.bulk(
            Put("a", ItemBody(like=("item-1",))),
            Put("b", ItemBody(like=("nobody-knows",))),
            Delete("nobody-knows"),
            Put("c", ItemBody(like=("item-2",), fields={"nothing": 1})),
            Put("a", ItemBody(fields={"colour": "red"})),
            Put("d", ItemBody(like=("item-2",))),
            Delete("a"),
            Put("e", ItemBody(like=("item-3",))),
            Put("f", ItemBody(like=("item-3",))),
            Put("g", ItemBody(like=("item-3",))),
            Delete("item-9"),
        )
        kinds = [type(one) if isinstance(one, EspalierError) else one.outcome for one in found]
        assert kinds == [
            "inserted", InvalidInput, ItemNotFound, InvalidInput, "updated", "inserted",
            "deleted", "inserted", "inserted", CatalogueFull, "deleted",
        ]  # fmt: skip
        sequences = [one.sequence for one in found if isinstance(one, Outcome)]
        assert sequences == [1, 2, 3, 4, 5, 6, 7]
        assert {"d", "e", "f"} < {*live.found("item-1")}


def test_a_version_that_comes_later_has_what_was_put_before(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = {"Authorization": "Bearer an-admin-key-of-a-test"}
    with live_service(models, monkeypatch, admin_keys="an-admin-key-of-a-test") as live:
        live.put("new", like=("item-1",), fields={"colour": "red"})
        live.delete("item-3")
        add_version(models, 2, seed=1)
        answer = live.running.client.post("/models/books/load", json={"version": 2, "default": False}, headers=key)
        assert answer.status_code == 200, answer.text
        assert "new" in live.found("item-1", version=2)
        live.put("newer", like=("new", "item-1"))
        for version in (1, 2):
            found = {*live.found("item-1", version=version)}
            assert {"new", "newer"} < found
            assert "item-3" not in found
        live.running.client.post("/models/books/default", json={"version": 2}, headers=key)
        live.running.client.post("/models/books/unload", json={"version": 1}, headers=key)
        live.put("newest", like=("item-1",))
        expected = live.found("item-1")
        assert {"new", "newer", "newest"} < {*expected}
    with live_service(models, monkeypatch) as live:
        assert live.found("item-1") == expected


def test_an_item_is_gone_when_its_time_has_passed(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch) as live:
        live.put("short", like=("item-1",), valid_until=time.time() + 0.3)
        assert "short" in live.found("item-1")
        until(lambda: "short" not in live.found("item-1"), "it has expired")
        with pytest.raises(ItemNotFound):
            live.get("short")
        assert live.put("short", valid_until=time.time() + 100).outcome == "inserted"  # by its stored evidence
        assert "short" in live.found("item-1")


def test_items_that_a_wrong_clock_took_out_come_back_when_it_is_right(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch) as live:
        right = time.time
        live.put("offer", like=("item-1",), valid_until=right() + 3600)
        live.put("item-5", valid_until=right() + 3600)
        with monkeypatch.context() as wrong:
            wrong.setattr(time, "time", lambda: right() + 7200)
            live.put("other", like=("item-9",))
            until(lambda: not {"offer", "item-5"} & {*live.found("item-1")})
        until(lambda: {"offer", "item-5", "other"} <= {*live.found("item-1")}, "they are back")
        live.put("last", like=("item-1",))
        assert {"offer", "item-5", "other", "last"} <= {*live.found("item-1")}


def test_a_version_that_has_seen_many_ids_is_opened_anew_while_it_serves(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_version, "REOPENED_AT", 12)
    with live_service(models, monkeypatch) as live:
        live.put("stays", like=("item-1",))
        before = live.version()
        for i in range(12):
            live.put(f"new-{i}", like=("item-1",))
            live.delete(f"new-{i}")
        until(lambda: live.version() is not before, "it was opened anew")
        state = live.version().live.state
        assert state is not None
        assert state.table.handles == 1  # deletes of ids that were never trained take none
        assert "stays" in live.found("item-1")
        live.put("last", like=("item-1",))
        assert {"stays", "last"} < {*live.found("item-1")}


def test_items_that_have_expired_take_no_room_in_a_version_that_is_opened_anew(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_version, "REOPENED_AT", 12)
    with live_service(models, monkeypatch) as live:
        before = live.version()
        live.put("stays", like=("item-1",))
        right, soon = time.time, time.time() + 3600
        for i in range(11):
            live.put(f"new-{i}", like=("item-1",), valid_until=soon)
        live.put("item-5", valid_until=soon)
        monkeypatch.setattr(time, "time", lambda: right() + 7200)
        until(lambda: live.version() is not before, "it was opened anew")
        state = live.version().live.state
        assert state is not None
        assert (state.table.handles, state.tombstones) == (2, 1)
        assert not live.version().live.why_reopen
        for i in range(100):  # nor do those that come too late
            live.put(f"late-{i}", like=("item-1",), valid_until=1.0)
        assert state.table.handles == 2
        assert {*live.found("item-1")} == {f"item-{i}" for i in range(ITEMS) if i != 5} | {"stays"}


def test_a_journal_that_cannot_be_written_refuses_writes_until_it_can_and_retrieval_goes_on(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live_service(models, monkeypatch) as live:
        live.put("new", like=("item-1",))
        with monkeypatch.context() as broken:

            def full(*_: object) -> None:
                raise JournalFull("books/live.db: no room")

            broken.setattr(Transaction, "append", full)
            with pytest.raises(NotWritable, match="no room"):
                live.put("newer", like=("item-1",))
            with pytest.raises(NotWritable, match="no room"):
                live.delete("new")
            assert live.catalogue.status().reason == "books/live.db: no room"
            found = live.found("item-1")
            assert "new" in found
            assert "newer" not in found
        assert live.put("newer", like=("item-1",)).sequence == 2
        assert live.catalogue.status().reason is None
        assert {"new", "newer"} < {*live.found("item-1")}


def test_writes_are_refused_while_a_reader_pins_a_log_that_has_reached_its_bound(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "CHECKPOINT_BYTES", 1 << 16)
    monkeypatch.setattr(journal, "MAX_LOG_BYTES", 1 << 18, raising=False)
    with live_service(models, monkeypatch) as live:
        live.put("new", like=("item-1",))
        (file,) = models.rglob("live.db")
        with closing(sqlite3.connect(file, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM ops").fetchall()
            with pytest.raises(NotWritable, match=r"write-ahead log has .* Retrieval goes on"):
                _change(live, "new", 200)
            assert "write-ahead log" in str(live.catalogue.status().reason)
            assert "new" in live.found("item-1")
        live.put("newer", like=("item-1",))
        assert live.catalogue.status().reason is None
        assert {"new", "newer"} <= {*live.found("item-1")}


def _change(live: Live, item_id: str, times: int) -> None:
    for number in range(times):
        live.put(item_id, fields={"title": str(number)})


def test_a_journal_that_is_damaged_leaves_the_version_as_it_was_trained(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch) as live:
        trained = live.found("item-1")
        live.put("new", like=("item-1",))
    (models / "books" / "live.db").write_bytes(b"no database" * 1000)
    for file in (models / "books").glob("live.db-*"):
        file.unlink()
    with live_service(models, monkeypatch) as live:
        assert live.found("item-1") == trained
        with pytest.raises(NotWritable):
            live.put("new", like=("item-1",))
        assert live.found("item-1") == trained
        assert live.catalogue.status().reason


def test_an_engine_without_live_items_takes_no_writes_and_says_so(models: Path) -> None:
    with run(models) as running:
        live = Live(running)
        with pytest.raises(Conflict, match="takes no live items"):
            live.put("new", like=("item-1",))
        with pytest.raises(ItemNotFound):
            live.get("new")
        assert live.get("item-4").body.fields is not None
        assert "takes no live items" in str(live.catalogue.status().reason)


def test_a_version_that_holds_operations_replays_later_ones_alone(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch) as live:
        live.put("held", like=("item-1",))
        live.delete("item-5")
        live.put("later", like=("item-1",))
    _holds(models, 2)
    with live_service(models, monkeypatch) as live:
        found = live.found("item-1")
        assert {"later", "item-5"} < {*found}
        assert "held" not in found


def test_sequences_go_on_above_those_that_a_version_holds_where_its_journal_is_gone(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _holds(models, 500)
    with live_service(models, monkeypatch) as live:
        assert live.found("item-1") == live.found("item-1", live=False)
        assert live.put("new", like=("item-1",)).sequence == 501
        assert live.put("newer", like=("item-1",)).sequence == 502
        assert {"new", "newer"} < {*live.found("item-1")}
    with live_service(models, monkeypatch) as live:
        assert {"new", "newer"} < {*live.found("item-1")}


def _holds(models: Path, sequence: int) -> None:
    """Version 1 says that it holds operations up to this one."""
    file = models / "books" / "1" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"live": {"through": sequence}}))


@pytest.mark.parametrize("explained", [[], ["first", "item-3"]])
def test_a_request_that_came_before_an_item_may_find_it(models: Path, monkeypatch: pytest.MonkeyPatch, explained: list[str]) -> None:
    """Between its look at the catalogue and its search, items came; the engine has them, the request had not."""
    with live_service(models, monkeypatch) as live:
        before = live.version().live.view()
        body = {"queries": [{"history": ["item-1"]}], "fields": ["title"], "explain_items": explained, **ALL}
        trained = live.found("item-1")
        live.put("first", events=(["item-1"],), fields={"title": "First"})
        live.put("second", events=(["item-2"],))
        monkeypatch.setattr(live.version().live, "view", lambda live: before)
        result = live.running.retrieve(**body)["results"][0]
        assert {item["id"] for item in result["items"]} == {*trained, "first", "second"}
        assert [item["fields"]["title"] for item in result["items"] if item["id"] == "first"] == ["First"]
        monkeypatch.undo()
        assert live.found("item-1", live=False) == trained


def test_a_version_that_is_being_dropped_refuses_no_write(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = {"Authorization": "Bearer an-admin-key-of-a-test"}
    with live_service(models, monkeypatch, admin_keys="an-admin-key-of-a-test") as live:
        add_version(models, 2, seed=1)
        live.running.client.post("/models/books/load", json={"version": 2, "default": False}, headers=key)
        monkeypatch.setattr(live.catalogue.thread.versions[1], "where", _drained)
        with pytest.raises(NotReady):
            live.put("new", like=("item-1",))
        live.running.client.post("/models/books/default", json={"version": 2}, headers=key)
        assert live.put("new", like=("item-1",)).sequence == 1


def test_a_write_that_a_dropped_default_could_not_place_is_placed_by_the_next(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = {"Authorization": "Bearer an-admin-key-of-a-test"}
    with live_service(models, monkeypatch, admin_keys="an-admin-key-of-a-test") as live:
        add_version(models, 2, seed=1)
        live.running.client.post("/models/books/load", json={"version": 2, "default": False}, headers=key)
        entry = live.running.app.state.service.registry.entries["books"]

        def dropped(items: object) -> None:
            entry.loaded = entry.ready[2]
            _drained(items)

        monkeypatch.setattr(live.catalogue.thread.versions[1], "where", dropped)
        outcomes = live.bulk(*(Put(f"new-{i}", ItemBody(like=("item-1",))) for i in range(3)))
        placed = [outcome.placed for outcome in outcomes if isinstance(outcome, Outcome)]
        assert [found and found.version for found in placed] == [2, 2, 2]


def test_a_default_that_is_dropped_between_two_looks_is_followed_by_the_next(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch) as live:
        thread = live.catalogue.thread
        numbers = itertools.chain([1], itertools.repeat(2))
        monkeypatch.setattr(thread, "served", {2: thread.served[1]})
        monkeypatch.setattr(thread, "default", lambda: next(numbers))
        assert live.get("item-1").body.fields is not None


def test_what_nobody_foresaw_of_one_item_fails_no_other_write(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch) as live:
        place = Nearest.place

        def fail(self: Nearest, items: Sequence[ItemBody], *rest: Any) -> Any:
            if any(body.like == ("item-2",) for body in items):
                raise ZeroDivisionError
            return place(self, items, *rest)

        monkeypatch.setattr(Nearest, "place", fail)
        with pytest.raises(ZeroDivisionError):
            live.bulk(*(Put(f"new-{i}", ItemBody(like=(f"item-{i}",))) for i in (1, 2, 3)))
        assert {"new-1", "new-3"} < {*live.found("item-1")}
        assert "new-2" not in live.found("item-1")


def test_a_write_whose_item_was_moved_meanwhile_is_placed_by_what_is_stored(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stored place is gone, as of a version that was loaded before the write was."""
    with live_service(models, monkeypatch) as live:
        first = live.put("new", like=("item-1",))
        monkeypatch.setattr(Transaction, "placements", lambda *_: {})
        changed = live.put("new", fields={"title": "Another"})
        assert (changed.sequence, changed.outcome, changed.placed) == (2, "updated", first.placed)
        assert live.get("new").body.like == ("item-1",)


def _drained(items: object) -> None:
    raise NotReady("The service is shutting down.")
