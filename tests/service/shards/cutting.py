"""Folders of shards for the tests, and the queries that a router would send to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_memory, random_queries, random_tree, tree_over
from espalier.bundle import Bundle
from espalier.manifest import Ranking
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from espalier.shards.messages import MEDIA_TYPE, Pin, ShardAnswer, ShardQuery, decode_answer, encode_query
from tests.espalier.shards.merging import with_states
from tests.service.running import Running
from training.shard.command import shard as shard_command

KINDS = ("product", "product memory", "history", "vector", "linear", "forest")
LIMITS: dict[str, Any] = {"beam_size": 10, "m": 5, "max_beam_size": 64, "max_m": 40}


def whole_bundle(folder: Path, kind: str = "product", version: int = 1, seed: int = 5, key_weight: float = 2) -> Bundle:
    """A bundle of the name `books` with integer weights, in which some leaves are vacant. key_weight: of a memory."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 3, 4, empty_share=0.2)
    names: dict[str, Any] = {"name": "books", "version": version} | LIMITS
    if kind in ("linear", "forest"):
        others = [] if kind == "linear" else [tree_over(rng, tree.item_count, 3)]
        return make_linear_bundle(folder, rng, tree, Ranking(own="log_activation", gamma=1.0), others=others, **names)
    base, *parts = kind.split()
    memory = replace(random_memory(rng, tree.item_count, 3), key_weight=key_weight) if parts else None
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
