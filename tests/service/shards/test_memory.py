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
from espalier.engines.stages import ShardResult
from espalier.masks.eligibility import eligible_nodes, node_mask
from espalier.memory_lists import MemoryLists, MemoryTree
from espalier.search import NodeMask, SearchParams
from espalier.shards.messages import MaskBits
from tests.espalier.shards.merging import with_states
from tests.service.running import Running, run
from tests.service.shards.cutting import cut, queries_of, query_for, search, whole_bundle


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return whole_bundle(tmp_path_factory.mktemp("whole"), "product memory")


@pytest.fixture(scope="module")
def shards(whole: Bundle, tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    return cut(whole, tmp_path_factory.mktemp("shards") / "books-shards")


@pytest.fixture(scope="module", params=["compiled-cpu", "onnx-cpu", "reference"])
def service(request: pytest.FixtureRequest, shards: list[Bundle]) -> Iterator[Running]:
    with run(shards[0].path.parent.parent, partial(open_engine, device="cpu", engine=request.param)) as running:
        yield running


def lists_of(known: list[dict[int, float]]) -> MemoryLists:
    """The lists of some queries, of which each has the mem of some nodes."""
    nodes = [np.array(sorted(own), np.int64) for own in known]
    values = [np.array([own[int(node)] for node in sorted(own)], np.float32) for own in known]
    return MemoryLists(np.append(0, np.cumsum([len(own) for own in nodes])).astype(np.int64), np.concatenate(nodes), np.concatenate(values))


def test_the_memory_of_the_whole_bundle_gives_what_the_shard_adds_up(service: Running, whole: Bundle, shards: list[Bundle]) -> None:
    queries, params = queries_of(whole, 6), SearchParams.uniform(6, 3, 10)
    assert whole.memory is not None
    lists = MemoryTree(whole.memory, whole.tree).lists(queries.array, eligible_nodes(whole.tree, params, None))
    sent = lists.kept(lists.nodes >= whole.tree.level(whole.tree.height - 1).start)  # leaves and nodes above leaves
    for shard in shards:
        query = query_for(whole, shard, queries, params)
        own, given = (search(service, one).result for one in (query, replace(query, memory=sent)))
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
    params = SearchParams.uniform(4, 2, 8)
    found = search(service, query_for(whole, shard, queries, params, frontier=True, memory=lists_of(known))).result
    lifted = replace(with_states(whole, queries, frontier=True), memory=lists_of(wanted))
    right = open_engine(shard, engine="reference").search(lifted, params)
    assert isinstance(right, ShardResult)
    assert_array_equal(found.item_rows_BM, np.where(right.item_rows_BM < 0, -1, shard.shard.items[right.item_rows_BM]))
    assert_array_equal(found.keys_BM, right.keys_BM)
    for beam, other in zip(found.frontiers[0].nodes_BK, right.frontiers[0].nodes_BK, strict=True):
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
    params = SearchParams.uniform(2, 64, 5)
    query = query_for(whole, shard, queries, params, frontier=True, masks=(bits.digest,) * 2, sent_masks={bits.digest: bits})
    found = search(service, query).result
    engine = open_engine(shard, engine="reference")
    right = engine.search(with_states(whole, queries, frontier=True), replace(params, mask_B=(NodeMask(eligible_N, 1),) * 2))
    assert isinstance(right, ShardResult)
    assert found.item_rows_BM[:, 0].tolist() == [int(shard.shard.items[4])] * 2
    assert found.count_B.tolist() == [1, 1]
    assert found.complete_B.all()
    beams = [[node for node in frontier if node >= 0] for frontier in found.frontiers[0].nodes_BK.tolist()]
    assert {int(shard.shard.nodes[0][node]) for node in opened} <= set(beams[0])
    assert beams == [[int(shard.shard.nodes[0][node]) for node in beam if node >= 0] for beam in right.frontiers[0].nodes_BK.tolist()]
