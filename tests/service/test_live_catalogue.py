"""Items that are put are found by the next request, changed ones as they are now, deleted ones no more; also after a restart."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.testing import assert_allclose

from benchmarks.random_bundles import make_bundle, product_graphs, random_memory, random_tree
from espalier.bundle import Bundle
from espalier.errors import EspalierError, InvalidInput
from espalier.items import Items
from espalier.label_counts import LabelCounts
from espalier.live.journal import Journal
from espalier.live.journal_upkeep import erase_user
from espalier.live.operations import ItemBody
from espalier.memory import BUCKETS
from espalier.placement.parents import Parents
from espalier.placement.placer import Candidates
from espalier.tree import complete_tree
from service.entity_tags import Condition
from service.errors import CatalogueFull, Conflict, NotFound, NotReady, PreconditionFailed
from service.live import live_version
from service.live.catalogue_types import Delete, ItemOutcome, Put, tag_of
from tests.espalier.live.test_oracle import scaled_by_node_rows
from tests.rankers import add_ranker
from tests.service.live_running import ALL, ByTitle, Live, Nearest, add_version, live_service, models
from tests.service.running import ITEMS, Running, counted, ids
from tests.waiting import until

__all__ = ["models"]


def parent(outcome: ItemOutcome, by: str = "like") -> int:
    """Where the item of a write is, and what says so."""
    assert outcome.placed is not None
    assert outcome.placed.by == by
    return outcome.placed.parent


def test_a_random_history_of_writes_is_that_of_a_dict(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over restarts and another version, too: what is found, with which fields, and what each write says."""
    rng, sequence = np.random.default_rng(3), 0
    colours = {f"item-{i}": ["red", "blue"][i % 2] for i in range(ITEMS)}
    trained, gone = dict(colours), set[str]()
    for start in range(3):
        if start == 2:
            add_version(models, 2, seed=1)  # is the default from here on
        with live_service(models, monkeypatch) as live:
            for _ in range(25):
                item = f"{rng.choice(['item', 'new'])}-{rng.integers(6)}"
                if rng.random() < 0.4:
                    if item not in colours and item not in gone:
                        with pytest.raises(NotFound):
                            live.delete(item)
                        continue
                    outcome = live.delete(item)
                    assert outcome.outcome == ("deleted" if item in colours else "unchanged")
                    sequence += item in colours
                    colours.pop(item, None)
                    gone.add(item)
                else:
                    colour = str(rng.choice(["red", "blue", "green"]))
                    there, same = item in colours, colours.get(item) == colour and (item not in trained or item in touched(live))
                    outcome = live.put(item, like=("item-9",) if item not in trained else (), fields={"colour": colour})
                    assert outcome.outcome == ("unchanged" if there and same else "updated" if there else "inserted")
                    sequence += not (there and same)
                    colours[item] = colour
                    gone.discard(item)
                assert outcome.visible
            answer = live.running.retrieve(queries=[{"history": ["item-9"]}], fields=["colour"], **ALL)
            assert answer["sequence"] == sequence == live.catalogue.status().applied
            assert {item["id"]: item["fields"]["colour"] for item in answer["results"][0]["items"]} == colours
            for colour in ("red", "green"):
                found = live.found("item-9", filter={"colour": [colour]})
                assert {*found} == {item for item, own in colours.items() if own == colour}


def touched(live: Live) -> set[str]:
    """The items with operations of their own."""
    changes = live.admin("GET", "changes")["changes"]
    return {change["id"] for change in changes}


def test_an_item_that_comes_back_needs_evidence_unless_training_knows_where_it_belongs(live: Live) -> None:
    live.put("new", like=("item-1",))
    live.delete("new")
    with pytest.raises(InvalidInput, match="events or like is missing; expected evidence"):
        live.put("new", fields={"title": "No evidence"})
    assert live.put("new", like=("item-2",)).outcome == "inserted"
    live.delete("item-5")
    assert "item-5" not in live.found("item-1")
    assert live.put("item-5").outcome == "inserted"
    assert {"new", "item-5"} <= {*live.found("item-1")}


def test_a_put_changes_what_it_names_and_keeps_the_rest(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(live: Live) -> Any:
        return live.running.retrieve(queries=[{"history": ["item-1"]}], fields=["title", "colour"], **ALL)["results"]

    with live_service(models, monkeypatch) as live:
        placed = live.put("new", like=("item-1",), fields={"title": "One"}).placed
        changed = live.put("new", fields={"title": "Two"})
        assert (changed.outcome, changed.placed) == ("updated", placed)
        assert live.put("other", like=("nobody", "item-1"), events=(("new", "none"),)).unknown == ("nobody", "none")
        again = live.put("new", fields={"title": "Two"})
        assert (again.outcome, again.sequence) == ("unchanged", changed.sequence)
        stored = live.get("new")
        assert (stored.body.fields, stored.body.like, stored.live) == ({"title": "Two"}, ("item-1",), True)
        moved = live.put("new", like=("item-9",))
        assert parent(moved) != parent(changed)
        assert live.get("item-4").body.fields == {"title": "Title 4", "colour": "red", "price": 4.0}
        live.put("item-4", fields={"title": "Another"})
        assert live.get("item-4").body.fields == {"title": "Another"}
        before = seen(live)
        fields = {item["id"]: item["fields"] for item in before[0]["items"]}
        assert (fields["new"], fields["item-4"]) == ({"title": "Two", "colour": None}, {"title": "Another", "colour": None})
    with live_service(models, monkeypatch) as live:
        assert live.get("new").placed == moved.placed
        assert seen(live) == before
        assert live.put("newer", like=("item-1",)).sequence == 6


def test_an_item_that_its_fields_have_placed_is_placed_anew_when_they_change(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_version.LiveVersion, "takes_fields", True)
    with live_service(models, monkeypatch, ByTitle) as live:
        first = parent(live.put("new", fields={"title": "item-1"}), "fields")
        second = parent(live.put("new", fields={"title": "item-9"}), "fields")
        assert first != second == parent(live.put("other", like=("item-9",)))
        assert parent(live.put("new", valid_until=4e9), "fields") == second
        moved = parent(live.put("new", like=("item-5",)))
        assert parent(live.put("new", fields={"title": "item-1"})) == moved  # other evidence counts for more
        live.put("back", like=("item-5",), valid_until=time.time() - 1)
        back = live.put("back", fields={"title": "item-1"})
        assert (back.outcome, live.get("back").body.like, parent(back)) == ("inserted", ("item-5",), moved)
    with live_service(models, monkeypatch, ByTitle) as live:
        placed = live.get("new").placed
        assert placed is not None
        assert placed.parent == moved


@pytest.mark.parametrize("title", ["item-9", "unheard of"])
def test_a_trained_item_that_comes_back_with_fields_is_where_it_was_whatever_they_say(
    models: Path, monkeypatch: pytest.MonkeyPatch, title: str
) -> None:
    monkeypatch.setattr(live_version.LiveVersion, "takes_fields", True)
    with live_service(models, monkeypatch, ByTitle) as live:
        before = live.get("item-4").placed
        live.delete("item-4")
        back = live.put("item-4", fields={"title": title})
        assert (back.outcome, back.placed, live.get("item-4").body.fields) == ("inserted", before, {"title": title})
        live.put("item-5", valid_until=time.time() - 1)
        assert parent(live.put("item-5", fields={"title": title}, valid_until=4e9), "trained") >= 0


class ByCount(Nearest):
    """A row is as long as its item is popular."""

    def _place(self, body: ItemBody, known: Items) -> Candidates | EspalierError:
        found = super()._place(body, known)
        if isinstance(found, EspalierError):
            return found
        row = found[0].row(0)
        return [Parents(found[0].nodes, lambda _: replace(row, values=row.values * np.float32(body.count or 1)))]


def test_a_count_alone_changes_the_row_and_stays(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def length(live: Live) -> float:
        leaves = live.version().live.state.overlay().trees[0]
        assert leaves.rows_PD is not None
        return float(np.abs(leaves.rows_PD[leaves.open[-1]]).sum())

    with live_service(models, monkeypatch, ByCount) as live:
        live.put("new", like=("item-1",), fields={"title": "One"})
        alone = length(live)
        changed = live.put("new", count=5)
        assert changed.outcome == "updated"
        assert length(live) == pytest.approx(5 * alone)
        assert live.put("new", count=5).outcome == "unchanged"
        live.put("new", fields={"title": "Two"})
        assert length(live) == pytest.approx(5 * alone)
        assert (live.get("new").body.count, live.get("new").body.like) == (5, ("item-1",))
        assert parent(live.put("item-4", count=7), "trained") >= 0, "it is remembered, and the row stays that of training"
        live.put("new", like=("item-2",))
        other = np.abs(live.version().bundle.node_rows_ND[live.version().bundle.tree.leaf_of_item[2]]).sum()
        assert length(live) == pytest.approx(5 * float(other)), "it stays with other evidence"
        live.put("new", like=("item-1",))
        both = live.bulk(Put("new", ItemBody(count=2)), Put("new", ItemBody(count=3)))
        assert [outcome.outcome for outcome in both if isinstance(outcome, ItemOutcome)] == ["updated"] * 2
        assert length(live) == pytest.approx(3 * alone)
    with live_service(models, monkeypatch, ByCount) as live:
        assert length(live) == pytest.approx(3 * alone)


class ByCountOrTitle(ByCount, ByTitle):
    """Places by fields too."""


def test_a_count_neither_moves_trained_items_nor_is_forgotten_by_fields(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_version.LiveVersion, "takes_fields", True)
    with live_service(models, monkeypatch, ByCountOrTitle) as live:
        live.put("item-4", fields={"title": "item-9"})
        assert parent(live.put("item-4", count=7), "trained") >= 0, "its fields did not place it, nor does its count"
        live.put("new", fields={"title": "item-6"}, count=2)
        live.put("new", fields={"title": "item-7"})
        leaves = live.version().live.state.overlay().trees[0]
        bundle = live.version().bundle
        assert leaves.rows_PD is not None
        assert_allclose(
            leaves.rows_PD[leaves.open[-1]], 2 * np.asarray(bundle.node_rows_ND[bundle.tree.leaf_of_item[7]], np.float32), rtol=1e-6
        )


def test_an_item_whose_evidence_is_gone_keeps_its_leaf_when_its_count_changes(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    where = live.put("new", like=("item-1",)).placed
    monkeypatch.setattr(Nearest, "_place", lambda self, body, known: InvalidInput("like", "item-1", "an item"))
    changed = live.put("new", count=9)
    assert (changed.outcome, changed.placed) == ("updated", where)
    assert live.get("new").body.count == 9
    relabelled = live.put("new", count=10, fields={"title": "New"})
    assert (relabelled.outcome, relabelled.placed) == ("updated", where), "the request sent no evidence that could be wrong"
    assert (live.get("new").body.count, live.get("new").body.fields) == (10, {"title": "New"})
    with pytest.raises(InvalidInput):
        live.put("new", like=("item-2",))
    with pytest.raises(InvalidInput):
        live.put("new", count=11, like=("item-2",))


def test_a_count_is_not_taken_while_nobody_can_make_its_row(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    before = live.put("new", like=("item-1",)).sequence

    def place(*_: object) -> None:
        raise NotReady("The version is being dropped.")

    monkeypatch.setattr(Nearest, "place", place)
    with pytest.raises(NotReady):
        live.put("new", count=9)
    assert (live.get("new").body.count, live.get("new").sequence) == (None, before)


def test_a_trained_item_that_is_put_anew_is_as_popular_as_training_saw_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bundle, "label_counts", lambda self: LabelCounts(np.arange(len(self.items)), 10**6))
    seen: list[int | None] = []

    def place(self: Nearest, body: ItemBody, known: Items) -> EspalierError:
        seen.append(body.count)
        return InvalidInput("like", body.like, "nothing")

    with live_service(models, monkeypatch) as live:
        monkeypatch.setattr(Nearest, "_place", place)
        for item, count in (("item-7", None), ("item-7", 9), ("new", None)):
            with pytest.raises(InvalidInput):
                live.put(item, like=("item-1",), count=count)
    assert seen == [7, 9, None]


def test_conditions_and_source_versions_are_looked_at_before_anything_changes(live: Live) -> None:
    only_new = Condition(if_none_match="*")
    first = live.put("new", only_new, source_version=7, like=("item-1",))
    for item, trained_or_there in (("new", {"like": ("item-1",)}), ("item-1", {"fields": {}})):
        with pytest.raises(PreconditionFailed):
            live.put(item, only_new, **trained_or_there)
    with pytest.raises(PreconditionFailed):
        live.delete("new", Condition(if_match=tag_of(99)))
    assert live.put("new", source_version=6, fields={"title": "Old"}) == ItemOutcome(first.sequence, "stale", True, first.placed, ())
    second = live.put("new", Condition(if_match=tag_of(first.sequence)), source_version=7, fields={"title": "New"})
    assert (second.outcome, second.sequence) == ("updated", 2)
    assert live.put("item-1", Condition(if_match=tag_of(0)), fields={"title": "x"}).outcome == "updated"


def test_the_source_version_of_what_is_gone_is_kept(live: Live) -> None:
    """However it went, and whoever wrote without one meanwhile: an older record brings nothing back."""
    live.put("new", source_version=10, like=("item-1",))
    assert live.delete("new", source_version=11).outcome == "deleted"
    again = live.delete("new", source_version=20)
    assert (again.outcome, again.sequence) == ("deleted", 3)
    assert live.delete("new", source_version=20) == replace(again, outcome="unchanged")
    assert live.delete("new").outcome == "unchanged"
    assert live.put("new", source_version=15, like=("item-1",)).outcome == "stale"
    assert live.delete("new", source_version=15).outcome == "stale"
    assert live.put("new", like=("item-1",)).outcome == "inserted"
    assert live.put("new", source_version=19, fields={"colour": "red"}).outcome == "stale"
    assert live.put("new", source_version=20, valid_until=1.0).outcome == "updated"
    assert live.delete("new", source_version=30).outcome == "deleted"
    assert live.put("new", source_version=25, valid_until=None).outcome == "stale"
    assert live.put("new", source_version=30, like=("item-1",)).outcome == "inserted"


def test_the_evidence_of_an_expired_item_that_is_deleted_never_comes_back(live: Live) -> None:
    expired = live.put("new", like=("item-1",), fields={"title": "Old"}, valid_until=1.0)
    deleted = live.delete("new")
    assert (deleted.outcome, deleted.sequence) == ("deleted", expired.sequence + 1)
    assert live.delete("new") == replace(deleted, outcome="unchanged")
    with pytest.raises(EspalierError, match="evidence to place the item by"):
        live.put("new", fields={"price": 2.0})
    live.put("item-5", fields={"title": "Old"}, valid_until=1.0)
    assert live.delete("item-5").outcome == "deleted"
    assert "item-5" not in live.found("item-1")
    live.put("item-5", fields={"price": 2.0})
    assert "item-5" in live.found("item-1")
    assert live.admin("GET", "changes")["changes"][-1]["fields"] == {"price": 2.0}


def test_exclusions_and_standing_removals_hold_for_live_items(live: Live) -> None:
    live.put("new", like=("item-1",), fields={"colour": "red"})
    excluded = live.running.retrieve(queries=[{"history": ["new"], "exclude_seen": True}], **ALL)["results"][0]
    assert "new" not in [item["id"] for item in excluded["items"]]
    assert (len(excluded["items"]), excluded["complete"]) == (32, True)
    assert live.admin("PUT", "removed/new")["known"]
    assert "new" not in live.found("item-1")
    assert "new" not in live.found("item-1", filter={"colour": ["red"]})
    explained = live.running.retrieve(queries=[{"history": ["item-1"]}], explain_items=["new", "item-2"], **ALL)["results"][0]["explain"]
    assert [item["outcome"] for item in explained["items"]] == ["removed", "returned"]
    live.admin("DELETE", "removed/new")
    assert "new" in live.found("item-1", filter={"colour": ["red"]})


def test_what_a_request_sees_does_not_hold_what_came_after_it(live: Live) -> None:
    live.put("early", like=("item-1",))
    view = live.catalogue.thread.versions[1].view()
    live.put("late", like=("item-1",))
    assert (view.entry("early") is None, view.entry("late")) == (False, None)
    assert view.items.rows_of(["late"]).tolist() == [-1]


def test_a_request_without_live_items_is_that_of_the_bundle(live: Live) -> None:
    before = live.found("item-1")
    live.put("new", like=("item-1",))
    live.delete("item-3")
    assert live.found("item-1", live=False) == before
    answer = live.running.retrieve(queries=[{"history": ["new"]}], live=False)
    assert "sequence" not in answer
    assert answer["results"][0]["unknown"] == ["new"]


@pytest.mark.settings(max_live=3)
def test_every_line_of_a_bulk_has_its_outcome_in_order(live: Live) -> None:
    def put(item: str, like: str | None = None, **fields: object) -> Put:
        return Put(item, ItemBody(like=() if like is None else (like,), fields=fields or None))

    expected: list[tuple[Put | Delete, Any]] = [
        (put("a", "item-1"), "inserted"),
        (put("b", "nobody-knows"), InvalidInput),
        (Delete("nobody-knows"), NotFound),
        (put("c", "item-2", nothing=1), InvalidInput),
        (put("a", colour="red"), "updated"),
        (put("d", "item-2"), "inserted"),
        (Delete("a"), "deleted"),
        (put("e", "item-3"), "inserted"),
        (put("f", "item-3"), "inserted"),
        (put("g", "item-3"), CatalogueFull),
        (Delete("item-9"), "deleted"),
    ]
    found = live.bulk(*(operation for operation, _ in expected))
    assert [type(one) if isinstance(one, EspalierError) else one.outcome for one in found] == [outcome for _, outcome in expected]
    assert [one.sequence for one in found if isinstance(one, ItemOutcome)] == [1, 2, 3, 4, 5, 6, 7]
    assert {"d", "e", "f"} < {*live.found("item-1")}


def test_an_engine_without_live_items_takes_no_writes_and_says_so(running: Running) -> None:
    live = Live(running)
    with pytest.raises(Conflict, match="takes no live items"):
        live.put("new", like=("item-1",))
    with pytest.raises(NotFound):
        live.get("new")
    assert live.get("item-4").body.fields is not None
    assert "takes no live items" in str(live.catalogue.status().reason)


# -- versions that hold operations ----------------------------------------------------------------------------------------


def holds(models: Path, sequence: int) -> None:
    """Version 1 says that it holds operations up to this one."""
    describe(models, 1, live={"through": sequence})


def describe(models: Path, version: int, **manifest: Any) -> None:
    file = models / "books" / str(version) / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | manifest))


def test_a_version_that_holds_operations_replays_later_ones_alone(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch) as live:
        live.put("held", like=("item-1",))
        live.delete("item-5")
        live.put("later", like=("item-1",))
    holds(models, 2)
    with live_service(models, monkeypatch) as live:
        found = live.found("item-1")
        assert {"later", "item-5"} < {*found}
        assert "held" not in found


def test_writes_take_effect_in_a_version_that_holds_what_the_journal_has_lost(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version was folded after item-4 had another price again and item-5 was put again; then a backup was restored."""
    with live_service(models, monkeypatch) as live:
        live.put("item-4", fields={"price": 99.0})
        live.delete("item-5", source_version=7)
    holds(models, 8)
    with live_service(models, monkeypatch) as live:
        former = live.get("item-4")
        assert former.body.fields is not None
        assert former.body.fields["price"] != 99
        assert live.get("item-5").placed is not None
        assert live.put("item-4", fields={"price": 99.0}).outcome == "updated"
        assert live.put("item-4", fields={"price": 99.0}).outcome == "unchanged"
        assert live.get("item-4").body.fields == {"price": 99}
        assert "item-5" in live.found("item-1")
        assert live.delete("item-5", source_version=6).outcome == "stale"
        assert live.delete("item-5").outcome == "deleted"
        assert "item-5" not in live.found("item-1")
        assert live.delete("item-5").outcome == "unchanged"
        with pytest.raises(NotFound, match="it was deleted"):
            live.get("item-5")


def test_a_new_journal_goes_on_behind_what_a_version_on_disk_holds_of_a_lost_one(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_version(models, 2)
    describe(models, 2, live={"through": 7})
    (models / "books" / "serving.json").write_text('{"generation": 1, "versions": [1], "default": 1}')
    with live_service(models, monkeypatch) as live:
        assert live.put("new", like=("item-1",)).sequence == 8
        assert live.delete("item-5").sequence == 9
        live.admin("POST", "default", {"version": 2})
        found = live.found("item-1")
        assert "new" in found
        assert "item-5" not in found


def test_items_that_a_version_holds_expire_in_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    until = time.time() + 1000
    with live_service(models, monkeypatch) as live:
        live.put("item-4", valid_until=until - 2000)
        live.put("item-5", valid_until=until)
        live.put("item-6", valid_until=until)
        live.put("item-7", valid_until=until, like=("item-1",))
        live.put("item-6", fields={"price": 2.0})
    holds(models, 4)
    with live_service(models, monkeypatch) as live:
        assert {"item-4", "item-5", "item-6", "item-7"} - {*live.found("item-1")} == {"item-4"}
        assert (placed := live.get("item-5").placed) is not None
        assert placed.by == "trained"
        live.catalogue.thread.call(lambda: live.catalogue.thread.served[1].expire(until))
        assert not {"item-4", "item-5", "item-6", "item-7"} & {*live.found("item-1")}


@pytest.mark.parametrize("known_by", ["fold", "training", "training before the fold"])
def test_a_trained_item_keeps_its_row_though_evidence_that_the_version_knows_is_stored(
    models: Path, monkeypatch: pytest.MonkeyPatch, known_by: str
) -> None:
    with live_service(models, monkeypatch) as live:
        parent(live.put("item-9", like=("item-2",)))
    add_version(models, 2)
    trained: dict[str, object] = {"items": 0 if known_by == "fold" else 100, "created": datetime.now(UTC).isoformat()}
    by_fold: dict[str, object] = {"live": {"through": 1, "folded_from": 1, "trained": trained}}
    describe(models, 2, **{"created": trained["created"]} if known_by == "training" else by_fold)
    counted = "like" if known_by == "fold" else "trained"  # a fold has not learned a popularity
    with live_service(models, monkeypatch) as live:
        parent(live.put("item-9", fields={"title": "Cheaper"}), "trained")
        parent(live.put("item-9", count=7), counted)
        assert live.put("item-9", fields={"title": "Cheaper"}).outcome == "unchanged"
        parent(live.put("item-9", fields={"title": "Cheap"}), counted)
        changes = live.admin("GET", "changes")["changes"]
        assert [change["evidence_from"]["sequence"] for change in changes if change["sequence"] > 1] == [1, 1, 1]
    with live_service(models, monkeypatch) as live:
        parent(live.put("item-9", fields={"title": "Dear"}), counted)
        parent(live.put("item-9", like=("item-3",)))
        moved = live.put("item-9", fields={"title": "Dearer"})
        parent(moved)
    with live_service(models, monkeypatch) as live:
        assert live.get("item-9").placed == moved.placed


def test_a_trained_row_stays_where_another_version_places_the_item_anew(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch) as live:
        live.put("item-9", like=("item-2",))
        add_version(models, 2, seed=1)
        describe(models, 2, created=datetime.now(UTC).isoformat())
        live.admin("POST", "load", {"version": 2, "default": False})
        live.put("item-9", count=7)
        placed = {number: version.placed("item-9") for number, version in live.catalogue.thread.served.items()}
        assert {number: place and place.by for number, place in placed.items()} == {1: "like", 2: "trained"}


def test_sequences_go_on_above_those_that_a_version_holds_where_its_journal_is_gone(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holds(models, 500)
    with live_service(models, monkeypatch) as live:
        assert live.found("item-1") == live.found("item-1", live=False)
        assert [live.put(item, like=("item-1",)).sequence for item in ("new", "newer")] == [501, 502]
    with live_service(models, monkeypatch) as live:
        assert {"new", "newer"} < {*live.found("item-1")}


# -- answers with live items in them: explanations, completion, re-ranking, and models of other kinds than histories ------


def explained(live: Live, *items: str, **body: Any) -> dict[str, Any]:
    answer = live.running.retrieve(queries=[{"history": ["item-1"]}], explain_items=list(items), **({"m": 4} | body))
    return {entry["id"]: entry for entry in answer["results"][0]["explain"]["items"]}


def test_an_explanation_says_that_an_item_is_live_and_since_when(live: Live) -> None:
    live.put("new", like=("item-1",), fields={"colour": "red"})
    live.put("item-4", fields={"colour": "green"})
    live.put("gone", like=("item-1",))
    live.delete("gone")
    live.delete("item-3")
    found = explained(live, "new", "item-4", "gone", "item-3", "item-5", "nobody", m=40, beam_size=64)
    assert found["new"]["outcome"] == "returned"
    assert found["new"]["level"] == 5
    assert {name: found["new"]["live"][name] for name in ("sequence", "placed_by")} == {"sequence": 1, "placed_by": "like"}
    assert found["new"]["live"]["since"].startswith("20")
    assert found["item-4"]["live"]["placed_by"] == "trained"
    assert [found[item]["outcome"] for item in ("gone", "item-3", "nobody")] == ["deleted", "deleted", "unknown"]
    assert "live" not in found["item-5"]
    filtered = explained(live, "new", "item-4", filter={"colour": ["red"]})
    assert filtered["item-4"]["outcome"] == "filtered"
    assert filtered["new"]["outcome"] != "filtered"


def test_a_live_item_that_does_not_count_in_histories_is_unknown_there_but_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model leaves out the newest item of a history that it knows, which is item 2."""
    rng = np.random.default_rng(6)
    tree, graphs = random_tree(rng, 3, 3), product_graphs(rng, 4, True)
    query = scaled_by_node_rows(onnx.load_from_string(graphs.query_onnx)).SerializeToString()
    memory = replace(random_memory(rng, tree.item_count, 4, integer=False), left_out=np.arange(BUCKETS) == 0)
    limits: dict[str, Any] = {"max_beam_size": 64, "max_m": 40}
    bundle = make_bundle(tmp_path, rng, tree, "product", graphs=graphs._replace(query_onnx=query), memory=memory, name="books", **limits)
    items = [*bundle.items.ids_of(np.arange(tree.item_count)), "new"]
    history = {"history": ["item-1", "item-2", "new"]}
    with live_service(tmp_path, monkeypatch, max_explained=len(items)) as live:
        live.put("new", like=("item-1",))
        answered, without_seen = live.running.retrieve(queries=[history, history | {"exclude_seen": True}], explain_items=items, **ALL)[
            "results"
        ]
    assert answered["unknown"] == without_seen["unknown"] == ["new"]
    entries = {entry["id"]: entry for entry in answered["explain"]["items"]}
    assert {item for item in items if entries[item]["outcome"] == "excluded"} == {"item-2"} == {*items} - {*ids(answered)}
    assert {*items} - {*ids(without_seen)} == {"item-1", "item-2", "new"}
    parts = {item: entries[item]["memory"]["part"] for item in ids(answered)}
    assert any(parts.values())
    assert_allclose([entries[item]["key"] - entries[item]["rank"] for item in parts], [*parts.values()], atol=1e-4)


def test_of_equal_keys_an_explanation_has_the_order_of_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = complete_tree(np.arange(8), 2)
    rows = np.zeros((tree.node_count, 4), np.float32)
    make_bundle(tmp_path, np.random.default_rng(0), tree, "product", rows=rows, name="books", max_beam_size=64, max_m=40)
    items = [*(f"item-{i}" for i in range(8)), "new"]
    with live_service(tmp_path, monkeypatch, max_explained=len(items)) as live:
        live.put("new", like=("item-0",))
        whole = ids(live.running.retrieve(queries=[{"history": []}], **ALL)["results"][0])
        found = live.running.retrieve(queries=[{"history": []}], explain_items=items, explain_nodes=True, **(ALL | {"m": 5}))["results"][0]
    assert whole.index("new") == 2, "it comes after both items of its parent"
    last = {entry["id"]: entry["path"][-1] for entry in found["explain"]["items"]}
    assert [last[item]["place"] for item in whole] == [*range(1, 10)]
    assert [last[item]["kept"] for item in whole] == [True] * 5 + [False] * 4
    assert found["explain"]["levels"][-1]["nodes"] == [last[item]["node"] for item in whole]


@pytest.mark.settings(widen=1)
def test_a_live_item_is_pruned_where_its_parent_was(live: Live) -> None:
    for i in range(32):
        live.put(f"new-{i}", like=(f"item-{i}",))
    items = [f"new-{i}" for i in range(8)]
    found = explained(live, *items, m=4, beam_size=2)
    whole = explained(live, *items, m=40, beam_size=64)
    outcomes = {entry["outcome"] for entry in found.values()}
    assert "pruned" in outcomes
    for entry in found.values():
        if entry["outcome"] == "pruned":
            assert 1 <= entry["level"] <= 5
            assert entry["cut"] is not None
    assert {entry["outcome"] for entry in whole.values()} <= {"returned", "pruned"}


def test_completion_knows_live_items_by_what_they_are_called_now(live: Live) -> None:

    def completed(prefix: str, limit: int = 100) -> list[str]:
        answer = live.running.client.get("/models/books/items", params={"prefix": prefix, "limit": limit}).json()
        return [item["id"] for item in answer["items"]]

    before = completed("title 1")
    live.put("new", like=("item-1",), fields={"title": "TITLE 1 again"})
    live.put("item-1", fields={"title": "Another"})
    live.delete("item-10")
    assert completed("title 1") == [item for item in before if item not in ("item-1", "item-10")] + ["new"]
    assert completed("anoth") == ["item-1"]
    assert completed("NEW") == ["new"]
    assert completed("title 1", 3) == ["item-11", "item-12", "item-13"]
    live.put("new-without-fields", like=("item-1",))
    assert completed("new") == ["new", "new-without-fields"]
    live.delete("new")
    assert completed("new") == ["new-without-fields"]


def test_the_ranker_sees_live_items_as_they_are(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(models / "books" / "1")
    add_ranker(bundle, {"attribute.price": 1.0, "history.last": 0.0}, depth=40, max_depth=40)
    shutil.rmtree(models / "books" / "1")
    with live_service(models, monkeypatch) as live:
        live.put("dear", like=("item-1",), fields={"price": 1000.0})
        live.put("item-2", fields={"price": 500.0})
        live.put("bare", like=("item-1",))
        answer = live.running.retrieve(queries=[{"history": ["item-1", "dear"]}], rerank=True, m=40, beam_size=64)
        items = answer["results"][0]["items"]
        assert [item["id"] for item in items[:3]] == ["dear", "item-2", "item-31"]
        assert items[-1]["id"] == "bare"  # its price is missing
        explained = live.running.retrieve(
            queries=[{"history": ["item-1", "dear"]}], rerank=True, m=40, beam_size=64, explain_items=["dear", "item-2"]
        )
        dear, changed = explained["results"][0]["explain"]["items"]
        assert dear["rank_features"] == {"attribute.price": 1000.0, "history.last": pytest.approx(1.0)}
        assert changed["rank_features"]["attribute.price"] == 500.0
        trained = live.running.retrieve(queries=[{"history": []}], rerank=True, m=40, beam_size=64, live=False, explain_items=["item-2"])
        assert trained["results"][0]["items"][0]["id"] == "item-31"  # the largest price of training
        assert trained["results"][0]["explain"]["items"][0]["rank_features"]["attribute.price"] == 2.0


def test_an_erasure_reaches_the_queries_that_a_running_service_keeps_in_memory(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch, sample_queries=9) as live:
        live.put("new", events=(["item-1"], ["item-2"]), users=("u1", "u2"))
        live.put("other", events=(["item-1"],), users=("u1",))
        live.put("new", fields={"title": "New"})
        recent = live.version().live.recent
        journal = Journal(models / "books" / "live.db")
        for user, queries in (("u1", {"new": (["item-2"],)}), ("who never wrote", {"new": (["item-2"],)})):
            live.found("item-1")
            assert len(live.admin("GET", "samples")["queries"]) == 1
            erase_user(journal, user)
            until(lambda: not live.admin("GET", "samples")["queries"], "the samples are dropped")
            assert dict(filter(None, (recent.next() for _ in range(4)))) == queries
        live.found("item-1")
        live.put("last", events=(["item-1"],))
        assert len(live.admin("GET", "samples")["queries"]) == 1  # writes and other looks drop nothing
    with live_service(models, monkeypatch) as live:
        assert live.version().live.recent.next() == ("new", (["item-2"],))


def test_live_leaves_count_in_the_limit_of_explained_nodes(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query: dict[str, Any] = {"queries": [{"history": ["item-1"]}], "m": 1, "beam_size": 1, "explain": True, "explain_nodes": True}

    with live_service(models, monkeypatch, max_answer_values=42, widen=1.0) as live:

        def levels(**more: Any) -> list[int]:
            answer = live.running.retrieve(**query, **more)
            return [len(level["nodes"]) for level in answer["results"][0]["explain"]["levels"]]

        trained = levels()
        most = (42 - 2) // 2 - sum(trained)  # an id and a score, and two values for each node
        for i in range(most):
            live.put(f"a-{i}", like=("item-1",))
            live.put(f"b-{i}", like=("item-9",))  # a beam of one node has either these or those
        assert levels()[:-1] == trained[:-1]
        live.put("one-too-many", like=("item-1",))
        refused = live.running.client.post("/retrieve", json={"model": "books", **query})
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "explain_nodes")
        assert levels(live=False) == trained


def test_the_capacity_is_what_a_small_tree_has_room_for_and_metrics_say_how_full_it_is(live: Live) -> None:
    capacity = live.catalogue.status().capacity
    puts = [Put(f"new-{number}", ItemBody(like=("item-1",))) for number in range(capacity + 1)]
    outcomes = live.bulk(*puts)
    assert [isinstance(outcome, CatalogueFull) for outcome in outcomes] == [False] * capacity + [True]
    live.delete("item-3")
    for number in range(capacity // 2):
        live.delete(f"new-{number}")
    found = counted(live.running)
    names = ("items", "tombstones", "capacity_ratio")
    filled = [found[f'espalier_live_{name}{{model="books",version="1"}}'] for name in names]
    assert filled == [capacity // 2, 1, 0.5]
