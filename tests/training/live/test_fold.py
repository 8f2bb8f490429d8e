"""`python -m training fold`: the next version holds all live items, and answers as the version with them did."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from espalier.bundle import Bundle
from espalier.checks.golden import verify_golden
from espalier.engines import open_engine
from espalier.live.fold import folded
from espalier.live.state import LiveState
from espalier.rerank.ranker import GOLDEN_SCORES
from espalier.tree import tree_from_children
from tests.rankers import add_ranker
from tests.training.commands import command
from tests.training.live.journals import JournalOf, history_model
from training.inspect import inspect
from training.live import publish_fold
from training.live.publish_fold import fitted
from training.live.splitting import most_children, split_for_padding


def fold(model: Path, out: Path) -> int:
    return command("fold", "--model", model, "--out", out).status


@pytest.fixture
def journal(tmp_path: Path) -> JournalOf:
    """Two new items, one trained item with another row, one with other fields, one deleted, one new item deleted and one expired."""
    writer = JournalOf(history_model(tmp_path))
    writer.put("new-a", fields={"title": "A"})
    writer.put("gone")
    writer.put("item-4", events=(["item-0"],))
    writer.put("item-5", placed=False, fields={"title": "Five"})
    writer.delete("item-6")
    writer.delete("gone")
    writer.put("late", valid_until=5.0)
    writer.put("new-b", valid_until=time.time() + 1e6)
    return writer


def test_the_next_version_holds_what_is_live(journal: JournalOf, tmp_path: Path) -> None:
    assert fold(tmp_path / "books" / "1", tmp_path / "books" / "2") == 0
    before, after = journal.bundle, Bundle.open(tmp_path / "books" / "2")
    ids = after.items.column("id").to_pylist()
    assert ids == [item_id for item_id in before.items.column("id").to_pylist() if item_id != "item-6"] + ["new-a", "new-b"]
    titles = dict(zip(ids, after.items.column("title").to_pylist(), strict=True))
    assert (titles["new-a"], titles["new-b"], titles["item-5"], titles["item-7"]) == ("A", None, "Five", "Title 7")
    live = after.manifest.live
    assert live is not None
    assert (live.through, live.folded_from) == (8, 1)
    assert (after.manifest.name, after.manifest.version, after.manifest.data["items"]) == ("books", 2, len(ids))
    assert after.manifest.metrics["golden_overlap"] == 1
    assert "recall@10" in after.heldout().column_names
    assert len(after.golden()) == 3
    assert "live items: up to operation 8, folded from version 1" in inspect(after)
    assert verify_golden(after, open_engine(after, "cpu", "reference")) == 1


def test_a_ranker_goes_along(journal: JournalOf, tmp_path: Path) -> None:
    ranked = add_ranker(journal.bundle, {"retrieval.score": 1.0}, version=2)
    JournalOf(ranked).put("new-c")
    assert fold(ranked.path, tmp_path / "books" / "3") == 0
    after = Bundle.open(tmp_path / "books" / "3")
    assert after.manifest.ranker == ranked.manifest.ranker
    assert GOLDEN_SCORES in after.golden().column_names


def test_an_operation_without_a_place_is_placed(journal: JournalOf, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal.put("late-comer", placed=False, events=(["item-0", "item-1"],), like=("item-1",))
    journal.put("later", placed=False, like=("late-comer",))
    journal.put("nowhere", placed=False, like=("nobody-knows",))
    assert fold(tmp_path / "books" / "1", tmp_path / "books" / "2") == 0
    after = Bundle.open(tmp_path / "books" / "2")
    assert after.items.column("id").to_pylist()[-2:] == ["late-comer", "later"]
    assert "1 items are left out" in caplog.text
    assert "'nowhere'" in caplog.text
    parents = after.tree.parent[after.tree.leaf_of_item[after.items.rows_of(["late-comer", "later"])]]
    assert parents[0] == parents[1]


def test_a_place_that_is_taken_is_found_anew_unless_who_had_it_has_expired(tmp_path: Path) -> None:
    writer = JournalOf(history_model(tmp_path))
    expired, first = writer.put("late", valid_until=5.0), writer.put("new-a")
    second, third = writer.put("second", placed=False, like=("item-1",)), writer.put("next", placed=False, at=6.0)
    with writer.journal.writing() as transaction:
        stored = transaction.placements(1, [expired, first])
        transaction.store_placements(1, {second: stored[first], third: stored[expired]})
    assert fold(tmp_path / "books" / "1", tmp_path / "books" / "2") == 0
    assert {"new-a", "second", "next"} <= {*Bundle.open(tmp_path / "books" / "2").items.column("id").to_pylist()}


def test_evidence_of_a_trained_item_counts_where_the_version_says_that_it_came_later(journal: JournalOf, tmp_path: Path) -> None:
    models = tmp_path / "books"
    journal.put("item-7", placed=False, events=(["item-0"],))
    assert fold(models / "1", models / "2") == 0
    before, after = journal.bundle, Bundle.open(models / "2")
    row = after.items.rows_of(["item-7"])[0]
    assert_array_equal(after.node_rows_ND[after.tree.leaf_of_item[row]], before.node_rows_ND[before.tree.leaf_of_item[7]])
    JournalOf(after).put("item-7", placed=False, events=(["item-1"],))
    assert fold(models / "2", models / "3") == 0
    last = Bundle.open(models / "3")
    assert (last.node_rows_ND[last.tree.leaf_of_item[row]] != before.node_rows_ND[before.tree.leaf_of_item[7]]).any()


def test_crowded_parents_are_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = JournalOf(history_model(tmp_path))
    parent = writer.bundle.tree.level(2)[0]
    for number in range(14):
        writer.put(f"new-{number}", parent=parent)
    assert fold(tmp_path / "books" / "1", tmp_path / "books" / "2") == 0
    before, after = writer.bundle.tree, Bundle.open(tmp_path / "books" / "2").tree
    assert after.level_size(2) > before.level_size(2)
    assert after.item_count == before.item_count + 14
    assert "are split" in caplog.text


def test_a_memory_keeps_the_largest_entries_that_a_bundle_may_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_fold, "MAX_ROW", 2)
    bundle = history_model(tmp_path)
    before = bundle.memory
    assert before is not None
    state = LiveState(bundle)
    after = fitted(bundle, folded(bundle, state.overlay(), state.table)).memory  # type: ignore[union-attr]  # of graphs
    assert after is not None
    after.check(len(bundle.items))
    assert np.diff(before.offset).max() > 2
    for item in range(len(bundle.items)):
        was, now = (
            dict(zip(memory.item[a:b].tolist(), memory.value[a:b].tolist(), strict=True))
            for memory in (before, after)
            for a, b in [memory.offset[item : item + 2].tolist()]
        )
        assert now.items() <= was.items()
        assert sorted(now.values()) == sorted(sorted(was.values(), reverse=True)[:2])


def test_another_place_and_nothing_to_fold_are_refused(journal: JournalOf, tmp_path: Path) -> None:
    def refused(model: str, out: str) -> str:
        outcome = command("fold", "--model", tmp_path / model, "--out", tmp_path / out)
        assert outcome.status == 1
        return outcome.err

    assert "another version of books" in refused("books/1", "other/2")
    assert "never overwritten" in refused("books/1", "books/1")
    assert "a version number" in refused("books/1", "books/x")
    assert fold(tmp_path / "books" / "1", tmp_path / "books" / "2") == 0
    assert "through operation 8, all of which it holds" in refused("books/2", "books/3")
    history_model(tmp_path, name="plain")
    assert "with no journal" in refused("plain/1", "plain/2")


# -- nodes of too many children -----------------------------------------------------------------------------------------


def padded(count: list[int], most: int) -> bool:
    """Whether padding is allowed once nodes have at most so many children."""
    parts = [-(-c // -(-c // most)) for c in count]
    return sum(-(-c // most) for c in count) * max(parts) <= 2 * sum(count)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_as_few_nodes_are_split_as_padding_demands(count: list[int]) -> None:
    most = most_children(np.array(count))
    assert padded(count, most)
    assert not any(padded(count, more) for more in range(most + 1, max(count) + 1))


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_a_split_tree_may_be_written_and_keeps_leaves_under_their_ancestors(seed: int, height: int) -> None:
    rng = np.random.default_rng(seed)
    counts, size = [], 1
    for _ in range(height):
        counts.append(np.where(rng.random(size) < 0.2, rng.integers(5, 30, size), rng.integers(1, 3, size)))
        size = int(counts[-1].sum())
    tree = tree_from_children(counts, rng.permutation(size))
    found = split_for_padding(tree)
    after = found.tree
    assert all(after.level_size(h) * after.max_children[h] <= 2 * after.level_size(h + 1) for h in range(after.height))
    assert_array_equal(after.leaf_item, tree.leaf_item)
    leaves = np.arange(size)
    assert_array_equal(found.source_N[after.ancestors(after.leaf_offset + leaves)], tree.ancestors(tree.leaf_offset + leaves))
    assert (found.split == 0) == (after.node_count == tree.node_count)
