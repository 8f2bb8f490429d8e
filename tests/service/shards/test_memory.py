"""Memory that a router sends with queries counts instead of the shard's own, and open nodes stay in the beam."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.masks.eligibility import eligible_nodes, node_mask
from espalier.memory_lists import MemoryLists, MemoryTree
from espalier.search import NodeMask, SearchParams
from espalier.shards.messages import MaskBits
from tests.espalier.shards.merging import with_states
from tests.service.running import Running, run
from tests.service.shards.cutting import queries_of, query_for, search


@pytest.fixture(scope="module", params=["compiled-cpu", "onnx-cpu", "reference"])
def service(request: pytest.FixtureRequest, shards: list[Bundle]) -> Iterator[Running]:
    with run(shards[0].path.parent.parent, partial(open_engine, device="cpu", engine=request.param)) as running:
        yield running


class Lists:
    """A `MemoryLookup` that knows the lists of one call."""

    def __init__(self, lists: list[dict[int, float]]) -> None:
        self._lists, self.item_count = lists, 1 << 62

    def lists(self, history_BT: object, eligible: object) -> MemoryLists:
        nodes = [np.array(sorted(known), np.int64) for known in self._lists]
        offset_B = np.append(0, np.cumsum([len(own) for own in nodes])).astype(np.int64)
        values = [np.array([known[int(node)] for node in own], np.float32) for known, own in zip(self._lists, nodes, strict=True)]
        return MemoryLists(offset_B, np.concatenate(nodes), np.concatenate(values))


def sent(whole: Bundle, lists: MemoryLists) -> MemoryLists:
    """Of whole lists what a router sends: leaves and nodes above leaves."""
    lowest = lists.nodes >= whole.tree.level(whole.tree.height - 1).start
    return MemoryLists(np.append(0, np.cumsum(lowest))[lists.offset_B], lists.nodes[lowest], lists.values[lowest])


def test_the_memory_of_the_whole_bundle_gives_what_the_shard_adds_up(service: Running, whole: Bundle, shards: list[Bundle]) -> None:
    queries, params = queries_of(whole, 6), SearchParams.uniform(6, 3, 10)
    assert whole.memory is not None
    lists = MemoryTree(whole.memory, whole.tree).lists(queries.array, eligible_nodes(whole.tree, params, 6, None))
    for shard in shards:
        query = query_for(whole, shard, queries, params)
        own, given = (search(service, one).result for one in (query, replace(query, memory=sent(whole, lists))))
        assert (own.keys_BM != own.ranks_BM).any()
        assert_array_equal(given.item_rows_BM, own.item_rows_BM)
        assert_array_equal(given.keys_BM, own.keys_BM)


def test_memory_above_leaves_lifts_the_beam_as_a_live_item_below_would(service: Running, whole: Bundle, shards: list[Bundle]) -> None:
    """A live leaf is no node of the shard: what is said of it lifts its parent and all above, and no trained leaf."""
    shard, queries = shards[0], queries_of(whole, 4)
    assert shard.shard is not None
    above = shard.tree.level(shard.tree.height - 1)
    rng, wanted, known = np.random.default_rng(3), [], []
    for _ in range(4):
        given: dict[int, float] = {}
        full: dict[int, float] = {}
        for node in rng.choice(np.arange(above.start, shard.tree.node_count), 5, replace=False).tolist():
            value = float(rng.integers(1, 9))
            given[int(shard.shard.nodes[0][node])] = value
            while node > 0:
                full[node] = max(full.get(node, 0.0), value)
                node = int(shard.tree.parent[node])
        wanted.append(full)
        known.append(given)
    params = replace(SearchParams.uniform(4, 2, 8), frontier=True)
    message = query_for(whole, shard, queries, params, memory=Lists(known).lists(None, None))
    found = search(service, message).result
    engine, states = ReferenceEngine(shard), with_states(whole, queries, params)
    for b in range(4):
        one = np.array([b])
        right = engine.search(queries.take(one), replace(states.take(one), memory=Lists([wanted[b]])))
        assert_array_equal(found.item_rows_BM[b], np.where(right.item_rows_BM[0] < 0, -1, shard.shard.items[right.item_rows_BM[0]]))
        assert_array_equal(found.keys_BM[b], right.keys_BM[0])
        beam, other = found.frontiers[0].nodes_BK[b], right.frontiers[0].nodes_BK[0]
        assert beam[beam >= 0].tolist() == shard.shard.nodes[0][other[other >= 0]].tolist()


def test_queries_with_and_without_a_memory_of_their_own_are_searched_apart(service: Running, whole: Bundle, shards: list[Bundle]) -> None:
    queries, params = queries_of(whole, 3), SearchParams.uniform(3, 64, 10)
    query = query_for(whole, shards[0], queries, params)
    none = MemoryLists(np.zeros(4, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
    own, without = (search(service, one).result for one in (query, replace(query, memory=none)))
    assert_array_equal(without.keys_BM, without.ranks_BM)
    assert (own.keys_BM != own.ranks_BM).any()


def test_open_nodes_are_in_the_frontier_although_no_item_below_them_passes(service: Running, whole: Bundle, shards: list[Bundle]) -> None:
    shard, queries = shards[1], queries_of(whole, 2)
    assert shard.shard is not None
    tree, eligible_I = shard.tree, np.arange(shard.tree.item_count) == 4
    above = tree.level(tree.height - 1)
    opened = [above.start, above.stop - 1]
    eligible_N = node_mask(tree, eligible_I).eligible_N.copy()
    for node in opened:
        while node:
            eligible_N[node] = True
            node = int(tree.parent[node])
    bits = MaskBits(np.packbits(eligible_I), (shard.shard.nodes[0][opened],))
    params = replace(SearchParams.uniform(2, 64, 5), frontier=True)
    query = query_for(whole, shard, queries, params, masks=(bits.digest,) * 2, sent_masks={bits.digest: bits})
    found = search(service, query).result
    right = ReferenceEngine(shard).search(queries, replace(with_states(whole, queries, params), mask_B=(NodeMask(eligible_N, 1),) * 2))
    assert found.item_rows_BM[:, 0].tolist() == [int(shard.shard.items[4])] * 2
    assert found.count_B.tolist() == [1, 1]
    assert found.complete_B.all()
    beams = [[node for node in frontier if node >= 0] for frontier in found.frontiers[0].nodes_BK.tolist()]
    assert {int(shard.shard.nodes[0][node]) for node in opened} <= set(beams[0])
    assert beams == [[int(shard.shard.nodes[0][node]) for node in beam if node >= 0] for beam in right.frontiers[0].nodes_BK.tolist()]
