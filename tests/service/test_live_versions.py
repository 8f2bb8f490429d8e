"""A version follows a journal: by stored places, and by its own where there are none; a request sees what its engine has."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from benchmarks.random_live import random_state
from espalier.bundle import Bundle
from espalier.errors import InvalidInput, InvalidQuery, JournalReadOnly, NoRoom
from espalier.live.filtered import LiveFilters
from espalier.live.fold import write_fold
from espalier.live.folded_tables import FoldedRows
from espalier.live.journal import Journal
from espalier.live.journal_upkeep import leave_out
from espalier.live.operations import ItemBody, Operation
from espalier.live.rows import LiveRow
from espalier.live.state import Change, LiveState
from espalier.masks.filters import ItemFilters
from espalier.placement.parents import Parents
from espalier.placement.slots import Slots
from service.errors import NotReady
from service.live import live_version
from service.live.live_version import LiveVersion
from service.live.replay import replay
from service.live.views import View
from tests.espalier.second_stages import with_tail
from tests.service.live_running import Nearest, add_version, live_service, models, open_reference

__all__ = ["models"]


def opened(models: Path) -> LiveVersion:
    bundle = Bundle.open(models / "books" / "1")
    return LiveVersion(bundle, open_reference(bundle), ItemFilters([bundle.tree], bundle.items, 1 << 20))


@pytest.fixture(autouse=True)
def nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_version, "Placer", Nearest)


@pytest.fixture
def version(models: Path) -> LiveVersion:
    return opened(models)


@pytest.fixture
def journal(models: Path) -> Journal:
    return Journal(models / "books" / "live.db")


def written(journal: Journal, *operations: tuple[str, ItemBody | None]) -> list[Operation]:
    """Operations as another host's are copied: without places. No body: a delete."""
    with journal.writing() as transaction:
        return [
            transaction.append(Operation(0, item, "delete") if body is None else Operation(0, item, "put", body))
            for item, body in operations
        ]


def parent_of(version: LiveVersion, item_id: str) -> int | None:
    placed = version.placed(item_id)
    return None if placed is None else placed.parent


def test_operations_without_places_are_placed_and_the_places_are_stored_for_others(
    models: Path, version: LiveVersion, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(journal, ("new", ItemBody(like=("item-1",))), ("newer", ItemBody(like=("item-1",))), ("item-3", ItemBody(fields={"price": 1})))
    replay(version, journal)
    assert parent_of(version, "new") == parent_of(version, "newer") == parent_of(version, "item-1")
    stored = journal.placements(version.fingerprint, [1, 2, 3])
    assert sorted(stored) == [1, 2]
    assert stored[1][0].slot != stored[2][0].slot
    other = opened(models)
    monkeypatch.setattr(Nearest, "place", lambda *_: pytest.fail("the places are stored"))
    replay(other, journal)
    assert other.placed("new") == version.placed("new")


def test_places_in_a_former_version_of_the_same_number_do_not_count(models: Path, version: LiveVersion, journal: Journal) -> None:
    written(journal, ("new", ItemBody(like=("item-1",))))
    replay(version, journal)
    shutil.rmtree(models / "books" / "1")
    add_version(models, 1, seed=1)
    other = opened(models)
    replay(other, journal)
    assert parent_of(other, "new") == parent_of(other, "item-1") != parent_of(version, "new")
    assert [*journal.placements(version.fingerprint, [1])] == [*journal.placements(other.fingerprint, [1])] == [1]


def test_an_item_that_the_default_version_lacks_is_not_called_unchanged(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came back by fields alone in a version that has its row, and then another one became the default."""
    written(Journal(models / "books" / "live.db"), ("new", ItemBody(fields={"colour": "red"})))
    with live_service(models, monkeypatch) as live:
        with pytest.raises(InvalidInput, match="evidence"):
            live.put("new", fields={"colour": "red"})
        assert live.put("new", like=("item-1",)).outcome == "updated"
        assert "new" in live.found("item-1")
        assert live.put("new", fields={"colour": "red"}).outcome == "unchanged"


@pytest.mark.parametrize("committed_by", ["this process", "another"])
def test_while_a_version_is_replaced_both_copies_have_every_write(models: Path, monkeypatch: pytest.MonkeyPatch, committed_by: str) -> None:
    with live_service(models, monkeypatch) as live:
        live.put("new", like=("item-1",))
        old = live.version().live
        (models / "books" / "1").rename(models / "old")
        add_version(models, 1, seed=1)
        other = opened(models)
        if committed_by == "another":
            written(Journal(models / "books" / "live.db"), ("newer", ItemBody(like=("item-1",))))
        live.catalogue.join(other)
        if committed_by == "this process":
            live.put("newer", like=("item-1",))
        for version in (old, other):
            assert parent_of(version, "new") == parent_of(version, "newer") == parent_of(version, "item-1")
        live.catalogue.thread.leave(other)


@pytest.mark.parametrize("damage", ["tree = 7", "parent = 999999"])
def test_damaged_places_leave_an_item_out_until_it_is_put_again(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    with live_service(models, monkeypatch) as live:
        live.put("new", like=("item-1",))
        live.put("other", like=("item-1",))
    with closing(sqlite3.connect(models / "books" / "live.db")) as connection, connection:
        connection.execute(f"UPDATE placements SET {damage} WHERE seq = 1")
    with live_service(models, monkeypatch) as live:
        assert "1 operations are left out; first operation 1: placements" in caplog.text
        assert {"new", "other"} & {*live.found("item-1")} == {"other"}
        live.put("new", fields={"colour": "red"})
        assert {"new", "other"} < {*live.found("item-1")}


def test_other_evidence_moves_an_item_and_the_same_does_not(version: LiveVersion, journal: Journal) -> None:
    written(journal, ("new", ItemBody(like=("item-1",))))
    replay(version, journal)
    before = version.state.live_leaf_of("new")
    written(journal, ("new", ItemBody(like=("item-1",), fields={"colour": "red"})))
    replay(version, journal)
    assert version.state.live_leaf_of("new") == before
    written(journal, ("new", ItemBody(like=("item-9",), fields={"colour": "red"})))
    replay(version, journal)
    assert parent_of(version, "new") == parent_of(version, "item-9") != parent_of(version, "item-1")


@pytest.mark.parametrize("follower_first", [True, False])
def test_who_follows_and_who_begins_with_the_last_operations_have_the_same_places(
    models: Path, version: LiveVersion, journal: Journal, follower_first: bool
) -> None:
    """A worker without this version may write a change of an item: no place in it is stored."""
    written(journal, ("new", ItemBody(like=("item-1",))))
    replay(version, journal)
    written(journal, ("new", ItemBody(like=("item-1",), fields={"colour": "red"})))
    other = opened(models)
    for one in (version, other) if follower_first else (other, version):
        replay(one, journal)
    assert version.state.live_leaf_of("new") == other.state.live_leaf_of("new")


def test_what_says_nothing_of_its_place_is_left_out_and_the_rest_is_applied(version: LiveVersion, journal: Journal) -> None:
    written(journal, ("lost", ItemBody(like=("nobody",))), ("new", ItemBody(like=("item-1",))), ("item-2", None))
    replay(version, journal)
    assert version.items.rows_of(["lost", "new"]).tolist() == [-1, 32]
    assert version.sequence == 3
    assert not version.eligible(version.items.rows_of(["item-2"]))[0]


def test_a_version_that_is_being_dropped_says_so(
    version: LiveVersion, journal: Journal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def drained(items: object) -> None:
        raise NotReady("The service is shutting down.")

    monkeypatch.setattr(version, "candidates", drained)
    written(journal, ("item-1", None), *((f"new-{i}", ItemBody(like=("item-1",))) for i in range(3)))
    replay(version, journal)
    told = [record.getMessage() for record in caplog.records if record.name == "service.live.live_version"]
    assert told == ["books version 1: no operation from 2 on: the version is being dropped"]
    assert version.applied == 4


def test_places_that_cannot_be_stored_are_used_all_the_same(
    version: LiveVersion, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(journal, ("new", ItemBody(like=("item-1",))))

    def read_only(*_: Any) -> None:
        raise JournalReadOnly("books/live.db: read-only")

    monkeypatch.setattr(Journal, "writing", read_only)
    replay(version, journal)
    assert parent_of(version, "new") == parent_of(version, "item-1")


def test_places_are_found_while_the_journal_is_not_locked(
    models: Path, version: LiveVersion, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader searches at a low priority: no writer waits for its searches."""
    ids = [f"new-{i}" for i in range(40)]
    written(journal, *((item, ItemBody(like=("item-1",))) for item in ids))
    searches: list[int] = []
    place = Nearest.place

    def placed(self: Nearest, items: Sequence[ItemBody], *rest: Any) -> Any:
        with Journal(journal.file).writing(0.0):  # raises JournalBusy where it is locked
            searches.append(len(items))
        return place(self, items, *rest)

    monkeypatch.setattr(Nearest, "place", placed)
    replay(version, journal)
    assert sum(searches) == len(ids)
    assert sorted(journal.placements(version.fingerprint, range(1, 41))) == [*range(1, 41)]
    assert (version.items.rows_of(ids) >= 0).all()


def test_of_two_workers_that_place_an_operation_at_once_the_first_to_store_it_decides(
    models: Path, version: LiveVersion, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(journal, ("new", ItemBody(like=("item-1",))), ("newer", ItemBody(like=("item-9",))))
    other, place = opened(models), Nearest.place

    def placed(self: Nearest, items: Sequence[ItemBody], *rest: Any) -> Any:
        monkeypatch.setattr(Nearest, "place", place)
        replay(other, Journal(journal.file))  # it is faster, and finds other places
        return [place(self, [ItemBody(like=("item-5",))], *rest)[0] for _ in items]

    monkeypatch.setattr(Nearest, "place", placed)
    replay(version, journal)
    for item in ("new", "newer"):
        assert version.state.live_leaf_of(item) == other.state.live_leaf_of(item)
    assert parent_of(version, "new") == parent_of(version, "item-1")


def test_items_that_place_others_are_placed_before_them(version: LiveVersion, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, bool] = {}
    place = Nearest.place

    def placed(self: Nearest, items: Sequence[ItemBody], catalogue: Any, *rest: Any) -> Any:
        for body in items:
            known.update({item: bool(catalogue.rows_of([item])[0] >= 0) for item in body.like})
        return place(self, items, catalogue, *rest)

    monkeypatch.setattr(Nearest, "place", placed)
    first = [(f"new-{i}", ItemBody(like=("item-1",))) for i in range(5)]
    written(journal, *first, ("after", ItemBody(like=("new-3", "item-9"))), ("last", ItemBody(like=("after", "item-1"))))
    replay(version, journal)
    assert known == {"item-1": True, "item-9": True, "new-3": True, "after": True}


def test_items_are_placed_late_after_any_number_of_take_overs(models: Path, version: LiveVersion, journal: Journal) -> None:
    """Each leaves 2^32 sequence numbers out, and slots of what is placed late are made of the sequence."""
    for i in range(20):
        written(journal, (f"new-{i}", ItemBody(like=("item-1",))))
        leave_out(journal)
    replay(version, journal)
    assert (version.items.rows_of([f"new-{i}" for i in range(20)]) >= 0).all()
    other = opened(models)
    replay(other, journal)
    assert {other.state.live_leaf_of(f"new-{i}") for i in range(20)} == {version.state.live_leaf_of(f"new-{i}") for i in range(20)}


def test_a_replay_up_to_an_operation_counts_it_though_later_ones_have_replaced_it(version: LiveVersion, journal: Journal) -> None:
    written(journal, ("a", ItemBody(like=("item-1",))), ("b", ItemBody(like=("item-1",))), ("b", ItemBody(like=("item-9",))))
    replay(version, journal, until=2)
    assert version.sequence == 2
    assert version.items.rows_of(["a", "b"]).tolist() == [32, -1]
    replay(version, journal)
    assert parent_of(version, "b") == parent_of(version, "item-9")


def test_a_request_knows_no_item_that_the_engine_does_not_have_yet(version: LiveVersion, journal: Journal) -> None:
    first, second = written(journal, ("new", ItemBody(like=("item-1",))), ("newer", ItemBody(like=("item-1",))))
    version.apply([first], version.new_placements([first]))
    assert version.items.rows_of(["new"]).tolist() == [-1]
    version.publish()
    assert version.items.rows_of(["new"]).tolist() == [32]
    version.apply([second], version.new_placements([second]))
    assert version.items.rows_of(["new", "newer"]).tolist() == [32, -1]
    assert version.items.ids_of(version.items.rows_of(["new"])) == ["new"]


def test_slots_are_promised_once_and_an_item_keeps_its_own_under_its_parent(version: LiveVersion) -> None:
    state, nearest = version.state, Nearest(version.bundle)
    (where,) = nearest.place([ItemBody(like=("item-1", "item-9"))], version.items, version.state.overlay(), version.parents)
    assert not isinstance(where, Exception)
    slots = Slots(state)
    places = [slots.place(f"new-{i}", where)[0] for i in range(32)]
    assert len({(place.parent, place.slot) for place in places}) == 32
    assert [place.parent for place in places] == [where[0].nodes[0]] * 16 + [where[0].nodes[1]] * 16
    parents = version.bundle.tree.level(version.bundle.tree.height - 1)
    near = [next(iter(state.near(0, where[0].nodes[0]))), slots.place("one-more", where)[0].parent]
    assert near[0] == where[0].nodes[0]
    assert near[1] not in (where[0].nodes[0], where[0].nodes[1])
    places += [slots.place(f"more-{i}", where)[0] for i in range(16 * (len(parents) - 2) - 1)]
    assert len({(place.parent, place.slot) for place in places}) == 16 * len(parents) - 1
    with pytest.raises(NoRoom):
        slots.place("one-too-many", where)
    with pytest.raises(InvalidQuery, match=r"events: got .those of 'nowhere'., expected numbers whose scores are finite"):
        slots.place("nowhere", [replace(where[0], nodes=[])])
    operation = Operation(1, "new-3", "put", ItemBody(like=("item-1",)))
    version.apply([operation], {1: (places[3],)})
    again = Slots(state).place("new-3", where)[0]
    assert (again.parent, again.slot) == (places[3].parent, places[3].slot)
    assert Slots(state).place("new-3", where, late_sequence=7)[0].slot == again.slot
    trained = Slots(state).place("item-9", where)[0]
    assert (trained.parent, trained.slot) == state.trained_leaf_of("item-9")


# -- slots of operations that are placed late, by a worker that does not know all slots that are taken ----------------------


def test_what_is_placed_late_has_no_slot_that_a_worker_ahead_has_given_away(version: LiveVersion) -> None:
    bundle = version.bundle
    parent = int(bundle.tree.level(bundle.tree.height - 1)[0])
    row = LiveRow(np.zeros(bundle.graph_scorer.node_dim, np.float32))
    ahead, behind = LiveState(bundle), LiveState(bundle)
    candidates = [Parents([parent], lambda _: row)]
    taken = Slots(ahead).place("known", candidates)
    ahead.apply([Change(1, "known", "put", {}, taken)])
    # the last operation of "known" is a later one, so a replay does not know it yet
    late = [Slots(behind).place(f"late-{sequence}", candidates, late_sequence=sequence) for sequence in (2, 3)]
    for sequence, placements in zip((2, 3), late, strict=True):
        ahead.apply([Change(sequence, f"late-{sequence}", "put", {}, placements)])
    behind.apply([Change(2, "late-2", "put", {}, late[0]), Change(3, "late-3", "put", {}, late[1])])
    behind.apply([Change(4, "known", "put", {}, taken)])
    assert ahead.live_items == behind.live_items == 3


# -- what explanations say of live items ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["product", "gaussian"])
def test_the_tail_of_an_item_is_the_one_that_it_has_in_a_fold(tmp_path: Path, form: Literal["product", "gaussian"]) -> None:
    """Of trained items, of new ones, and of those whose row was changed; that of an item which is gone is empty."""
    rng = np.random.default_rng(3)
    bundle, _ = with_tail(tmp_path, 3, form)
    state = random_state(rng, bundle, integer=False)
    trees = [alone.tree for alone in bundle.alone]
    view = View(state.table, state.overlay(), LiveFilters(trees, ItemFilters(trees, bundle.items, 1 << 20), state.table, state.touched))
    fold, rows = write_fold(tmp_path / "folded" / "2", bundle, view.overlay, state.table), FoldedRows.of(view.overlay)
    features = np.array([0, 3, 4, 9], np.int32)
    values = np.array([0.5, 1, 0.25, 2], np.float32)
    assert bundle.tail is not None
    assert fold.tail is not None
    gone = bundle.tail.part_of_row(features, values, features[:0], values[:0])
    differs = 0
    for row in range(view.overlay.items + view.overlay.handles):
        handle = int(view.overlay.handles_of(np.array([row]))[0])
        if handle >= 0 and not view.overlay.leaf_R[handle]:
            assert view.tail_part(bundle.tail, row, features, values) == gone
        elif handle >= 0 or row not in view.overlay.hidden:
            folded = int(rows.of_rows(np.array([row]))[0])
            part = view.tail_part(bundle.tail, row, features, values)
            assert part == pytest.approx(fold.tail.part(features, values, folded), abs=1e-9)
            differs += row < view.overlay.items and part != bundle.tail.part(features, values, row)
    assert differs > 0
