"""What a fold learns from a log: lists in its rows, the memory and the counts anew, and fitted rows of live items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks.random_bundles import make_bundle, random_tree, tree_over
from espalier.arrays import Float32, Float64, Int64
from espalier.bundle import Bundle
from espalier.bundle_writer import GraphContent
from espalier.engines import open_engine
from espalier.engines.encoder import QueryEncoder
from espalier.items import ItemTable
from espalier.label_counts import LabelCounts
from espalier.live.fold import content_of
from espalier.live.operations import ItemBody, Operation
from espalier.manifest import LiveInfo, MemoryFormula, TrainedItems
from espalier.memory import Memory
from espalier.queries import HistoryKind, pad_histories
from espalier.search import SearchParams
from tests.training.commands import command
from tests.training.live.test_fold import JournalOf, items_of, put
from tests.training.logs import log_of, split_of
from tests.training.runs import exported
from tests.training.test_earlier import CLUSTERS, ITEMS, write_log
from tests.training.test_earlier import trained as trained_model
from training.data.splits import Split
from training.deep.memory import MemorySource
from training.live import fitted_rows as fitting
from training.live import learned_fold
from training.live.catalogue import JournalItems
from training.live.fitted_rows import fitted_rows, mean_states
from training.live.fold_log import fold_log, stated_counts
from training.live.learned_fold import put_since_training, with_new_counts
from training.neighbours.fit import WITHOUT_ORDER
from training.neighbours.neighbour_lists import NeighbourLists


@pytest.fixture
def split() -> Split:
    """Six items; users 0 and 1 train, 2 and 3 validate, 4 and 5 test."""
    return split_of(log_of([[0, 1, 2], [3, 4, 5], [0, 1, 2, 3], [2, 3], [4, 5], [0, 5]]), 2, 2, 2)


def table(*ids: str) -> ItemTable:
    return ItemTable.build(pa.table({"id": pa.array(ids, pa.string())}))


# -- the log of a fold ------------------------------------------------------------------------------------------------------


def test_lists_are_in_the_rows_of_the_fold_and_lack_what_it_lacks(split: Split, tmp_path: Path) -> None:
    journal = items_of(put(1, "new", events=(["i0", "i9"], ["i4"])), put(2, "i1", events=(["i5"],)))
    found = fold_log(split, journal, table("new", "i4", "i2", "i1", "i0", "unknown"), tmp_path)
    assert found.users.tolist() == [0, 1, 6, 7]
    assert [found.lists.of(user).tolist() for user in (0, 1, 6, 7)] == [[4, 3, 2], [1], [4, 0], [1, 0]]
    assert found.logged_J.tolist() == [False, True, True, True, True, False]


def test_items_that_only_held_out_users_have_are_as_if_the_log_lacked_them(tmp_path: Path) -> None:
    split = split_of(log_of([[0, 1], [0, 2], [0, 3], [3, 4]]), 2, 1, 1)
    assert fold_log(split, items_of(put(1, "new")), table("i0", "i1", "i2", "i3", "i4"), tmp_path).logged_J.tolist() == [
        *[True] * 3,
        *[False] * 2,
    ]


@pytest.mark.parametrize("kind", ["date", "last"])
def test_a_log_that_has_grown_is_learned_whole_where_the_split_is_by_time(models: Path, tmp_path: Path, kind: str) -> None:
    """What came after the dates of the training is what the fold is for; of the training log, what was learned is learned again."""
    bundle, times = Bundle.open(models / "planted" / "1"), {"timestamp": "time", "timestamp_type": "integer", "order": "timestamp"}
    lines = [f"user-{user},item-{(user + step) % 9},{100 * step + user}" for user in range(40) for step in range(6)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,time", *lines]))
    data = bundle.manifest.training["data"]
    training = bundle.manifest.training | {"data": data | {"format": data["format"] | times, "split": {"kind": kind}}}

    def learned(name: str, **known: Any) -> tuple[int, str | None]:
        manifest = bundle.manifest.model_copy(update={"training": training, "data": bundle.manifest.data | known})
        (tmp_path / name).mkdir()
        split = learned_fold.read_split(replace(bundle, manifest=manifest), tmp_path / "log.csv", tmp_path / name)
        return int(np.diff(split.lists.offset_U1)[split.train].sum()), split.lists.fingerprint

    events, fingerprint = learned("grown")
    assert events == len(lines)
    of_training, of_last = (learned(f"same-{late}", sha256=fingerprint, learned_validation=late)[0] for late in (False, True))
    assert 0 < of_training < of_last < len(lines)


def test_an_event_of_an_ordered_list_has_what_came_before_it(split: Split, tmp_path: Path) -> None:
    found = fold_log(split, items_of(put(1, "new")), table("i0", "i1", "i2", "new"), tmp_path)
    of_n, histories = found.events_of(np.array([2, 3, 0]), 5, np.random.default_rng(0))
    assert (of_n.tolist(), [history.tolist() for history in histories]) == ([0], [[0, 1]])
    assert {tuple(history.tolist()) for history in found.draw_histories(20, np.random.default_rng(0))} == {(0,), (0, 1)}


def test_an_event_of_a_list_without_an_order_has_all_others(split: Split, tmp_path: Path) -> None:
    split = replace(split, lists=replace(split.lists, order="none"))
    found = fold_log(split, items_of(put(1, "new")), table("i0", "i1", "i2", "new"), tmp_path)
    of_n, histories = found.events_of(np.array([0, 2]), 1, np.random.default_rng(0))
    assert (of_n.tolist(), [history.tolist() for history in histories]) == ([0, 1], [[1, 2], [0, 1]])


def test_no_more_events_of_an_item_are_drawn_than_are_wanted(tmp_path: Path) -> None:
    log = log_of([[user % 3, 3, 4] for user in range(12)] + [[0, 1]] * 2)
    found = fold_log(split_of(log, 12, 1, 1), items_of(put(1, "new")), table("i0", "i1", "i2", "i3", "i4"), tmp_path)
    of_n, histories = found.events_of(np.array([3, 4]), 5, np.random.default_rng(3))
    assert np.bincount(of_n).tolist() == [5, 5]
    assert {len(history) for history in histories} == {1, 2}


# -- the memory ---------------------------------------------------------------------------------------------------------------


FORMULA = MemoryFormula(row=0.5, column=0.5, power=1.0, shrink=0, user=0, back=1, decay=1, window=2000, unit=0.5)


def memory_of(items: int, entries: dict[tuple[int, int], float]) -> Memory:
    """With these values of S."""
    pairs = sorted(entries)
    offset = np.append(0, np.cumsum(np.bincount([source for source, _ in pairs], minlength=items)))
    item, value = np.array([target for _, target in pairs], np.int32), np.array([entries[pair] for pair in pairs], np.float16)
    return Memory(offset.astype(np.int64), item, value, np.ones(4, np.float32), key_weight=1.0, formula=FORMULA)


def counted(
    folder: Path,
    split: Split,
    journal: JournalItems,
    ids: Sequence[str],
    entries: dict[tuple[int, int], float],
    counts: Sequence[int] | None = None,
) -> tuple[list[int], Memory]:
    """The counts and the memory of a fold of these items, of a bundle with these entries and counts."""
    rng = np.random.default_rng(0)
    bundle = make_bundle(folder / "bundle", rng, tree_over(rng, len(ids), 2), "product", memory=memory_of(len(ids), entries))
    content = content_of(bundle)
    assert isinstance(content, GraphContent)
    content = replace(content, items=table(*ids), counts=None if counts is None else LabelCounts(np.array(counts), sum(counts)))
    (folder / "work").mkdir()
    after = with_new_counts(content, fold_log(split, journal, content.items, folder / "work"), stated_counts(journal, content.items))
    assert after.counts is not None
    assert after.memory is not None
    after.memory.check(len(ids))
    return after.counts.counts_I.tolist(), after.memory


def test_entries_and_counts_are_those_of_the_lists_and_placed_ones_stay_where_they_know_more(split: Split, tmp_path: Path) -> None:
    ids = ["i0", "i1", "i2", "few", "many", "like"]
    journal = items_of(put(1, "few", events=(["i0"],)), put(2, "many", events=(["i1"],), count=9), put(3, "like", like=("i2",)))
    entries = {(0, 1): 9.0, (0, 2): 1.0, (0, 3): 7.0, (1, 4): 5.0, (2, 5): 3.0, (2, 3): 8.0}
    counts, memory = counted(tmp_path, split, journal, ids, entries, [7, 1, 1, 3, 9, 2])
    assert counts == [2, 2, 1, 3, 9, 2], "the log's items as the lists have them, others as they were placed"
    assert memory.value_of(0, 1) == pytest.approx(1 / 2 / FORMULA.unit, rel=1e-3), "they are in one list"
    assert memory.value_of(0, 3) == pytest.approx(1 / 2**0.5 / FORMULA.unit, rel=1e-3)
    assert memory.value_of(2, 3) == 0, "no list holds both"
    assert memory.value_of(1, 4) == 5, "made with its count"
    assert memory.value_of(2, 5) == 3, "made without events"


@pytest.mark.parametrize("name", ["near", "slim"])
def test_what_lists_added_beside_counts_they_add_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = split_of(log_of([[0, 1], [1, 2], [0, 1, 3], [1, 2, 3], [4, 5], [4, 5], [0, 3], [1, 3]]), 6, 1, 1)
    no_lists = NeighbourLists(np.zeros(7, np.int64), np.empty(0, np.int32), np.empty(0, np.float32), np.arange(6))
    ids, entries, found = [f"i{item}" for item in range(6)], {(0, item): 1.0 for item in range(1, 6)}, []
    for weight in (0.0, 0.5):
        formula = MemorySource(no_lists, 1.0, WITHOUT_ORDER | {name: weight}).memory(1, 1.0, 1).formula
        assert formula is not None
        monkeypatch.setattr(f"{__name__}.FORMULA", formula.model_copy(update={"unit": 0.5}))
        (tmp_path / str(weight)).mkdir()
        _, memory = counted(tmp_path / str(weight), split, items_of(put(1, "i5", events=(["i4"],))), ids, entries)
        found.append(memory.value_of(0, 1))
    assert found[0] < found[1]


def test_no_item_is_taken_to_be_more_popular_than_the_most_popular_one(split: Split, tmp_path: Path) -> None:
    """One number that somebody sends would take all of a softmax else."""
    journal = items_of(put(1, "i0", events=(["i1"],), count=10**9))
    counts, _ = counted(tmp_path, split, journal, ["i0", "i1", "i2"], {(0, 1): 1.0}, [1, 5, 1])
    assert counts == [5, 1, 1]


def test_an_item_has_as_many_counted_neighbours_as_the_memory_of_before_had_at_most(tmp_path: Path) -> None:
    """The closest ones; two are what training found to be enough."""
    log = log_of([[0, 1, 2, 3]] + [[0, 1, 2]] * 2 + [[0, 1]] * 2 + [[0, 3]] * 2)
    _, memory = counted(tmp_path, split_of(log, 5, 1, 1), items_of(put(1, "i0")), ["i0", "i1", "i2", "i3"], {(3, 1): 1.0, (3, 2): 1.0})
    assert np.diff(memory.offset).tolist() == [2, 2, 2, 2]
    assert memory.item[: memory.offset[1]].tolist() == [1, 2]


def test_what_is_counted_and_what_was_placed_are_together_no_more_than_a_bundle_may_hold(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier.memory.MAX_ROW", 2)
    ids = ["i0", "i1", "i2", "one", "two"]
    journal = items_of(put(1, "one", like=("i0",)), put(2, "two", like=("i0",)))
    _, memory = counted(tmp_path, split, journal, ids, {(0, 3): 0.5, (0, 4): 7.0})
    assert memory.item[: memory.offset[1]].tolist() == [1, 4], "the largest, of which i1 is counted"


def trained_items(items: int = 10, through: int | None = None) -> TrainedItems:
    return TrainedItems(items=items, created=datetime.now(UTC), through=through)


@pytest.mark.parametrize(
    ("live", "ids"),
    [
        (None, ["i0", "i2", "new"]),
        (LiveInfo(through=7), ["i1", "i2", "new"]),
        (LiveInfo(through=12, folded_from=2, trained=trained_items(through=7)), ["i1", "i2", "new"]),
        (LiveInfo(through=12, folded_from=2, trained=trained_items()), ["i0", "i2", "new"]),
        (LiveInfo(through=12, folded_from=2, trained=trained_items(items=1)), ["i0", "i1", "i2", "new", "i4"]),
    ],
)
def test_rows_are_learned_of_items_whose_evidence_training_did_not_have(tmp_path: Path, live: LiveInfo | None, ids: list[str]) -> None:
    bundle = random_product(tmp_path, np.random.default_rng(0))
    if live is not None and live.trained is not None:
        live = live.model_copy(update={"trained": live.trained.model_copy(update={"created": bundle.manifest.created})})
    bundle = replace(bundle, manifest=bundle.manifest.model_copy(update={"live": live}))
    old, new = bundle.manifest.created.timestamp() - 1, bundle.manifest.created.timestamp() + 1
    bodies = {  # with the time of their evidence
        "i0": (7, ItemBody(like=("i5",)), new),
        "i1": (8, ItemBody(like=("i5",)), old),
        "i2": (9, ItemBody({"x": 1}, like=("i5",), evidence_from=(8, new)), new),
        "i3": (10, ItemBody({"x": 1}), new),
        "new": (11, ItemBody(like=("i5",)), old),
        "i4": (12, ItemBody({"x": 1}, like=("i5",), evidence_from=(2, old)), new),
    }
    names = {f"i{row}": item_id for row, item_id in enumerate(bundle.items.ids_of(np.arange(6)))}
    operations = [Operation(seq, names.get(item, item), "put", body, at=at) for item, (seq, body, at) in bodies.items()]
    found = put_since_training(bundle, JournalItems.of(operations, 0.0))
    assert found == [names.get(item, item) for item in ids]


# -- rows -----------------------------------------------------------------------------------------------------------------------


def random_product(folder: Path, rng: np.random.Generator) -> Bundle:
    """A model of histories whose states are not all alike, with γ = ½."""
    return make_bundle(folder, rng, random_tree(rng, 3, 4, empty_share=0.1), "product", gamma=0.5, integer=False)


def shares(bundle: Bundle, histories: list[Int64], rows_ND: Float64) -> tuple[Float64, Float64]:
    """float64[B, leaves] and float64[B, S], leaf by leaf: softmax shares by the ranks along paths, and states on the leaf level."""
    kind, tree = bundle.manifest.query, bundle.tree
    assert isinstance(kind, HistoryKind)
    states = QueryEncoder.open(bundle).states(pad_histories(kind, histories).array, [0] * len(histories)).astype(np.float64)
    ranks = np.full((len(histories), tree.leaf_count), -np.inf)
    for leaf in range(tree.leaf_count):
        if tree.leaf_item[leaf] < 0:
            continue
        path = tree.ancestors(np.array([tree.leaf_offset + leaf]))[0].tolist()
        ranks[:, leaf] = 0
        for h, node in enumerate(path):
            if h:
                ranks[:, leaf] = bundle.manifest.ranking.gamma * ranks[:, leaf] + states[:, h] @ rows_ND[node]
    weights = np.exp(ranks - ranks.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True), states[:, -1]


@pytest.mark.parametrize("seed", range(3))
def test_fitted_rows_are_where_the_gradient_of_their_loss_is_zero(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "STEPS", 3000)
    rng = np.random.default_rng(seed)
    bundle = random_product(tmp_path, rng)
    histories = [rng.integers(0, len(bundle.items), rng.integers(1, 5)) for _ in range(30)]
    leaf_I = np.sort(rng.choice(bundle.tree.leaf_of_item, 3, replace=False))
    of_n = np.repeat(np.arange(3), [1, 2, 3])
    mean_IS, events_I = mean_states(bundle, of_n, histories[:6], 3)
    assert events_I.tolist() == [1, 2, 3]
    share_I = np.array([0.05, 0.1, 0.02], np.float32)
    rows_IS = fitted_rows(bundle, leaf_I, mean_IS, events_I, share_I, histories)
    rows_ND = np.asarray(bundle.node_rows_ND, np.float64).copy()
    start_IS, variance = rows_ND[leaf_I].copy(), rows_ND[np.setdiff1d(bundle.tree.leaf_of_item, leaf_I)].var(0).mean()
    rows_ND[leaf_I] = rows_IS
    share_BN, state_BS = shares(bundle, histories, rows_ND)
    expected_IS = share_BN[:, leaf_I - bundle.tree.leaf_offset].T @ state_BS / len(histories)
    prior_IS = (share_I / (events_I * variance))[:, None] * (rows_IS - start_IS) * (state_BS.std(0) > fitting.EQUAL)
    assert_allclose(expected_IS + prior_IS, share_I[:, None] * mean_IS, atol=2e-4 * np.abs(mean_IS).max())
    assert np.abs(rows_IS - start_IS).max() > 0.01


def test_rows_that_rank_far_above_all_others_are_fitted(tmp_path: Path) -> None:
    """Once they had outgrown the others from fold to fold, the sum of the others was 0, and all that followed was NaN."""
    rng = np.random.default_rng(0)
    tree = random_tree(rng, 3, 4)
    rows = rng.normal(size=(tree.node_count, 4)).astype(np.float32)
    leaf_I = tree.leaf_of_item[:2]
    rows[leaf_I] *= 1000
    bundle = make_bundle(tmp_path, rng, tree, "product", gamma=0.5, integer=False, rows=rows)
    histories = [rng.integers(0, len(bundle.items), 3) for _ in range(20)]
    mean_IS, events_I = mean_states(bundle, np.array([0, 1]), histories[:2], 2)
    fitted = fitted_rows(bundle, leaf_I, mean_IS, events_I, np.full(2, 0.05, np.float32), histories)
    assert np.isfinite(fitted).all()


# -- `espalier fold --log` --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`planted`, version 1, that a softmax has trained, with an item of cluster 0 that was put by an event of cluster 1."""
    folder = tmp_path_factory.mktemp("learned")
    product = {"kind": "product", "node_dim": 8, "hidden": [16]}
    bundle = trained_model(write_log(folder / "log.csv"), folder, kind="otm-robust", scorer=product, objective={"negatives": 20})
    writer = JournalOf(bundle)
    writer.put(f"item-{ITEMS}", placed=False, events=(["item-1", f"item-{1 + CLUSTERS}"],))
    writer.put("quiet", placed=False, like=("item-3",))
    return folder


def rank_of(bundle: Bundle, item: str, cluster: int) -> int:
    """At which place an item comes back for a history of a cluster, by a beam as wide as the tree; 100 where it does not."""
    kind = bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    history = bundle.items.rows_of([f"item-{cluster + CLUSTERS * i}" for i in range(4)])
    found = open_engine(bundle, "cpu").search(pad_histories(kind, [history]), SearchParams.uniform(1, 128, 64)).item_rows_BM[0]
    places = np.flatnonzero(found == bundle.items.rows_of([item])[0])
    return int(places[0]) if len(places) else 100


def test_a_fold_finds_live_items_where_the_log_says_that_they_belong(models: Path) -> None:
    item, log = f"item-{ITEMS}", write_log(models / "today.csv", new=1)
    assert command("fold", "--model", models / "planted" / "1", "--out", models / "planted" / "2").status == 0
    assert command("fold", "--model", models / "planted" / "1", "--out", models / "planted" / "3", "--log", log).status == 0
    plain, after = (Bundle.open(models / "planted" / version) for version in "23")
    best_clusters = [int(np.argmin([rank_of(bundle, item, cluster) for cluster in range(CLUSTERS)])) for bundle in (after, plain)]
    assert best_clusters == [0, 1]
    assert "test" in plain.manifest.metrics
    assert "test" not in after.manifest.metrics, "the log of today may have the answers"
    assert command("fold", "--model", models / "planted/1", "--out", models / "planted/7", "--log", models / "log.csv").status == 0
    assert "test" in Bundle.open(models / "planted/7").manifest.metrics, "of the training log"
    counts = after.label_counts()
    assert counts is not None
    assert counts.counts_I[after.items.rows_of([item])[0]] > 10
    assert after.items.rows_of(["quiet"])[0] >= 0
    leaf = after.tree.leaf_of_item[after.items.rows_of([item])[0]]
    others = np.delete(np.arange(after.tree.node_count), leaf)
    assert_array_equal(np.asarray(after.node_rows_ND)[others], np.asarray(plain.node_rows_ND)[others])
    assert not list((models / "planted").glob(".3.*")), "no work folder is left"


def test_a_live_item_has_the_share_of_all_its_events_though_its_row_is_fitted_to_some(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def noted(bundle: Bundle, *given: Any) -> Float32:
        seen.append(given)
        return fitted_rows(bundle, *given)

    monkeypatch.setattr(learned_fold, "MOST_EVENTS", 4)
    monkeypatch.setattr(learned_fold, "fitted_rows", noted)
    log = write_log(models / "today.csv", new=1)
    assert command("fold", "--model", models / "planted" / "1", "--out", models / "planted" / "4", "--log", log).status == 0
    after = Bundle.open(models / "planted" / "4")
    counts = after.label_counts()
    assert counts is not None
    count = counts.counts_I[after.items.rows_of([f"item-{ITEMS}"])[0]]
    assert count > 10
    ((_, _, events_I, share_I, _),) = seen
    assert events_I.tolist() == [4]
    assert_allclose(share_I, count / counts.counts_I.sum(), rtol=1e-6)


def test_neighbours_answer_a_new_user_with_what_is_popular_in_the_log_of_the_fold(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv")
    bundle = exported({"kind": "neighbours", "name": "counted", "data": {"log": str(log)}}, tmp_path / "counted" / "1")
    JournalOf(bundle).put("new", placed=False, events=(["item-1", f"item-{1 + CLUSTERS}"],), count=1)
    new_users = [f"{kind}-{user},{item}" for kind, item in (("a", "item-7"), ("b", "new")) for user in range(900)]
    (tmp_path / "today.csv").write_text(log.read_text() + "".join(f"{line}\n{line.split(',')[0]},item-5\n" for line in new_users))
    outcome = command("fold", "--model", bundle.path, "--out", tmp_path / "counted" / "2", "--log", tmp_path / "today.csv")
    assert outcome.status == 0, outcome.err
    after = Bundle.open(tmp_path / "counted" / "2")
    kind = after.manifest.query
    assert isinstance(kind, HistoryKind)
    found = open_engine(after, "cpu").search(pad_histories(kind, [np.empty(0, np.int64)]), SearchParams.uniform(1, 3, 3))
    assert_array_equal(np.sort(found.item_rows_BM[0]), np.sort(after.items.rows_of(["item-5", "item-7", "new"])))


@pytest.mark.parametrize("content", ["user,item\na,1\na,2\n", "other,columns\n1,2\n", ""])
def test_a_log_that_says_nothing_ends_a_fold_and_leaves_nothing(models: Path, content: str) -> None:
    (models / "nothing.csv").write_text(content)
    outcome = command("fold", "--model", models / "planted" / "1", "--out", models / "planted" / "9", "--log", models / "nothing.csv")
    assert outcome.status == 1
    assert outcome.err.splitlines()[-1].startswith("error: ")
    assert not [path.name for path in (models / "planted").iterdir() if path.name.lstrip(".").startswith("9")]
