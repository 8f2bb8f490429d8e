"""Where live items go and with what row: by events, by items that they are like, by texts and fields; and which items are near."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_memory, sparse_rows
from espalier.arrays import Float64
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.linear.chunk_search import L3_HINGE, BeamParams, ChunkSearch
from espalier.errors import EspalierError, InvalidQuery
from espalier.label_counts import LabelCounts
from espalier.live.operations import ItemBody
from espalier.live.rows import LiveRow, Placement
from espalier.live.state import Change, LiveState
from espalier.manifest import MemoryFormula, Ranking
from espalier.memory import LARGEST_VALUE, Memory
from espalier.node_rows import rounded
from espalier.placement import graph_rows
from espalier.placement.graph_placement import GraphPlacement
from espalier.placement.graph_rows import NEAREST, NO_SHIFTS, Background, NearRows, RowScale, Trial, Trials, scale_of, trial_items
from espalier.placement.memory_rows import MOST as MOST_NAMED
from espalier.placement.memory_rows import MemoryRows
from espalier.placement.near_items import NO_NEIGHBOUR, NearItems
from espalier.placement.parents import MOST, best_first, votes_of_search
from espalier.placement.placer import Candidates, Placer
from espalier.placement.popularity import MOST_EVENTS, Popularity
from espalier.queries import HistoryKind, QueryBatch, VectorKind, encode_histories, pad_histories
from espalier.search import Frontier, SearchParams, SearchResult
from espalier.text.sparse_rows import SparseRows
from espalier.tree import complete_tree
from tests.training.logs import log_of
from training.deep.memory import FORMULA
from training.neighbours.fit import fit_neighbours
from training.retrieval.tuning import Options

Dtype = Literal["float32", "float16", "int8"]


def product_bundle(folder: Path, seed: int = 1, with_memory: bool = False, name: str = "tiny", dtype: Dtype = "float32") -> Bundle:
    """Histories, an inner product, six held-out queries."""
    rng = np.random.default_rng(seed)
    tree = complete_tree(rng.permutation(64), 4)
    memory = random_memory(rng, 64, 5, integer=False) if with_memory else None
    bundle = make_bundle(folder, rng, tree, "product", gamma=0.5, integer=False, memory=memory, name=name, width=6, dtype=dtype)
    heldout = [[f"item-{row}" for row in rng.permutation(64)[:4]] for _ in range(6)]
    table = pa.table({"history": heldout, "relevant": [[f"item-{row}"] for row in rng.permutation(64)[:6]]})
    pq.write_table(table, bundle.path / "heldout.parquet")
    return Bundle(bundle.path, bundle.manifest)


def placed(bundle: Bundle, *bodies: ItemBody, state: LiveState | None = None) -> list[Candidates]:
    state = LiveState(bundle) if state is None else state
    engine = open_engine(bundle, "cpu")
    engine.set_overlay(state.overlay())
    found = Placer(bundle).place(bodies, state.table, state.overlay(), engine.parents)
    assert not [one for one in found if isinstance(one, EspalierError)]
    return [one for one in found if not isinstance(one, EspalierError)]


def first(candidates: Candidates, tree: int = 0) -> tuple[int, LiveRow]:
    return next(iter(candidates[tree]))


def error_of(bundle: Bundle, body: ItemBody) -> EspalierError:
    (found,) = Placer(bundle).place([body], bundle.items, LiveState(bundle).overlay(), open_engine(bundle, "cpu").parents)
    assert isinstance(found, EspalierError)
    return found


# -- histories --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_memory", [False, True])
def test_an_item_is_found_by_the_queries_that_led_to_it(tmp_path: Path, with_memory: bool) -> None:
    bundle = product_bundle(tmp_path, with_memory=with_memory)
    events = (("item-3", "item-9"), ("item-3", "item-20", "item-9"))
    state, engine = LiveState(bundle), open_engine(bundle, "cpu")
    parent, row = first(placed(bundle, ItemBody(events=events))[0])
    state.apply([Change(1, "new", "put", {}, (Placement(0, parent, state.next_slot(0, parent), row),))])
    engine.set_overlay(state.overlay())
    queries = encode_histories(HistoryKind(length=5), bundle.items, events)[0]
    rows_BM = engine.search(queries, SearchParams.uniform(2, 16, 20)).item_rows_BM
    assert (rows_BM == 64).any(1).all()


def test_the_same_evidence_gives_the_same_rows_alone_and_among_others_and_whatever_else_is_live(tmp_path: Path) -> None:
    bundle = product_bundle(tmp_path, with_memory=True)
    body, other = ItemBody(events=(("item-3", "item-9"),)), ItemBody(events=(("item-5",), ("item-6",)), like=("item-1",))
    alone = placed(bundle, body)[0]
    state = LiveState(bundle)
    parent, row = first(alone)
    state.apply([Change(1, "new", "put", {}, (Placement(0, parent, state.next_slot(0, parent), row),))])
    among = placed(bundle, other, body, other, state=state)[1]
    assert [node for node, _ in alone[0]] == [node for node, _ in among[0]]
    for (_, one), (_, two) in zip(alone[0], among[0], strict=True):
        assert one.to_bytes() == two.to_bytes()


def test_a_live_item_in_an_event_is_in_the_memory(tmp_path: Path) -> None:
    bundle = product_bundle(tmp_path, with_memory=True)
    state = LiveState(bundle)
    far = LiveRow(np.full(6, 3, np.float32))
    state.apply([Change(1, "new", "put", {}, (Placement(0, 10, state.next_slot(0, 10), far),))])
    without, with_it = placed(bundle, ItemBody(events=(("item-3",),)), ItemBody(events=(("item-3", "new"),)), state=state)
    assert "new" in dict(first(with_it)[1].memory_from)
    assert "new" not in dict(first(without)[1].memory_from)
    assert dict(first(with_it)[1].memory_to).keys() == {"item-3", "new"}
    assert not first(placed(bundle, ItemBody(like=("item-3",)))[0])[1].memory_to  # nothing is known of what goes before it


def test_an_item_like_another_has_its_parent_and_nearly_its_row(tmp_path: Path) -> None:
    bundle = product_bundle(tmp_path)
    tree = bundle.tree
    leaf = int(tree.leaf_of_item[7])
    parent, row = first(placed(bundle, ItemBody(like=("item-7",)))[0])
    assert parent == tree.parent[leaf]
    siblings = np.arange(tree.first_child[parent], tree.first_child[parent + 1])
    expected = (bundle.node_rows_ND[leaf] + bundle.node_rows_ND[siblings].mean(0)) / 2
    assert_allclose(row.values, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_row_is_rounded_to_what_the_bundle_stores(tmp_path: Path, dtype: Dtype) -> None:
    bundle = product_bundle(tmp_path, dtype=dtype)
    _, row = first(placed(bundle, ItemBody(like=("item-7", "item-9", "item-11")))[0])
    values_D = np.asarray(row.values, np.float32)
    assert_array_equal(rounded(values_D[None], dtype)[0], values_D)
    assert (dtype == "float32") == bool(np.any(rounded(values_D[None], "float16")[0] != values_D))


def test_an_item_like_others_goes_with_them_and_with_what_goes_with_them(tmp_path: Path) -> None:
    """Its memory is that of the items that it is like; a live one is one of them, too."""
    bundle = product_bundle(tmp_path, with_memory=True)
    memory, state = bundle.memory, LiveState(bundle)
    assert memory is not None
    rows = [dict(zip(memory.item[a:b].tolist(), memory.value[a:b].tolist(), strict=True)) for a, b in pairwise(memory.offset.tolist())]
    far = LiveRow(np.full(6, 3, np.float32))
    state.apply([Change(1, "live", "put", None, (Placement(0, 10, state.next_slot(0, 10), far),))])
    lifted = dict(first(placed(bundle, ItemBody(like=("item-3", "item-9", "live")), state=state)[0])[1].memory_from)
    assert {"item-3", "item-9", "live"} <= lifted.keys()
    for row, own in enumerate(rows):
        most = max(own.get(3, 0), own.get(9, 0))
        assert lifted.get(f"item-{row}", 0) >= most if row in (3, 9) else lifted.get(f"item-{row}", 0) == pytest.approx(most)
    without = first(placed(bundle, ItemBody(events=(("item-5",),)))[0])[1].memory_from
    both = dict(first(placed(bundle, ItemBody(events=(("item-5",),), like=("item-3",)))[0])[1].memory_from)
    assert dict(without).keys() | {"item-3"} <= both.keys()


def test_no_evidence_makes_a_row_that_is_longer_than_trained_ones(tmp_path: Path) -> None:
    bundle = product_bundle(tmp_path)
    longest = max(np.linalg.norm(bundle.node_rows_ND[bundle.tree.leaf_of_item], axis=1))
    bodies = [ItemBody(events=((f"item-{i}",),) * 20, like=(f"item-{i + 1}",)) for i in range(20)]
    for candidates in placed(bundle, *bodies):
        for _, row in candidates[0]:
            assert np.linalg.norm(row.values[:-1]) <= 2 * longest


def test_without_an_inner_product_a_row_is_the_mean_of_what_is_found(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, np.random.default_rng(3), complete_tree(np.arange(64), 4), gamma=0.5, integer=False)
    parent, row = first(placed(bundle, ItemBody(events=(("item-3", "item-9"),) * 50))[0])
    queries = pad_histories(HistoryKind(length=5), [np.array([3, 9])])
    found = open_engine(bundle, "cpu").search(queries, SearchParams.uniform(1, 32, 10)).item_rows_BM[0]
    mean = bundle.node_rows_ND[bundle.tree.leaf_of_item[found]].mean(0)
    siblings = np.arange(bundle.tree.first_child[parent], bundle.tree.first_child[parent + 1])
    assert_allclose(row.values, (50 * mean + bundle.node_rows_ND[siblings].mean(0)) / 51, rtol=1e-4, atol=1e-6)


# -- rows -------------------------------------------------------------------------------------------------------------------


def test_a_row_lies_in_the_direction_of_its_queries_as_far_from_the_mean_as_trained_ones() -> None:
    rng = np.random.default_rng(2)
    tree = complete_tree(np.arange(16), 4)
    rows_ND = rng.normal(size=(tree.node_count, 4)).astype(np.float32)
    states_BS = np.column_stack([rng.normal(size=(9, 3)), np.ones(9)]).astype(np.float32)
    scale = scale_of(tree, rows_ND, states_BS)
    leaf_rows = rows_ND[tree.leaf_offset :]
    assert scale.is_free_S.tolist() == [True, True, True, False]
    assert scale.row_S[3] == pytest.approx(np.median(leaf_rows[:, 3]))
    state = states_BS.mean(0) + np.array([3, 0, 0, 0])
    row = scale.row_of_events(state)
    distance = np.median(np.linalg.norm(leaf_rows[:, :3] - leaf_rows[:, :3].mean(0), axis=1))
    assert_allclose(row[:3] - scale.row_S[:3], [distance, 0, 0], atol=1e-5)
    assert_allclose(scale.shifted(row, 2.0) - row, [0, 0, 0, 2], atol=1e-6)
    assert scale.shifted(row, 0.0) is row


def test_a_row_by_content_has_the_length_and_the_biases_of_trained_ones() -> None:
    scale = RowScale(np.zeros(3), np.array([1.0, 1.0, 7.0]), np.array([True, True, False]), 2.0, 3.0)
    assert_allclose(scale.row_of_content(np.array([1.0, 1.5, -9.0])), [1, 3, 7])
    assert_allclose(scale.row_of_content(scale.row_S), scale.row_S)


def test_the_nearest_rows_are_those_of_the_same_direction_and_an_item_is_not_its_own_neighbour() -> None:
    rng = np.random.default_rng(2)
    scale = RowScale(np.zeros(3), np.ones(3), np.array([True, True, False]), 2.0, 3.0)
    rows_ND = rng.normal(size=(40, 3)).astype(np.float32)
    rows_ND[30], rows_ND[31] = [3, 3, -50], [1.5, 1.4, 50]  # biases have no direction
    near = NearRows(rows_ND, np.arange(10, 40), scale)
    items, cosine = near.of(np.array([2.0, 2.0, 0.0]))
    assert (len(items), items[0], cosine[0]) == (NEAREST, 20, pytest.approx(1))
    assert 21 in items
    assert (np.diff(cosine) <= 0).all()
    others, _ = near.of(np.array([2.0, 2.0, 0.0]), 20)
    assert len(others) == NEAREST
    assert others[:-1].tolist() == items[1:].tolist()


def trial_of(gaps: Float64, found: int) -> tuple[Background, Trial]:
    """A query for each gap, and an item under the one parent in all beams, which came back for some of them when it was trained."""
    batch = len(gaps)
    frontier = Frontier(np.full((batch, 1), 5), np.zeros((batch, 1), np.float32))
    found_BM = np.full((batch, 1), 3)
    found_BM[:found] = 7
    trial = Trial(7, [], np.zeros(1), 5, lambda count: (np.empty(0, np.int64), np.empty(0)))
    return Background(None, frontier, np.zeros((batch, 1), np.float32), found_BM, gaps.astype(np.float32), []), trial


@pytest.mark.parametrize(("share", "closed"), [(0.0, 0), (0.25, 1), (1.0, 7), (8.0, 63), (64.0, 79)])
def test_the_more_an_item_is_wanted_the_more_often_it_comes_back(share: float, closed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_rows, "EXPLORED", 1.0)
    background, trial = trial_of(np.arange(160.0), found=80)
    ranking = Ranking(own="logit", gamma=0.0)
    shifts = Trials.of(background, [trial], ranking).shifts(background, 20, ranking)
    assert shifts.mean == 8, "the mean item comes back for 8 of 160 queries"
    assert shifts.of(share) == closed
    assert NO_SHIFTS.of(share) == 0


def test_what_lifts_an_item_is_not_made_good_by_its_shift() -> None:
    """Queries that lack 10, and hold item 4 in the last or the last but one place of their histories, or not."""
    history_BT = np.array([[3, 4], [4, 3], [3, 3]])
    memory = Memory(np.zeros(6, np.int64), np.empty(0, np.int32), np.empty(0, np.float16), np.array([1, 0.5], np.float32), 2.0)
    background, trial = trial_of(np.full(3, 10.0), found=1)
    background = replace(background, history_BT=history_BT, memory=memory)
    lifted = replace(trial, memory=lambda count: (np.array([4]), np.array([count])))
    ranking = Ranking(own="logit", gamma=0.0)
    trials = Trials.of(background, [lifted], ranking)
    assert trials.shifts(background, 20, ranking, 0.5).gap_G.tolist() == [9, 9.5, 10]
    assert trials.shifts(background, 20, ranking, 3.0).gap_G.tolist() == [4, 7, 10]


def test_trials_have_as_much_evidence_as_there_is_at_hand() -> None:
    """Items 0 … 39 that 1 … 40 queries look for."""
    relevant = [np.arange(query, 40) for query in range(40)]
    found = trial_items(relevant, 100, 5)
    assert [item for item, _ in found] == list(range(4, 40)), "those of at least five queries"
    assert {len(queries) for _, queries in found} == {5}
    few = trial_items(relevant, 100, 30)
    assert [item for item, _ in few] == list(range(8, 40)), "too few have thirty: those of the most"
    assert [len(queries) for _, queries in few] == [min(30, item + 1) for item in range(8, 40)]
    assert len(trial_items(relevant, 10, 5)) == 10
    assert trial_items([], 10, 5) == []


def test_an_item_is_as_popular_as_its_events_and_those_of_others_say() -> None:
    counts_I = np.array([1, 3, 5, 5, 10, 100, 300])
    popularity = Popularity(LabelCounts(counts_I, 1000))
    assert popularity.count(4, None) == pytest.approx((4 + (5 + 5 + 10 + 100 + 300) / 5) / 2)
    assert popularity.count(0, None) == pytest.approx(counts_I.mean()), "nobody knows anything"
    assert popularity.count(MOST_EVENTS, None) == 200, "there may be more than were sent"
    assert popularity.count(MOST_EVENTS - 1, None) == (63 + 200) / 2
    assert popularity.count(64, 64) == 64
    assert popularity.count(4, 2**53) == 300, "as the most popular trained one, so that one number does not ruin the means"
    assert Popularity(None).count(4, 1000) == 1000
    assert popularity.count(4, 9) == 9
    assert popularity.count(4, 2) == 4, "events that are stored are events"
    assert popularity.count(500, None) == 500
    shares = [popularity.share(count) for count in (0, 5, counts_I.mean(), 300)]
    assert shares == sorted(shares)
    assert shares[2] == pytest.approx(1)
    assert 0 < shares[0] < shares[1] < 5 / counts_I.mean() + 0.05, "few events are nearly all that there is to know"
    assert popularity.counts_of(np.array([5, 99, 0])).tolist() == [100, counts_I.mean(), 1]


def test_items_of_equal_or_unknown_counts_are_all_alike() -> None:
    assert Popularity(LabelCounts(np.zeros(4, np.int64), 0)).count(2, 1000) == 1000
    for counts in (None, LabelCounts(np.full(4, 7), 28), LabelCounts(np.zeros(4, np.int64), 0)):
        assert [Popularity(counts).share(count) for count in (0.0, 5.0, 500.0)] == [1, 1, 1]


ORDERED: Options = {
    "recency": 0.9,
    "back": 0.25,
    "decay": 0.7,
    "near": 0.0,
    "slim": 0.0,
    "l2": 1.0,
    "column": 0.3,
    "row": 0.6,
    "power": 0.8,
    "user": 0.5,
    "shrink": 2.0,
}
WITHOUT_ORDER: Options = ORDERED | {"recency": 1.0, "back": 1.0, "decay": 1.0, "window": 50, "longest": 50}


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("share", [1, 2])
def test_events_of_a_new_item_give_what_training_would_have_counted(ordered: bool, share: int) -> None:
    """S with the item, from all lists; and from the lists before it came and its events, all or every second of equal ones."""
    rng = np.random.default_rng(8)
    options = ORDERED | {"window": 3, "longest": 20} if ordered else WITHOUT_ORDER
    lists = [rng.permutation(9)[: rng.integers(3, 7)].tolist() for _ in range(60)]
    with_new = [[*rows, 9] for rows in lists[:10] for _ in range(2)]
    trained = fit_neighbours(log_of([*with_new, *lists[10:]], items=10), np.arange(70), options, 0)
    found, pairs = trained.lists, dict[tuple[int, int], float]()
    for a, (begin, end) in enumerate(pairwise(found.offset_I1.tolist())):
        pairs |= {
            (a, b): value for b, value in zip(found.item_N[begin:end].tolist(), found.score_N[begin:end].tolist(), strict=True) if value
        }
    formula = MemoryFormula(**{name: options[name] for name in FORMULA}, unit=0.01)
    memory = Memory(np.zeros(10, np.int64), np.empty(0, np.int32), np.empty(0, np.float16), np.ones(3, np.float32), 1, formula=formula)
    rows = MemoryRows(memory, Popularity(LabelCounts(trained.events_I[:9], int(trained.events_I.sum()))))
    events_ET = np.asarray(pad_histories(HistoryKind(length=8), [np.array(row[:-1]) for row in with_new[::share]]).array, np.int64)
    lifting, lifted = (dict(zip(items.tolist(), (values * 0.01).tolist(), strict=True)) for items, values in rows.of(events_ET, 20))
    assert lifting == pytest.approx({a: value for (a, b), value in pairs.items() if b == 9}, rel=1e-5)
    assert lifted == pytest.approx({b: value for (a, b), value in pairs.items() if a == 9}, rel=1e-5)


def test_events_count_for_what_a_regression_would_add_too() -> None:
    formula = MemoryFormula(**{name: WITHOUT_ORDER[name] for name in FORMULA}, unit=0.5)
    memory = Memory(np.zeros(4, np.int64), np.empty(0, np.int32), np.empty(0, np.float16), np.ones(2, np.float32), 1, formula=formula)
    regressed = replace(memory, formula=formula.model_copy(update={"slim": 3.0}))
    plain, more = (MemoryRows(each, Popularity(None)).of(np.array([[0, 1]]), 5) for each in (memory, regressed))
    for direction in (0, 1):
        assert_allclose(more[direction][1], 4 * plain[direction][1])


def test_without_a_formula_events_say_nothing_to_a_memory() -> None:
    memory = Memory(np.zeros(4, np.int64), np.empty(0, np.int32), np.empty(0, np.float16), np.ones(2, np.float32), 1)
    assert [len(rows) for rows, _ in MemoryRows(memory, Popularity(None)).of(np.array([[0, 1]]), 5)] == [0, 0]


def test_a_memory_names_the_largest_entries_and_holds_them_as_they_are_stored() -> None:
    formula = MemoryFormula(row=0, column=0, power=1, shrink=0, user=0, back=0, decay=0.5, window=1000, unit=1e-6)
    memory = Memory(np.zeros(601, np.int64), np.empty(0, np.int32), np.empty(0, np.float16), np.ones(2, np.float32), 1, formula=formula)
    lifting, lifted = MemoryRows(memory, Popularity(None)).of(np.arange(600)[None], 5)
    assert lifting[0].tolist() == list(range(600 - MOST_NAMED, 600))
    assert lifting[1].max() == LARGEST_VALUE
    assert not len(lifted[0]), "back is 0: nobody comes to others from it"


# -- linear scorers ---------------------------------------------------------------------------------------------------------


def features(*indices: int) -> dict[str, list[float]]:
    return {"indices": list(indices), "values": [1.0] * len(indices)}


def test_an_item_like_others_goes_with_what_they_go_with() -> None:
    values = np.array([5, 4, 6, 8], np.float16)
    memory = Memory(np.array([0, 3, 4, 4]), np.array([0, 1, 2, 1], np.int32), values, np.ones(2, np.float32), 1)
    memory_rows = MemoryRows(memory, Popularity(None))
    rows, lifted = memory_rows.of_like(np.array([1, 2]), np.array([0.5, 1.0]))
    assert rows.tolist() == [0, 1]
    assert_allclose(lifted, [6, 4])  # the larger of 0.5 · 4 and 1 · 6
    assert not len(memory_rows.of_like(np.empty(0, np.int64), np.empty(0))[0])


def test_a_linear_item_goes_where_a_search_with_its_events_goes(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    tree, other = (complete_tree(rng.permutation(27), 3) for _ in range(2))
    bundle = make_linear_bundle(tmp_path, rng, tree, L3_HINGE, integer=False, others=[other])
    (found,) = placed(bundle, ItemBody(events=(features(1, 3), features(3, 5))))
    query = np.zeros((1, 20))
    query[0, [1, 3, 5]] = np.array([1, 2, 1]) / np.sqrt(6)
    own = sparse_rows(query.astype(np.float32))
    for place, parents in enumerate(found):
        parent, row = next(iter(parents))
        assert row.feature.tolist() == [1, 3, 5]
        assert row.values[1] == pytest.approx(2 * row.values[0])
        search = ChunkSearch(*bundle.trees[place], bundle.manifest.ranking, last=2)
        assert parent == search.search(own, BeamParams.uniform(1, 9, 1)).leaves_BM[0, 0]
    assert len(found) == 2


def test_a_linear_item_like_others_has_the_mean_of_their_weights(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    bundle = make_linear_bundle(tmp_path, rng, complete_tree(rng.permutation(27), 3), L3_HINGE, integer=False)
    (found,) = placed(bundle, ItemBody(like=("item-3", "item-4")))
    tree, chunks = bundle.trees[0]
    every = np.arange(20, dtype=np.int32)
    leaves = tree.leaf_of_item[[3, 4]].tolist()
    expected = sum(chunks.weights_of(tree, leaf, every) for leaf in leaves) / 2
    dense = np.zeros(20)
    parent, row = first(found)
    dense[row.feature] = row.values
    kept = np.abs(expected) >= np.abs(np.asarray(chunks.entry_weight)).min()
    assert_allclose(dense, np.where(kept, expected, 0), atol=1e-5)
    assert parent in tree.parent[leaves]


# -- parents ----------------------------------------------------------------------------------------------------------------


def test_parents_are_ordered_by_what_all_events_say() -> None:
    frontier = Frontier(np.array([[5, 6, 9], [6, 7, -1]]), np.log(np.array([[0.6, 0.3, 0.1], [0.9, 0.1, 1]], np.float32)))
    frontier.ranks_BK[1, 2] = -np.inf
    assert best_first([(1.0, votes_of_search(frontier, [0, 1]))]).tolist() == [6, 5, 7, 9]
    assert best_first([(1.0, votes_of_search(frontier, [0]))]).tolist() == [5, 6, 9]
    root = Frontier(np.array([[0, -1]]), np.zeros((1, 2), np.float32))  # of a tree of one level
    assert best_first([(1.0, votes_of_search(root, [0]))]).tolist() == [0]
    many = np.arange(100), np.ones(100)
    assert best_first([(1.0, many)]).tolist() == list(range(MOST))


# -- what is wrong ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (ItemBody(), "events or like is missing; expected evidence to place the item by"),
        (ItemBody(fields={"title": "x"}), "events or like is missing; expected evidence"),
        (ItemBody(events=(("nowhere",),)), "events: got .* expected something that the model knows"),
        (ItemBody(like=("nowhere",)), "like: got .* expected something that the model knows"),
        (ItemBody(events=(("item-1",), "item-2")), r"events\[1\]: got 'item-2', expected a list of item ids, oldest first"),
        (ItemBody(events=((1, 2),)), r"events\[0\]: got .* expected a list of item ids"),
        (ItemBody(text="a lamp"), "events or like is missing; expected evidence .*; this model reads no text"),
    ],
)
def test_evidence_that_says_nothing_is_named(tmp_path: Path, body: ItemBody, message: str) -> None:
    error = error_of(product_bundle(tmp_path), body)
    assert isinstance(error, InvalidQuery)
    with pytest.raises(InvalidQuery, match=message):
        raise error


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"indices": [20], "values": [1.0]}, r"events\[0\].features.indices: got 20, expected feature numbers from 0 to 19"),
        ({"indices": [1]}, r"events\[0\]: got .* expected an object of the lists indices and values"),
        ({"indices": [1], "values": ["a"]}, r"events\[0\].values"),
        ({"indices": [], "values": []}, "events: got .* expected something that the model knows"),
    ],
)
def test_events_of_features_are_checked(tmp_path: Path, event: object, message: str) -> None:
    rng = np.random.default_rng(4)
    bundle = make_linear_bundle(tmp_path, rng, complete_tree(np.arange(27), 3), L3_HINGE)
    with pytest.raises(InvalidQuery, match=message):
        raise error_of(bundle, ItemBody(events=(event,)))


def test_events_of_zeros_alone_are_no_evidence(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    vectors = make_bundle(tmp_path, rng, complete_tree(np.arange(27), 3), "vector", 0.5, integer=False, name="vectors")
    rows = make_linear_bundle(tmp_path, rng, complete_tree(np.arange(27), 3), L3_HINGE, name="rows")
    assert isinstance(vectors.manifest.query, VectorKind)
    zeros = [0.0] * vectors.manifest.query.width
    events = ((vectors, zeros, [1.0, *zeros[1:]]), (rows, {"indices": [1], "values": [0.0]}, features(2)))
    for bundle, nothing, event in events:
        with pytest.raises(InvalidQuery, match=r"events: got .* expected something that the model knows and that is not all 0, to place"):
            raise error_of(bundle, ItemBody(events=(nothing, nothing)))
        beside, alone = placed(bundle, ItemBody(events=(nothing, event)), ItemBody(events=(event,)))
        assert [(node, row.to_bytes()) for node, row in beside[0]] == [(node, row.to_bytes()) for node, row in alone[0]]


def test_numbers_whose_sum_overflows_are_the_error_of_their_item_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    bundle = make_linear_bundle(tmp_path, rng, complete_tree(rng.permutation(64), 4), Ranking(own="log_activation", gamma=1))
    good, wide = ({"indices": [1, 2], "values": values} for values in ([1.0, 2.0], [3e38, 1.0]))
    items = [ItemBody(events=(good,)), ItemBody(events=(wide,) * 2), ItemBody(events=(good,))]
    found = Placer(bundle).place(items, bundle.items, LiveState(bundle).overlay(), open_engine(bundle, "cpu").parents)
    assert isinstance(found[1], InvalidQuery)
    assert found[1].field == "events"
    assert not isinstance(found[0], EspalierError)
    assert not isinstance(found[2], EspalierError)


def test_an_item_is_placed_by_no_event_whose_scores_are_not_finite(tmp_path: Path) -> None:
    """A router searches for such an event with other states."""
    bundle = make_bundle(tmp_path, np.random.default_rng(6), complete_tree(np.arange(27), 3), "vector", 0.5, integer=False)
    assert isinstance(bundle.manifest.query, VectorKind)
    good, wide = ([number] * bundle.manifest.query.width for number in (1.0, 7.0))
    engine = open_engine(bundle, "cpu")

    def search(queries: QueryBatch, params: SearchParams) -> SearchResult:
        return replace(engine.parents(queries, params), finite_B=queries.array[:, 0] != 7)

    items = [ItemBody(events=(good,)), ItemBody(events=(good, wide), like=("item-1",))]
    found = Placer(bundle).place(items, bundle.items, LiveState(bundle).overlay(), search)
    assert [len(candidates[0].nodes) > 0 for candidates in found if not isinstance(candidates, EspalierError)] == [True, False]


def test_linear_items_are_placed_together_as_each_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    bundle = make_linear_bundle(tmp_path, rng, complete_tree(np.arange(27), 3), L3_HINGE, integer=False)
    events = [(features(1, 3), features(5, 3)), (features(2),), (), (features(9, 4), features(), features(7)), (features(4, 1),)]
    for event in (event for own in events for event in own):
        event["values"] = rng.random(len(event["indices"])).tolist()
    bodies = [ItemBody(events=own, like=() if own else ("item-1",)) for own in events]
    alone = [placed(bundle, body)[0] for body in bodies]
    search = open_engine(bundle, "cpu").parents
    wrong = ItemBody(events=(features(20),))
    for together in (
        placed(bundle, *bodies),
        Placer(bundle).place([*bodies, wrong], bundle.items, LiveState(bundle).overlay(), search)[:-1],
    ):
        for one, other in zip(together, alone, strict=True):
            assert not isinstance(one, EspalierError)
            assert [(node, row.to_bytes()) for node, row in one[0]] == [(node, row.to_bytes()) for node, row in other[0]]


# -- near items --------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 6))
def test_nearest_items_are_those_of_the_largest_cosine(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1, 1], 9)  # a sum may be 0 or below
    old, new = (sparse_rows((rng.random((n, 9)) < 0.4) * signs * rng.integers(1, 3, (n, 9))) for n in (int(rng.integers(1, 30)), 7))
    item_nK, cosine_nK = NearItems(old).nearest(new, count)
    every = dense(new) @ dense(old).T
    for i in range(len(new)):
        best = [item for item in np.argsort(-every[i], kind="stable").tolist() if every[i, item] > 0][:count]
        assert item_nK[i].tolist() == best + [NO_NEIGHBOUR] * (count - len(best))
        assert_allclose(cosine_nK[i, : len(best)], every[i, best], rtol=1e-6)
        assert_array_equal(cosine_nK[i, len(best) :], 0)


def dense(rows: SparseRows) -> Float64:
    full = np.zeros((len(rows), rows.width))
    for i in range(len(rows)):
        indices, values = rows.row(i)
        full[i, indices] = values
    return full


def test_events_alone_need_no_second_copy_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the item that is lifted it is as large as the memory itself."""

    def refuse(*arrays: object) -> None:
        raise AssertionError("the memory is transposed")

    monkeypatch.setattr("espalier.placement.memory_rows._transposed", refuse)
    bundle = product_bundle(tmp_path, with_memory=True)
    (found,) = placed(bundle, ItemBody(events=(("item-3", "item-8"),)))
    assert first(found)[1].memory_from


def test_an_item_like_others_is_found_by_who_has_them() -> None:
    """In the sample, whose memory weighs as much as its tree."""
    bundle = Bundle.open(Path(__file__).parents[3] / "models/debian-depends/1")
    like = ("libsdl2-2.0-0", "libsdl2-image-2.0-0", "libsdl2-mixer-2.0-0")
    state, engine = LiveState(bundle), open_engine(bundle, "cpu")
    parent, row = first(placed(bundle, ItemBody(like=like))[0])
    state.apply([Change(1, "new", "put", None, (Placement(0, parent, state.next_slot(0, parent), row),))])
    engine.set_overlay(state.overlay())
    kind = bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    queries = encode_histories(kind, bundle.items, [like, like[:1], like[:2], like[1:]])[0]
    rows_BM = engine.search(queries, SearchParams.uniform(4, bundle.manifest.search.beam_size, 5)).item_rows_BM
    assert (rows_BM == len(bundle.items)).any(1).all()


def test_a_count_lifts_an_item_by_its_bias_and_by_the_memory() -> None:
    """In the sample, whose items have counts: as few events of items that are more and more popular, and more of as popular ones."""
    bundle = Bundle.open(Path(__file__).parents[3] / "models/debian-depends/1")
    events = (("libsdl2-2.0-0", "libgl1"), ("libsdl2-2.0-0", "libsdl2-image-2.0-0"))
    bodies = [ItemBody(events=events, count=count) for count in (2, 20, 400)] + [
        ItemBody(events=events),
        ItemBody(events=20 * events, count=400),
    ]
    rows = [first(found)[1] for found in placed(bundle, *bodies)]
    assert [row.count for row in rows[:3]] == [2, 20, 400]
    counts = bundle.label_counts()
    assert counts is not None
    assert rows[3].count == pytest.approx((2 + counts.counts_I[counts.counts_I >= 2].mean()) / 2)
    (bias,) = np.flatnonzero(rows[0].values != rows[1].values)
    assert rows[0].values[bias] < rows[1].values[bias] < rows[2].values[bias]
    way = Placer(bundle)._placement
    assert isinstance(way, GraphPlacement)
    way._scale(open_engine(bundle, "cpu").parents)
    assert abs(way._shift(40, 400) - way._shift(2, 400)) > 0.05, "it depends on what is at hand"
    few, many = (way._shifts(2, count).gap_G for count in (2.0, 2048.0))
    assert many[0] < few[0] - 1, "what the memory of a popular item does needs no shift"
    assert all(row.memory_to for row in rows)
    lifts = [sum(value for _, value in row.memory_from) for row in rows[:3]]
    assert 0 < lifts[0] < lifts[1] < lifts[2]
    nobody = ItemBody(like=("libsdl2-2.0-0",), count=400)
    assert first(placed(bundle, nobody)[0])[1].memory_to == ()


def test_a_row_that_is_too_far_is_drawn_in() -> None:
    scale = RowScale(np.zeros(3), np.ones(3), np.array([True, True, False]), 1.0, 2.0)
    assert_allclose(scale.capped(np.array([1.0, 9.0, 5.0])), [1, 3, 5])
    assert_allclose(scale.capped(np.array([1.0, 2.0, 5.0])), [1, 2, 5])
