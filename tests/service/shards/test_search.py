"""A router's search of a shard gives what the reference finds there, in the numbers of the whole catalogue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.stages import ShardResult
from espalier.masks.eligibility import forest_mask
from espalier.search import SearchParams
from espalier.shards.messages import MaskBits
from tests.service.running import Running, run
from tests.service.shards.cutting import KINDS, cut, expected, queries_of, query_for, search, whole_bundle

open_cpu = partial(open_engine, device="cpu")


def same(found: ShardResult, right: ShardResult) -> None:
    """Equal results, but for padding behind beams and the rounding of logarithms."""
    for name in ("item_rows_BM", "count_B", "complete_B"):
        assert_array_equal(getattr(found, name), getattr(right, name), err_msg=name)
    for name in ("ranks_BM", "keys_BM", "scores_BM"):
        assert_allclose(getattr(found, name), getattr(right, name), rtol=1e-5, err_msg=name)
    for one, other in zip(found.frontiers, right.frontiers, strict=True):
        for b in range(len(one.nodes_BK)):
            assert kept(one.nodes_BK[b]) == kept(other.nodes_BK[b])
            assert_allclose(one.ranks_BK[b][one.nodes_BK[b] >= 0], other.ranks_BK[b][other.nodes_BK[b] >= 0], rtol=1e-5)
    for trace, other_trace in zip(found.traces, right.traces, strict=True):
        for level, reference in zip(trace, other_trace, strict=True):
            assert level.level == reference.level
            for b in range(len(level.nodes_BK)):
                assert kept(level.nodes_BK[b]) == kept(reference.nodes_BK[b])
                assert {*kept(level.candidates_BC[b])} == {*kept(reference.candidates_BC[b])}


def kept(nodes: NDArray[np.int64]) -> list[int]:
    found: list[int] = nodes[nodes >= 0].tolist()
    return found


class Served(NamedTuple):
    """A whole bundle, its shards, and a service that holds them."""

    service: Running
    whole: Bundle
    shards: list[Bundle]


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("shards")
    whole = whole_bundle(folder / "whole", request.param)
    shards = cut(whole, folder / "books-shards")
    with run(folder / "books-shards", open_cpu, max_queue_ms=10_000.0) as service:
        yield Served(service, whole, shards)


def uniform(beam_size: int, m: int, **more: Any) -> SearchParams:
    return replace(SearchParams.uniform(3, beam_size, m), **more)


CASES: dict[str, SearchParams] = {
    "the narrowest beam": uniform(1, 3),
    "a beam": uniform(4, 7),
    "the widest beam": uniform(64, 40),
    "beams and m of each query": SearchParams(np.array([1, 9, 3]), np.array([2, 1, 8])),
    "exclusions, also of items on other shards": uniform(64, 40, exclude_BE=np.random.default_rng(1).integers(-1, 60, (3, 30))),
    "a trace in the numbers of the whole tree": uniform(3, 4, trace=True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_search_gives_what_the_reference_finds_on_the_shard(served: Served, case: str) -> None:
    queries, params = queries_of(served.whole), CASES[case]
    if params.exclude_BE is not None:
        params = replace(params, exclude_BE=np.where(params.exclude_BE < served.whole.tree.item_count, params.exclude_BE, -1))
    for shard in served.shards:
        answer = search(served.service, query_for(served.whole, shard, queries, params, frontier=True))
        same(answer.result, expected(served.whole, shard, queries, params, frontier=True))
        assert answer.pin.index == int(shard.manifest.name)
        assert answer.engine == served.service.app.state.service.registry.entries[shard.manifest.name].loaded.engine.name
        assert (answer.batch, answer.engine_ms > 0) == (3, True)
        assert len(answer.result.traces) == (len(served.whole.alone) if params.trace else 0)
        for row, excluded in zip(answer.result.item_rows_BM, params.exclude_BE if params.exclude_BE is not None else (), strict=False):
            assert not {*kept(row)} & {*excluded.tolist()}


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
