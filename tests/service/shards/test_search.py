"""A router's search of a shard gives what the reference finds there, in the numbers of the whole catalogue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.masks.eligibility import forest_mask
from espalier.search import SearchParams
from espalier.shards.messages import MaskBits, decode_answer, encode_query
from service.errors import QueueFull
from service.shards.search import answer_search
from tests.service.running import Running, run
from tests.service.shards.cutting import KINDS, cut, expected, post, queries_of, query_for, search, whole_bundle

open_cpu = partial(open_engine, device="cpu")


def same(found: Any, right: Any) -> None:
    """Equal results, but for padding behind frontiers and the rounding of logarithms."""
    for name in ("item_rows_BM", "count_B", "complete_B"):
        assert_array_equal(getattr(found, name), getattr(right, name), err_msg=name)
    for name in ("ranks_BM", "keys_BM", "scores_BM"):
        assert_allclose(getattr(found, name), getattr(right, name), rtol=1e-5, err_msg=name)
    assert len(found.frontiers) == len(right.frontiers)
    for one, other in zip(found.frontiers, right.frontiers, strict=True):
        for b in range(len(one.nodes_BK)):
            assert one.nodes_BK[b][one.nodes_BK[b] >= 0].tolist() == other.nodes_BK[b][other.nodes_BK[b] >= 0].tolist()
            assert_allclose(one.ranks_BK[b][one.nodes_BK[b] >= 0], other.ranks_BK[b][other.nodes_BK[b] >= 0], rtol=1e-5)


class Served:
    """A whole bundle, its shards, and a service that holds them."""

    def __init__(self, service: Running, whole: Bundle, shards: list[Bundle]) -> None:
        self.service, self.whole, self.shards = service, whole, shards


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("shards")
    whole = whole_bundle(folder / "whole", request.param)
    shards = cut(whole, folder / "books-shards")
    with run(folder / "books-shards", open_cpu, max_queue_ms=10_000.0) as service:
        yield Served(service, whole, shards)


@pytest.mark.parametrize(("beam_size", "m"), [(1, 3), (4, 7), (64, 40)])
def test_a_search_gives_what_the_reference_finds_on_the_shard(served: Served, beam_size: int, m: int) -> None:
    queries = queries_of(served.whole)
    params = SearchParams.uniform(3, beam_size, m)
    for shard in served.shards:
        answer = search(served.service, query_for(served.whole, shard, queries, params, frontier=True))
        same(answer.result, expected(served.whole, shard, queries, params, frontier=True))
        assert answer.pin.index == int(shard.manifest.name)
        assert answer.engine == served.service.app.state.service.registry.entries[shard.manifest.name].loaded.engine.name
        assert answer.batch == 3
        assert answer.engine_ms > 0


def test_beams_and_m_are_those_of_each_query(served: Served) -> None:
    queries, shard = queries_of(served.whole), served.shards[0]
    params = SearchParams(np.array([1, 9, 3]), np.array([2, 1, 8]))
    same(search(served.service, query_for(served.whole, shard, queries, params)).result, expected(served.whole, shard, queries, params))


def test_exclusions_are_rows_of_the_whole_and_those_of_other_shards_do_nothing(served: Served) -> None:
    queries, items = queries_of(served.whole), served.whole.tree.item_count
    exclude_BE = np.random.default_rng(1).integers(-1, items, (3, items // 2))
    params = SearchParams.uniform(3, 64, 40, exclude_BE)
    for shard in served.shards:
        found = search(served.service, query_for(served.whole, shard, queries, params)).result
        same(found, expected(served.whole, shard, queries, params))
        for row, excluded in zip(found.item_rows_BM, exclude_BE, strict=True):
            assert not set(row[row >= 0].tolist()) & set(excluded.tolist())


def test_masks_let_eligible_items_pass_and_queries_without_one_all(served: Served) -> None:
    queries, shard = queries_of(served.whole), served.shards[1]
    assert shard.shard is not None
    eligible_I = np.random.default_rng(2).random(len(shard.shard.items)) < 0.4
    bits = MaskBits(np.packbits(eligible_I))
    mask = forest_mask([alone.tree for alone in shard.alone], eligible_I)
    params = SearchParams.uniform(3, 64, 40)
    query = query_for(served.whole, shard, queries, params, masks=(bits.digest, None, bits.digest), sent_masks={bits.digest: bits})
    right = expected(served.whole, shard, queries, replace(params, mask_B=(mask, None, mask)))
    same(search(served.service, query).result, right)
    same(search(served.service, replace(query, sent_masks={})).result, right)  # it is known by now


def test_a_trace_has_the_numbers_of_the_whole_tree(served: Served) -> None:
    queries, shard = queries_of(served.whole, 2), served.shards[1]
    params = replace(SearchParams.uniform(2, 3, 4), trace=True)
    found, right = (
        search(served.service, query_for(served.whole, shard, queries, params)).result,
        expected(served.whole, shard, queries, params),
    )
    assert len(found.traces) == len(right.traces) == len(served.whole.alone)
    for trace, other in zip(found.traces, right.traces, strict=True):
        assert [level.level for level in trace] == [level.level for level in other]
        for level, reference in zip(trace, other, strict=True):
            for b in range(2):
                kept, candidates = level.nodes_BK[b], level.candidates_BC[b]
                assert kept[kept >= 0].tolist() == reference.nodes_BK[b][reference.nodes_BK[b] >= 0].tolist()
                assert set(candidates[candidates >= 0]) == set(reference.candidates_BC[b][reference.candidates_BC[b] >= 0])


def test_one_call_may_hold_the_queries_of_several_searches(served: Served) -> None:
    """Searches with and without a frontier, masks and exclusions, at once: each gets its own answer."""
    shard, items = served.shards[0], served.whole.tree.item_count
    assert shard.shard is not None
    bits = MaskBits(np.packbits(np.arange(len(shard.shard.items)) % 2 == 0))
    mask = forest_mask([alone.tree for alone in shard.alone], np.arange(len(shard.shard.items)) % 2 == 0)
    asked = []
    for number in range(9):
        queries = queries_of(served.whole, 1 + number % 3, seed=number)
        batch, own = len(queries), queries
        exclude_BE = np.random.default_rng(number).integers(-1, items, (batch, 4)) if number % 2 else None
        params, frontier = SearchParams.uniform(batch, 1 + 5 * number, 3 + number, exclude_BE), number % 3 == 0
        more: dict[str, Any] = {"masks": (bits.digest,) * batch, "sent_masks": {bits.digest: bits}} if number % 4 == 0 else {}
        right = expected(served.whole, shard, own, replace(params, mask_B=(mask,) * batch if more else None), frontier)
        asked.append((query_for(served.whole, shard, own, params, frontier=frontier, **more), right))
        search(served.service, asked[-1][0])  # the engine knows then what a query costs, and takes many at once

    async def until_taken(body: bytes) -> bytes:
        while True:  # a busy machine may look like overload
            with suppress(QueueFull):
                return await answer_search(served.service.app.state.service.registry, body)
            await asyncio.sleep(0.05)

    async def all_at_once() -> list[bytes]:
        return await asyncio.gather(*(until_taken(encode_query(query)) for query, _ in asked))

    answers = [decode_answer(body) for body in served.service.client.runner.run(all_at_once())]
    for answer, (_, right) in zip(answers, asked, strict=True):
        same(answer.result, right)


def test_the_answer_is_the_same_in_any_batch(served: Served) -> None:
    queries, shard = queries_of(served.whole, 8), served.shards[0]
    params = SearchParams.uniform(8, 4, 6)
    together = post(served.service, query_for(served.whole, shard, queries, params))
    found = decode_answer(together.content).result
    for b in range(8):
        alone = query_for(served.whole, shard, queries.take(np.array([b])), params.take(np.array([b])))
        assert_array_equal(search(served.service, alone).result.item_rows_BM[0], found.item_rows_BM[b])
