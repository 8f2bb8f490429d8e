"""A memory: what it gives for a history, and how the reference and the ONNX engine rank with it, beyond the signature test. Its live
entries are lists that are appended and closed: what a snapshot shows never changes, whatever is written meanwhile.

What its files must say is in bundle/test_damage.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from onnx import helper

from benchmarks.random_bundles import linear_graphs, make_bundle, query_graph, random_masks, random_memory, random_queries, random_tree
from espalier import entry_lists
from espalier.arrays import Int64, read_only
from espalier.bundle import Bundle
from espalier.bundle_writer import write_bundle
from espalier.checks.golden import verify_golden
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.entry_lists import EntryArrays, EntryLists, entries_of, entries_under, open_entries
from espalier.errors import BundleCorrupt
from espalier.masks.eligibility import eligible_nodes
from espalier.memory import Memory
from espalier.memory_lists import MemoryTree
from espalier.memory_sums import add_up, of_leaves
from espalier.queries import PADDING, HistoryKind, QueryBatch
from espalier.search import NO_CONTEXT, SearchContext, SearchParams, SearchResult
from espalier.tree import complete_tree, tree_from_children
from tests.espalier.bundle.parts import content_of, draft_of, remembering
from tests.espalier.test_signature import assert_same, buckets_of
from training.golden import golden_answers
from training.inspect import inspect


def mem_of(bundle: Bundle, history_T: Int64, allowed: set[int]) -> dict[int, float]:
    """mem of every node with memory, from the definition alone. allowed: the eligible item rows."""
    memory, tree = bundle.memory, bundle.tree
    assert memory is not None
    at_leaf: dict[int, float] = {}
    for d, a in enumerate([int(a) for a in history_T[::-1] if a >= 0][: len(memory.weight)]):
        for e in range(int(memory.offset[a]), int(memory.offset[a + 1])):
            item = int(memory.item[e])
            if item in allowed:
                at_leaf[item] = at_leaf.get(item, 0.0) + float(memory.weight[d]) * float(memory.value[e])
    for item, buckets in buckets_of(history_T).items():
        if item in allowed:
            at_leaf[item] = at_leaf.get(item, 0.0) + sum(float(memory.repeat[bucket]) for bucket in buckets)
    mem: dict[int, float] = {}
    for item, total in at_leaf.items():
        node = int(tree.leaf_of_item[item])
        while node > 0 and total > 0:
            mem[node] = max(mem.get(node, 0.0), float(np.float32(total)))
            node = int(tree.parent[node])
    return mem


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(3, 3), (2, 5), (6, 2)]),
    exclude=st.sampled_from([0, 5]),
    passing=st.sampled_from([None, 0.0, 0.3]),
    integer=st.booleans(),
)
def test_lists_hold_the_sums_at_eligible_leaves_and_their_maxima_above(
    tmp_path_factory: pytest.TempPathFactory, seed: int, shape: tuple[int, int], exclude: int, passing: float | None, integer: bool
) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, shape[1], shape[0], empty_share=0.2)
    memory = random_memory(rng, tree.item_count, int(rng.integers(1, 6)), integer)
    bundle = make_bundle(tmp_path_factory.mktemp("models"), rng, tree, memory=memory, integer=integer)
    queries = random_queries(rng, bundle, 4)
    exclude_BE = rng.integers(-1, tree.item_count, (4, exclude)) if exclude else None
    params = SearchParams.uniform(4, 3, 3, exclude_BE)
    params = params if passing is None else replace(params, mask_B=random_masks(rng, tree, 4, passing))
    made = MemoryTree(memory, tree)
    reference = ReferenceEngine(bundle)
    left_out = made.left_out(queries.array)
    if left_out is not None:
        params = replace(params, exclude_BE=left_out if exclude_BE is None else np.hstack([exclude_BE, left_out]))
    for _ in range(2):  # nothing is left from the first call
        lists = made.lists(queries.array, eligible_nodes(tree, params, None))
        for b, history_T in enumerate(queries.array):
            eligible_N = reference.eligible_nodes(queries, params, b).eligible_N
            allowed = set(np.flatnonzero(eligible_N[tree.leaf_of_item]).tolist())
            nodes, values = lists.of(b)
            expected = mem_of(bundle, history_T, allowed)
            assert dict(zip(nodes.tolist(), values.tolist(), strict=True)) == expected
            assert nodes.tolist() == sorted(expected)
            parts_N = np.zeros(tree.node_count, np.float32)
            parts_N[nodes] = np.float32(memory.key_weight) * values
            assert_array_equal(reference.memory_lift(history_T, eligible_N)[1:], parts_N[1:])


@pytest.mark.parametrize("limit", ["MAX_ROW", "MAX_VISITS"])
def test_a_bounded_memory_has_the_largest_entries_that_a_bundle_may_hold(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    memory = random_memory(np.random.default_rng(5), 30, 3)
    assert memory.bounded() is memory
    monkeypatch.setattr(f"espalier.memory.{limit}", {"MAX_ROW": 2, "MAX_VISITS": 8}[limit])  # of three places
    found = memory.bounded()
    found.check(30)
    assert np.diff(memory.offset).max() > 2
    for item in range(30):
        was, now = (
            dict(zip(one.item[a:b].tolist(), one.value[a:b].tolist(), strict=True))
            for one in (memory, found)
            for a, b in [one.offset[item : item + 2].tolist()]
        )
        assert [*now.items()] == sorted(sorted(was.items(), key=lambda entry: (-entry[1], entry[0]))[:2])


def test_beams_are_cut_by_key_and_rank_alone_goes_down(tmp_path: Path) -> None:
    """Item 0 remembers item 3. By rank the left half is better; the memory lifts the right half over it, and not item 2 there."""
    tree = tree_from_children([[2], [2, 2]], np.arange(4))
    memory = Memory(np.array([0, 1, 1, 1, 1]), np.array([3], np.int32), np.ones(1, np.float16), np.ones(1, np.float32), 3.0)
    bundle = make_bundle(tmp_path, np.random.default_rng(1), tree, gamma=0.5, memory=memory)
    reference = ReferenceEngine(bundle)
    ranks = np.array([0, 2, 1, 0, 0, 0, 0], np.float32)
    reference.logits = lambda state_LS, level, nodes_C, t=0: ranks[nodes_C]  # type: ignore[method-assign]  # logits that are easy to foresee
    kind = bundle.manifest.query
    queries = QueryBatch(kind, np.array([[PADDING] * 4 + [0], [PADDING] * 4 + [1]]))
    result = reference.search(queries, SearchParams.uniform(2, 1, 2))
    assert result.item_rows_BM.tolist() == [[3, 2], [0, 1]]
    assert result.ranks_BM.tolist() == [[0.5, 0.5], [1, 1]]
    assert result.keys_BM.tolist() == [[3.5, 0.5], [1, 1]]
    excluded = reference.search(queries, SearchParams.uniform(2, 1, 2, np.array([[3], [3]])))
    assert excluded.item_rows_BM.tolist() == [[0, 1], [0, 1]]  # what nobody may see lifts nothing


def test_golden_queries_of_a_memory_compare_keys(tmp_path: Path) -> None:
    bundle = remembering(tmp_path)
    kind = bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    queries = random_queries(np.random.default_rng(2), bundle, 6)
    ids = [bundle.items.ids_of(history_T[history_T >= 0]) for history_T in queries.array]
    golden = golden_answers(bundle, queries, ids, SearchParams.uniform(6, 4, 5))
    assert bundle.manifest.memory is not None
    assert f"memory: key(n) = rank(n) + 0.5 · mem(n); {bundle.manifest.memory.entries} entries" in inspect(bundle)
    reference = ReferenceEngine(bundle)
    assert verify_golden(bundle, reference, golden) == 1
    with pytest.raises(BundleCorrupt, match="keys"):
        verify_golden(bundle, reference, golden.drop_columns(["keys"]))

    class Forgetful(ReferenceEngine):
        def search(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
            result = super().search(queries, params, context)
            return replace(result, keys_BM=result.ranks_BM)

    result = reference.search(queries, SearchParams.uniform(6, 4, 5))
    assert np.any(result.keys_BM > result.ranks_BM)
    with pytest.raises(BundleCorrupt, match=r"item row \d+ has key"):
        verify_golden(bundle, Forgetful(bundle), golden)


# -- sums ----------------------------------------------------------------------------------------------------------------

LIVE_ROW = 3
"""Of the first handle: items 0 … 2 are trained."""
REPEAT = np.array([0.25, 0.125, 0.5, 0, 0, 0], np.float32)
ENTRIES = np.array([0, 2, 2, 2]), np.array([1, 2], np.int32), np.array([2, 1], np.float32), np.array([1, 0.5], np.float32)
TRAINED = read_only(*ENTRIES, REPEAT, np.empty(0, np.int64))


def live_entries() -> tuple[EntryArrays, Any]:
    """Of item 0: to item 1, which training knows better, to item 2, and to the live one. Others are over, or come later."""
    lists = EntryLists(3, 1)
    lists.close(lists.add(1, (0, 0, 1)), 2)
    for target in (LIVE_ROW, 2, 1):
        lists.add(2, (0, 0, target))
    found = lists.snapshot(2)
    lists.close(lists.add(3, (0, 0, LIVE_ROW)), 4)
    lists.close(2, 4)
    lists.add(4, (0, 0, 2))
    (value,) = read_only(np.array([0, 9, 5, 3, 1, 9, 9], np.float32))
    return found, value


LIVE = live_entries()
HISTORY = np.array([LIVE_ROW, 0, 0])
EXPECTED = {0: 0.375, 1: 3.0, 2: 4.5, LIVE_ROW: 8.0}
"""The weights of item 0 are 1 and .5; items of the history have a repeat term for themselves, item 0 twice."""


@pytest.mark.parts
def test_of_two_entries_of_a_pair_the_larger_one_counts() -> None:
    """One is trained and one live; so in sums of live leaves alone."""
    (history_T, leaf_of_item), sum_L, sum_R = read_only(HISTORY, np.arange(3)), np.zeros(3), np.zeros(1)
    leaves, handles = add_up(history_T, TRAINED, LIVE, leaf_of_item, 0, sum_L, sum_R)
    assert {leaf: sum_L[leaf] for leaf in leaves.tolist()} | {LIVE_ROW + handle: sum_R[handle] for handle in handles.tolist()} == EXPECTED


@pytest.mark.parts
@pytest.mark.parametrize("more_sources", [0, 4])
def test_live_leaves_have_the_same_sums(more_sources: int) -> None:
    """Those of a shard, too: its memory has the entries of all items of the whole, of which the shard holds some."""
    trained = *read_only(np.pad(TRAINED[0], (0, more_sources), mode="edge")), *TRAINED[1:]
    *arrays, leaf_of_item = read_only(HISTORY[None], np.array([0, 4]), np.array(list(EXPECTED)), np.arange(3))
    sum_L, sum_R = np.zeros(3), np.zeros(1)
    assert of_leaves(*arrays, trained, LIVE, leaf_of_item, 0, sum_L, sum_R).tolist() == list(EXPECTED.values())
    assert not sum_L.any()
    assert not sum_R.any()


def test_an_explanation_has_every_occurrence_of_an_item() -> None:
    """Item 0 came now and two items ago, item 1 leads to it."""
    entries = np.array([0, 0, 1, 1]), np.array([0], np.int32), np.ones(1, np.float16)
    memory = Memory(*entries, np.array([1, 0.5], np.float32), 2.0, repeat=REPEAT)
    assert memory.sources(np.array([-1, 0, 1, 0]), 0) == [(0, 2 * (0.25 + 0.5)), (1, 2 * 0.5)]
    assert memory.sources(np.array([0, 1, 0]), 2) == []


# -- the ONNX engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("inner", [False, True])
def test_a_node_whose_key_is_not_finite_is_no_candidate(tmp_path: Path, batch: int, beam: int, inner: bool) -> None:
    """Logits and memory are finite; their sums are not, at items 0 and 3, and where `inner` above item 3."""
    tree = complete_tree(np.arange(8), 2)
    large = np.float32(1.6e38)
    memory = Memory(np.append(0, np.full(8, 2)), np.array([0, 3], np.int32), np.ones(2, np.float16), np.full(1, large), 1.0)
    nodes = [
        helper.make_node("GreaterOrEqual", ["history_nodes", "zero"], ["present"]),
        helper.make_node("Cast", ["present"], ["float"], to=onnx.TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["float", "two"], ["query_state"], keepdims=1),
    ]
    one = query_graph(nodes, ["history_nodes", "node_rows"], {"zero": np.array(0), "two": np.array([2])}, 1)
    graphs = linear_graphs(1)._replace(query_onnx=one)  # logits are node rows
    bundle = make_bundle(tmp_path, np.random.default_rng(1), tree, graphs=graphs, memory=memory, width=1)
    rows_ND = np.zeros((15, 1), np.float32)
    rows_ND[[7, 10]] = 2.4e38  # the leaves of items 0 and 3
    rows_ND[4] = 3e38 if inner else 0  # the parent of items 2 and 3
    bundle = write_bundle(tmp_path / "tiny" / "2", draft_of(bundle), content_of(bundle, stored_rows=rows_ND, memory=memory))
    queries = QueryBatch(bundle.manifest.query, np.array([[PADDING] * 4 + [0]] * batch))
    params = SearchParams.uniform(batch, beam, 8)
    expected, got = ReferenceEngine(bundle).search(queries, params), open_engine(bundle, engine="onnx-cpu").search(queries, params)
    assert_same(got, expected)
    rows = got.item_rows_BM[0].tolist()
    assert 0 not in rows
    assert 3 not in rows
    assert rows[0] != -1


def test_a_sequence_encoder_that_takes_something_else_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 3, 2))
    wrong = write_bundle(tmp_path / "tiny" / "2", draft_of(bundle), content_of(bundle, encoder="sequence"))
    with pytest.raises(BundleCorrupt, match=r"query\.onnx: inputs \['history_nodes'\]"):
        open_engine(wrong, "cpu")


# -- lists of entries ---------------------------------------------------------------------------------------------------


VALUE = 6
"""The first column that is no key, where there is a second one."""


def under(keys: list[int], entries: EntryArrays) -> list[tuple[int, int]]:
    """(the place of a key, a value) of the entries of some keys."""
    entry_C, of_C = entries_under(*read_only(np.array(keys, np.int64)), entries)
    return [(place, int(entries.rows[entry, VALUE])) for entry, place in zip(entry_C.tolist(), of_C.tolist(), strict=True)]


def of_others(others: list[int], entries: EntryArrays) -> list[int]:
    """The value of the entry of each second key; 0 where there is none."""
    return [int(entries.rows[entry, VALUE]) if entry else 0 for entry in entries_of(*read_only(np.array(others)), entries).tolist()]


@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=40),
    block=st.sampled_from([1, 2, 4]),
    first=st.sampled_from([2, 256]),
)
def test_every_snapshot_stays_as_lists_would_have_been(steps: list[tuple[int, bool, bool]], block: int, first: int) -> None:
    """Each step closes the oldest entry of a key or appends one; now and then those that are closed are dropped. Arrays grow on the way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry_lists, "FIRST", first)
        lists = EntryLists(5, 1, 1, block=block)
    expected: list[list[int]] = [[] for _ in range(4)]
    number: dict[int, int] = {}  # value → entry
    snapshots = []
    for moment, (key, closes, drops) in enumerate(steps, start=1):
        if closes and expected[key]:
            lists.close(number.pop(expected[key].pop(0)), moment)
        else:
            free = min({*range(41)} - {value % 64 for values in expected for value in values})  # a second key that is not in use
            expected[key].append(64 * moment + free)
            number[expected[key][-1]] = lists.add(moment, (key, 0, free, 0, expected[key][-1]))
        if drops:
            place = {entry: new for new, entry in enumerate(lists.drop_closed().tolist())}
            number = {value: place[entry] for value, entry in number.items()}
            assert lists.closed == 0
        snapshots.append((lists.snapshot(moment), [(key, value) for key in range(4) for value in expected[key]], sorted(number.values())))
    assert lists.snapshot(len(steps) + 1).rows is lists.snapshot(len(steps) + 2).rows, "it copies nothing"
    for entries, wanted, numbers in snapshots:
        assert not entries.rows.flags.writeable
        assert under([0, 1, 2, 3, 99], entries) == wanted
        assert open_entries(entries).tolist() == numbers
        by_other = {value % 64: value for _, value in wanted}
        assert of_others([-1, *range(42), 10**6], entries) == [by_other.get(other, 0) for other in (-1, *range(42), 10**6)]


def test_a_snapshot_of_full_arrays_is_not_led_past_their_end() -> None:
    """The first entry of a key that had none lies in the arrays that replaced those of the snapshot."""
    lists = EntryLists(5, 4, 600)
    for number in range(1, entry_lists.FIRST):
        lists.add(1, (1, 0, number, 0, 7))
    full = lists.snapshot(1)
    assert lists.used == len(full.rows)
    late = lists.add(2, (3, 0, 500, 0, 8))
    assert late == len(full.rows)
    assert (full.first[3], full.by_other[500]) == (0, 0)
    assert under([3], full) == []
    assert of_others([500, 1], full) == [0, 7]
    assert of_others([500, 1], lists.snapshot(2)) == [8, 7]
