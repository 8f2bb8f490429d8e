"""Live items of an earlier model: in a log with them, in the next version that `fold` writes, and in one that `fit` trains."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from safetensors.numpy import save

from benchmarks.random_bundles import make_bundle, random_memory, random_tree
from benchmarks.random_live import random_put
from espalier.bundle import LABEL_COUNTS, Bundle
from espalier.bundle_writer import with_parts
from espalier.checks.golden import verify_golden
from espalier.engines import open_engine
from espalier.errors import InvalidData
from espalier.items import ItemTable
from espalier.live.journal import Journal
from espalier.live.operations import ItemBody, Operation
from espalier.live.state import Change, LiveState
from espalier.manifest import LiveInfo, TrainedItems
from espalier.queries import FeaturesKind, HistoryKind, TextKind, encode_features, encode_histories, encode_texts
from espalier.rerank.ranker import GOLDEN_SCORES
from espalier.search import SearchParams
from espalier.tree import tree_from_children
from tests.golden import golden_of_histories
from tests.rankers import add_ranker
from tests.training.commands import command, written_toml
from tests.training.logs import log_of, split_of
from tests.training.shop import write_shop
from tests.training.test_earlier import CLUSTERS, ITEMS, settings, trained, write_log
from training.data.splits import EvaluationPair, Split
from training.deep.prepare import leaf_rows, prepare
from training.inspect import inspect
from training.linear.prepare import prepare as prepare_texts
from training.live.catalogue import JournalItems, read_items
from training.live.joined_log import with_journal, with_live_fields
from training.live.replay import replay_operations
from training.live.run_journal import RunJournal
from training.live.splitting import most_children, split_for_padding
from training.rankers.log_queries import from_log
from training.specification.linear import LinearConfig
from training.specification.models import deep_config, read_config
from training.versions import clear


class JournalOf:
    """Writes operations of a version, with places at random, as a service would."""

    def __init__(self, bundle: Bundle, seed: int = 0) -> None:
        self.bundle, self.rng, self.state = bundle, np.random.default_rng(seed), LiveState(bundle)
        self.journal = Journal.open(bundle.path.parent / "live.db")

    def put(self, item_id: str, placed: bool = True, at: float = 1.0, parent: int | None = None, **body: Any) -> int:
        """The sequence. placed: whether a place is stored, of a trained item a new row; parent: of the first tree."""
        operation = Operation(0, item_id, "put", ItemBody(**body), at=at)
        with self.journal.writing() as transaction:
            sequence = transaction.append(operation).sequence
            change = Change(sequence, item_id, "put", body.get("fields"), at=at, valid_until=body.get("valid_until"))
            if placed:
                parents = None if parent is None else np.array([parent])
                found = random_put(self.rng, self.state, item_id, sequence, parents=parents)
                change = Change(sequence, item_id, "put", body.get("fields"), found.placements, body.get("valid_until"), at)
                transaction.store_placements(self.bundle.manifest.fingerprint, {sequence: found.placements})
        if placed or self.bundle.items.rows_of([item_id])[0] >= 0:
            self.state.apply([change])
        return sequence

    def delete(self, item_id: str) -> int:
        with self.journal.writing() as transaction:
            sequence = transaction.append(Operation(0, item_id, "delete", at=1.0)).sequence
        self.state.apply([Change(sequence, item_id, "delete", at=1.0)])
        return sequence


def history_model(folder: Path, name: str = "books", seed: int = 5, dtype: Any = "float32") -> Bundle:
    """Version 1 of a model of histories with a memory, golden queries and held-out ones."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 3, 4, empty_share=0.1)
    memory = random_memory(rng, tree.item_count, 3)
    bare = make_bundle(folder / "bare", rng, tree, "product", integer=True, name=name, memory=memory, dtype=dtype)
    golden = golden_of_histories(bare, [np.array([0, 1]), np.array([2]), np.array([], np.int64)], [4, 2, 9], [3, 5, 5])
    strings = pa.list_(pa.string())
    heldout = pa.table(
        {"history": pa.array([["item-0"], ["item-1", "item-2"]], strings), "relevant": pa.array([["item-1"], ["item-3"]], strings)}
    )
    return with_parts(bare, folder / name / "1", {}, {"golden.parquet": golden, "heldout.parquet": heldout})


# -- a log with the items of a journal ------------------------------------------------------------------------------------


def put(sequence: int, item_id: str, **body: Any) -> Operation:
    return Operation(sequence, item_id, "put", ItemBody(**body), at=float(sequence))


def delete(sequence: int, item_id: str) -> Operation:
    return Operation(sequence, item_id, "delete", at=float(sequence))


def items_of(*operations: Operation, now: float = 100.0) -> JournalItems:
    return JournalItems.of(operations, now)


def ids(split: Split, user: int) -> list[str]:
    every = split.lists.item_ids.to_pylist()
    return [every[row] for row in split.lists.of(user).tolist()]


@pytest.fixture
def split() -> Split:
    """Six items; users 0 and 1 train, 2 and 3 validate, 4 and 5 test."""
    return split_of(log_of([[0, 1, 2], [3, 4, 5], [0, 1, 2, 3], [2, 3], [4, 5], [0, 5]]), 2, 2, 2)


def test_new_items_join_in_the_order_of_ids_and_their_events_train(split: Split, tmp_path: Path) -> None:
    events = (["i0", "i1", "nobody"], ["nobody"], ["i5", "a-new"])
    journal = items_of(
        put(1, "a-new", events=(["i2"],)), put(2, "i3", events=(["i0"],)), put(3, "z-new", events=events), put(4, "z-like", like=("i1",))
    )
    joined = with_journal(split, journal, tmp_path)
    assert joined.lists.item_ids.to_pylist() == ["a-new", "i0", "i1", "i2", "i3", "i4", "i5", "z-like", "z-new"]
    assert [ids(joined, user) for user in range(6)] == [ids(split, user) for user in range(6)]
    assert [ids(joined, user) for user in range(6, joined.lists.user_count)] == [
        ["i2", "a-new"],
        ["i0", "i1", "z-new"],
        ["i5", "a-new", "z-new"],
    ]
    assert joined.train.tolist() == [0, 1, 6, 7, 8]
    for before, after in zip((*split.validation, *split.test), (*joined.validation, *joined.test), strict=True):
        assert_array_equal(after.history, before.history + 1)
        assert_array_equal(after.relevant, before.relevant + 1)


def test_items_that_are_gone_leave_lists_and_queries(split: Split, tmp_path: Path) -> None:
    journal = items_of(delete(1, "i3"), delete(2, "unknown"), put(3, "i4", valid_until=50.0))
    joined = with_journal(split, journal, tmp_path)
    assert joined.lists.item_ids.to_pylist() == ["i0", "i1", "i2", "i5"]
    assert [ids(joined, user) for user in (0, 1, 2)] == [["i0", "i1", "i2"], ["i5"], ["i0", "i1", "i2"]]
    assert [(pair.history.tolist(), pair.relevant.tolist()) for pair in joined.validation] == [([0, 1], [2])]
    assert [(pair.history.tolist(), pair.relevant.tolist()) for pair in joined.test] == [([0], [3])]


def test_items_join_what_is_learned_once_all_is_chosen_too(split: Split, tmp_path: Path) -> None:
    later = replace(split, final=(split.lists, np.arange(split.lists.user_count)))
    joined = with_journal(later, items_of(put(1, "a", events=(["i1", "i2"],)), delete(2, "i3")), tmp_path)
    final = joined.whole()
    assert_array_equal(final.lists.item_of_event_E, joined.lists.item_of_event_E)
    assert set(joined.train) < set(final.train)
    assert ids(joined, joined.lists.user_count - 1) == ["i1", "i2", "a"]


def test_nothing_left_is_an_error(split: Split, tmp_path: Path) -> None:
    joined = with_journal(split, items_of(*(delete(1 + i, f"i{item}") for i, item in enumerate((3, 4, 5)))), tmp_path)
    assert joined.train.tolist() == [0], "a user whose items are all gone is not learned from"
    with pytest.raises(InvalidData, match="items that are gone"):
        with_journal(split, items_of(*(delete(1 + item, f"i{item}") for item in range(6))), tmp_path)


def test_events_of_vectors_are_queries_of_their_own(tmp_path: Path) -> None:
    log = replace(log_of([[0, 1], [1], [0]]), vectors_UF=np.arange(6, dtype=np.float32).reshape(3, 2))
    pair = EvaluationPair(2, np.zeros(0, np.int64), np.array([0]), np.array([4, 5], np.float32))
    split = Split(log, np.array([0, 1]), [pair], [pair], split_of(log_of([[0, 1]] * 3), 1, 1, 1).config)
    journal = items_of(put(1, "new", events=([7.0, 8.0], [9.0])))
    joined = with_journal(split, journal, tmp_path)
    assert joined.lists.vectors_UF is not None
    assert_array_equal(joined.lists.vectors_UF, [[0, 1], [2, 3], [4, 5], [7, 8]])
    assert ids(joined, 3) == ["new"]
    assert joined.train.tolist() == [0, 1, 3]


def test_categories_of_new_items_are_not_known(split: Split, tmp_path: Path) -> None:
    categories = np.array([0, 1, 0, 1, 0, 1], np.int32)
    split = replace(split, lists=replace(split.lists, category_of_item_I=categories))
    joined = with_journal(split, items_of(put(1, "a"), delete(2, "i1")), tmp_path)
    assert joined.lists.category_of_item_I is not None
    assert joined.lists.category_of_item_I.tolist() == [-1, 0, 0, 1, 0, 1]


# -- fields ------------------------------------------------------------------------------------------------------------------


def table() -> ItemTable:
    return ItemTable.build(pa.table({"id": ["a", "b", "c"], "title": ["A", "B", None], "price": pa.array([1, 2, None], pa.int32())}))


def test_fields_that_are_newer_than_the_table_replace_all_fields_of_an_item() -> None:
    journal = items_of(
        put(3, "a", fields={"title": "old"}),
        put(5, "b", fields={"title": "new", "other": 1}),
        put(2, "c", fields={"price": 7}),
        put(6, "gone", fields={}),
    )
    found = with_live_fields(table(), journal, after=4).to_table()
    assert found.column("title").to_pylist() == ["A", "new", None]
    assert found.column("price").to_pylist() == [1, None, 7]
    assert found.schema.field("price").type == pa.int32()


def test_a_value_of_another_type_is_named() -> None:
    with pytest.raises(InvalidData, match=r"items\.price"):
        with_live_fields(table(), items_of(put(1, "a", fields={"price": "cheap"})), after=0)


# -- what a run reads of a journal ---------------------------------------------------------------------------------------------


def test_the_last_operation_of_every_id_counts(tmp_path: Path) -> None:
    file = tmp_path / "live.db"
    assert read_items(file, 10.0) is None
    journal = Journal.open(file)
    operations = put(0, "a"), put(0, "b", fields={"x": 1}), delete(0, "a"), put(0, "b", fields={"x": 2}), put(0, "c", valid_until=9.0)
    with journal.writing() as transaction:
        for operation in operations:
            transaction.append(replace(operation, at=1.0))
    journal.close()
    found = read_items(file, now=10.0)
    assert found is not None
    assert (found.through, [*found.put], {*found.gone}) == (5, ["b"], {"a", "c"})
    assert found.put["b"].body.fields == {"x": 2}
    found.write(tmp_path / "kept")
    assert JournalItems.read(tmp_path / "kept") == found
    (tmp_path / "kept").write_text("{\n")
    with pytest.raises(InvalidData, match="kept"):
        JournalItems.read(tmp_path / "kept")


def test_a_file_that_a_killed_run_was_writing_goes_when_it_goes_on(split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with_journal(split, items_of(delete(1, "i1")), tmp_path)
    monkeypatch.setattr("training.live.joined_log.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        with_journal(split, items_of(delete(1, "i1")), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    clear(tmp_path, resume=True)
    assert [file.name for file in tmp_path.iterdir()] == ["joined.int32"]


# -- `espalier fold` --------------------------------------------------------------------------------------------


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
    trained = TrainedItems(items=len(ids) - 2, created=before.manifest.created)
    assert live == LiveInfo(through=8, folded_from=1, trained=trained)
    assert (after.manifest.name, after.manifest.version, after.manifest.data["items"]) == ("books", 2, len(ids))
    assert after.manifest.metrics["golden_overlap"] == 1
    assert "recall@10" in after.heldout().column_names
    assert len(after.golden()) == 3
    assert "live items: up to operation 8, folded from version 1" in inspect(after)
    assert verify_golden(after, open_engine(after, "cpu", "reference")) == 1


def test_users_of_held_out_queries_may_touch_an_item_again(tmp_path: Path) -> None:
    """Also where the counts of a log give figures with propensities, for which every item counts once."""
    plain = history_model(tmp_path, "plain")
    items = plain.tree.item_count
    strings = pa.list_(pa.string())
    again = {
        "history": pa.array([["item-0"], ["item-1"]], strings),
        "relevant": pa.array([["item-1", "item-2", "item-1"], ["item-3"]], strings),
    }
    counts = {"counts": np.arange(1, items + 1), "points": np.array([items])}
    bundle = with_parts(plain, tmp_path / "books" / "1", {}, {LABEL_COUNTS: save(counts), "heldout.parquet": pa.table(again)})
    JournalOf(bundle).put("new-a")
    assert fold(bundle.path, tmp_path / "books" / "2") == 0
    assert "recall@10" in Bundle.open(tmp_path / "books" / "2").heldout().column_names


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
        version = writer.bundle.manifest.fingerprint
        stored = transaction.placements(version, [expired, first])
        transaction.store_placements(version, {second: stored[first], third: stored[expired]})
    assert fold(tmp_path / "books" / "1", tmp_path / "books" / "2") == 0
    assert {"new-a", "second", "next"} <= {*Bundle.open(tmp_path / "books" / "2").items.column("id").to_pylist()}


def test_items_of_a_fold_expire_in_it_and_leave_the_next_one(tmp_path: Path) -> None:
    writer = JournalOf(history_model(tmp_path))
    writer.put("short", valid_until=4e9)
    writer.put("item-7", placed=False, valid_until=5e9)
    assert fold(tmp_path / "books" / "1", tmp_path / "books" / "2") == 0
    after = Bundle.open(tmp_path / "books" / "2")
    file = writer.journal.file
    for now, expired in ((3e9, 0), (4e9, 1), (5e9, 2)):
        items = read_items(file, now)
        assert items is not None
        assert replay_operations(after, file, items.operations, now).tombstones == expired


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
    assert (found.split_count == 0) == (after.node_count == tree.node_count)


# -- `fit` takes live items along -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`planted` in version 1, with a journal: two new items of cluster 0, one without events, item-8 deleted, item-9 renamed."""
    folder = tmp_path_factory.mktemp("live")
    log = write_log(folder / "log.csv")
    bundle = trained(log, folder, optimiser={"steps": 30})
    writer = JournalOf(bundle)
    events = tuple([f"item-{CLUSTERS * i}" for i in range(start, start + 6)] for start in range(5))
    writer.put("new-a", events=events)
    writer.put("new-b", events=events)
    writer.put("quiet", like=("item-0",))
    writer.delete("item-8")
    return folder


def fitted_version(models: Path, version: int, raw: dict[str, Any], *more: object) -> Bundle:
    config, out = written_toml(models / f"{version}.toml", raw), models / "planted" / str(version)
    assert command("fit", "--config", config, "--out", out, "--device", "cpu", *more).status == 0
    return Bundle.open(out)


def found(bundle: Bundle, history: list[str], m: int = 20) -> list[str]:
    kind = bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    queries = encode_histories(kind, bundle.items, [history])[0]
    rows = open_engine(bundle, "cpu").search(queries, SearchParams.uniform(1, 32, m)).item_rows_BM[0]
    return bundle.items.ids_of(rows[rows >= 0])


def going_on(models: Path, **sections: Any) -> dict[str, Any]:
    start = {"earlier_model": str(models / "planted" / "1"), "tree": {"kind": "earlier"}, "scorer": {"init": "earlier"}}
    return settings(models / "log.csv", **(start | sections))


def test_a_model_that_goes_on_from_an_earlier_one_has_its_live_items(models: Path) -> None:
    bundle = fitted_version(models, 2, going_on(models, optimiser={"steps": 10}))
    ids = bundle.items.column("id").to_pylist()
    assert {"new-a", "new-b", "quiet"} <= {*ids}
    assert "item-8" not in ids
    assert len(ids) == ITEMS + 2
    live = bundle.manifest.live
    assert live is not None
    assert (live.through, live.folded_from) == (4, None)


def test_live_items_start_from_their_places_and_rows_and_a_run_that_goes_on_trains_with_what_it_read_first(
    models: Path, tmp_path: Path
) -> None:
    planted = shutil.copytree(models / "planted", tmp_path / "planted")
    config = deep_config(going_on(models) | {"earlier_model": str(planted / "1")})
    prepared = prepare(config, None, tmp_path)
    assert prepared.earlier is not None
    writer = JournalOf(Bundle.open(planted / "1"))
    (stored,) = writer.journal.placements(writer.bundle.manifest.fingerprint, [1])[1]
    row = prepared.items.rows_of(["new-a"])[0]
    leaf = prepared.earlier.tree.leaf_of_item[row]
    assert_array_equal(prepared.earlier.model.node_rows.detach().numpy()[leaf], stored.row.values)

    writer.put("late", placed=False, like=("item-0",))
    again = prepare(config, None, tmp_path)
    assert again.items.column("id").to_pylist() == prepared.items.column("id").to_pylist()


def test_k_means_over_rows_knows_those_of_live_items(models: Path, tmp_path: Path) -> None:
    raw = settings(models / "log.csv", earlier_model=str(models / "planted" / "1"), tree={"kind": "kmeans"})
    prepared = prepare(deep_config(raw), None, tmp_path)
    assert prepared.start is not None
    rows_ID = leaf_rows(Bundle.open(prepared.start), prepared.items)
    assert rows_ID[prepared.items.rows_of(["quiet"])[0]].any()


# -- linear models -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A forest over texts of coloured things, with new and deleted ones in its journal, trained with them, and folded."""
    folder = tmp_path_factory.mktemp("shop")
    config, out = write_shop(folder, tree={"count": 2}), folder / "models" / "shop"
    assert command("fit", "--config", config, "--out", out / "1").status == 0
    writer = JournalOf(Bundle.open(out / "1"))
    writer.put("purple-teapot", events=("purple teapot", "a purple teapot please"), fields={"title": "purple teapot"})
    writer.put("golden-spoon", placed=False, text="a golden spoon")
    writer.put("red-goblet", fields={"title": "red goblet"})
    writer.put("blue-thing", like=("blue-lamp",))
    writer.put("red-lamp", placed=False, fields={"title": "crimson lamp"})
    writer.delete("black-chair")
    writer.put("silver-ladle", events=("silver ladle", "a ladle of silver"))
    assert command("fit", "--config", config, "--out", out / "2", "--earlier", out / "1").status == 0
    assert command("fold", "--model", out / "1", "--out", out / "3").status == 0
    return out


def test_a_log_of_texts_may_name_live_items_and_those_that_are_gone(tmp_path: Path) -> None:
    config = read_config(write_shop(tmp_path))
    assert isinstance(config, LinearConfig)
    with (tmp_path / "log.csv").open("a") as log:
        log.write("a golden spoon,golden-spoon,1\nold lump,lump,1\n")
    journal = items_of(put(1, "golden-spoon", fields={"title": "golden spoon"}), delete(2, "lump"), delete(3, "red-lamp"))
    prepared = prepare_texts(config, RunJournal(journal, 0, tmp_path))
    assert {"golden-spoon", "lump", "red-lamp"} & set(prepared.items.column("id").to_pylist()) == {"golden-spoon"}
    with pytest.raises(InvalidData, match="got 'golden-spoon', expected an id of the item table"):
        prepare_texts(config)


def test_a_linear_model_is_trained_with_live_items(shop: Path) -> None:
    bundle = Bundle.open(shop / "2")
    ids = bundle.items.column("id").to_pylist()
    assert ids[-5:] == ["purple-teapot", "golden-spoon", "red-goblet", "blue-thing", "silver-ladle"]
    assert "black-chair" not in ids
    titles = dict(zip(ids, bundle.items.column("title").to_pylist(), strict=True))
    assert (titles["purple-teapot"], titles["golden-spoon"], titles["red-lamp"]) == ("purple teapot", None, "crimson lamp")
    live = bundle.manifest.live
    assert live is not None
    assert live.through == 7


def found_by(bundle: Bundle, text: str) -> list[str]:
    kind = bundle.manifest.query
    assert isinstance(kind, TextKind)
    queries = encode_texts(kind, bundle.vectoriser, [text])
    results = [open_engine(bundle, "cpu", engine).search(queries, SearchParams.uniform(1, 10, 4)) for engine in (None, "reference")]
    assert_array_equal(results[0].item_rows_BM, results[1].item_rows_BM)
    rows = results[0].item_rows_BM[0]
    return bundle.items.ids_of(rows[rows >= 0])


def test_live_items_of_a_linear_model_are_found_by_what_trained_them(shop: Path) -> None:
    wanted = {"purple teapot": "purple-teapot", "golden spoon": "golden-spoon", "red goblet": "red-goblet", "blue lamp": "blue-thing"}
    wanted |= {"silver ladle": "silver-ladle"}
    for text, item in wanted.items():
        assert item in found_by(Bundle.open(shop / "2"), text)


def test_a_fold_of_a_linear_model_holds_its_live_items_and_is_measured_as_it_was(shop: Path) -> None:
    before, after = Bundle.open(shop / "1"), Bundle.open(shop / "3")
    kept = int(np.count_nonzero(before.items.rows_of(after.items.column("id").to_pylist()) >= 0))
    trained_items = before.manifest.trained_items.model_copy(update={"items": kept})
    assert after.manifest.live == LiveInfo(through=7, folded_from=1, trained=trained_items)
    assert (after.manifest.training, after.manifest.data["sha256"]) == (before.manifest.training, before.manifest.data["sha256"])
    assert "golden-spoon" in found_by(after, "golden spoon"), "it had no place"
    assert after.golden().column("text").equals(before.golden().column("text"))
    recall = np.mean(after.heldout().column("recall@10").to_pylist())
    assert after.manifest.metrics["test"]["raw"][0]["recall"] == pytest.approx(recall)
    assert recall > np.mean(before.heldout().column("recall@10").to_pylist()) - 0.1


def test_queries_of_a_ranker_have_the_rows_of_the_new_version(shop: Path) -> None:
    bundle = Bundle.open(shop / "2")
    kind = bundle.manifest.query
    assert isinstance(kind, TextKind)
    (white,) = bundle.items.rows_of(["white-spoon"])  # behind the item that is gone, so its row is another one now
    wanted = encode_texts(kind, bundle.vectoriser, ["buy a white spoon"]).features
    split = from_log(bundle, None, "training", False)
    parts = [(part.queries.features, part.items) for part in (split.train, split.valid, split.test)]
    rows = np.concatenate([items for _, own in parts for items in own])
    assert rows.min() >= 0
    found = [
        own[b].tolist()
        for features, own in parts
        for b in range(len(own))
        if features.take(np.array([b])).indices.tolist() == wanted.indices.tolist()
    ]
    assert [white] in found


def test_features_train_labels_that_the_points_lack(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = ["40 6 3"]
    for point in range(40):
        label = point % 3
        others = sorted({int(f) for f in rng.integers(3, 5, 2)})
        lines.append(f"{label} " + " ".join(f"{f}:1" for f in [label, *others]))
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    data = {"format": "xmc", "train": str(tmp_path / "train.txt")}
    written_toml(tmp_path / "points.toml", {"kind": "xr-linear", "name": "points", "data": data})
    out = tmp_path / "models" / "points"
    assert command("fit", "--config", tmp_path / "points.toml", "--out", out / "1").status == 0
    writer = JournalOf(Bundle.open(out / "1"))
    writer.put("new", events=({"indices": [5], "values": [1.0]},) * 4)
    writer.delete("1")
    assert command("fit", "--config", tmp_path / "points.toml", "--out", out / "2", "--earlier", out / "1").status == 0
    bundle = Bundle.open(out / "2")
    assert bundle.items.column("id").to_pylist() == ["0", "2", "new"]
    reference = open_engine(bundle, "cpu", "reference")
    kind = bundle.manifest.query
    assert isinstance(kind, FeaturesKind)
    rows = reference.search(encode_features(kind, [([5], [1.0])]), SearchParams.uniform(1, 10, 1)).item_rows_BM[0]
    assert bundle.items.ids_of(rows) == ["new"]
