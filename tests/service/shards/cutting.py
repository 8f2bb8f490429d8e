"""Folders of shards for the tests, and the queries that a router would send to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from espalier.bundle import Bundle
from espalier.checks.random_bundles import make_bundle, make_linear_bundle, random_memory, random_queries, random_tree, tree_over
from espalier.engines import open_engine
from espalier.engines.stages import Frontier, ShardResult
from espalier.manifest import Ranking
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from espalier.shards.messages import MEDIA_TYPE, Pin, ShardAnswer, ShardQuery, decode_answer, encode_query
from tests.espalier.shards.merging import with_states
from tests.service.running import Running
from training.shard.command import shard as shard_command

KINDS = ("product", "product memory", "history", "vector", "linear", "forest")
LIMITS: dict[str, Any] = {"beam_size": 10, "m": 5, "max_beam_size": 64, "max_m": 40}


def whole_bundle(folder: Path, kind: str = "product", version: int = 1, seed: int = 5) -> Bundle:
    """A bundle of the name `books` with integer weights, in which some leaves are vacant."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 3, 4, empty_share=0.2)
    names: dict[str, Any] = {"name": "books", "version": version} | LIMITS
    if kind in ("linear", "forest"):
        others = [] if kind == "linear" else [tree_over(rng, tree.item_count, 3)]
        return make_linear_bundle(folder, rng, tree, Ranking(own="log_activation", gamma=1.0), others=others, **names)
    base, *parts = kind.split()
    memory = replace(random_memory(rng, tree.item_count, 3), key_weight=2.0) if parts else None
    chosen: Any = base
    return make_bundle(folder, rng, tree, chosen, 0.5, memory=memory, **names)


def cut(bundle: Bundle, folder: Path, count: int = 2) -> list[Bundle]:
    """The shards of a bundle."""
    return shard_command(bundle.path, count, folder)


def pin_of(shard: Bundle) -> Pin:
    info = shard.manifest.shard
    assert info is not None
    return Pin(info.of, info.version, info.digest, info.index, info.count)


def queries_of(whole: Bundle, batch: int = 3, seed: int = 0) -> QueryBatch:
    return random_queries(np.random.default_rng(seed), whole, batch)


def query_for(whole: Bundle, shard: Bundle, queries: QueryBatch, params: SearchParams, **more: Any) -> ShardQuery:
    """What a router sends for queries of the whole bundle. Exclusions are rows of the whole."""
    more = {"timeout_ms": 10_000.0, "states_BLS": with_states(whole, queries).states_BLS} | more
    return ShardQuery(pin_of(shard), queries, params.beam_size_B, params.m_B, params.exclude_BE, trace=params.trace, **more)


def post(service: Running, body: ShardQuery | bytes, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else encode_query(body)
    return service.client.post("/internal/search", content=content, headers={"content-type": MEDIA_TYPE} | headers)


def search(service: Running, query: ShardQuery) -> ShardAnswer:
    """The answer to a search that must succeed."""
    answer = post(service, query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == MEDIA_TYPE
    return decode_answer(answer.content)


def expected(whole: Bundle, shard: Bundle, queries: QueryBatch, params: SearchParams, frontier: bool = False) -> ShardResult:
    """What the reference finds on a shard, in rows and numbers of the whole. Exclusions are rows of the whole, masks the shard's."""
    assert shard.shard is not None
    parts = shard.shard
    if params.exclude_BE is not None:
        local = {row: i for i, row in enumerate(parts.items.tolist())}
        params = replace(params, exclude_BE=np.array([[local.get(row, -1) for row in rows] for rows in params.exclude_BE.tolist()]))
    found = open_engine(shard, engine="reference").search(with_states(whole, queries, frontier), params)
    frontiers = found.frontiers if isinstance(found, ShardResult) else ()

    def numbered(numbers: Any, places: Any) -> Any:
        return np.array([[numbers[place] if place >= 0 else -1 for place in row] for row in places.tolist()]).reshape(places.shape)

    def traced(trace: Any, place: int) -> Any:
        nodes = parts.nodes[place]
        return tuple(
            replace(level, nodes_BK=numbered(nodes, level.nodes_BK), candidates_BC=numbered(nodes, level.candidates_BC)) for level in trace
        )

    result = replace(
        found,
        item_rows_BM=numbered(parts.items, found.item_rows_BM),
        trace=None if found.trace is None else traced(found.trace, 0),
        other_traces=tuple(traced(trace, place) for place, trace in enumerate(found.other_traces, 1)),
    )
    numbered_beams = (Frontier(numbered(parts.nodes[place], beam.nodes_BK), beam.ranks_BK) for place, beam in enumerate(frontiers))
    return ShardResult.of(result, tuple(numbered_beams))
