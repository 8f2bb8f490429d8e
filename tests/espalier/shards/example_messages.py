"""A query and an answer between a router and a shard, for tests that change something of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from espalier.arrays import Float32
from espalier.queries import HistoryKind, QueryBatch
from espalier.search import Frontier, LevelTrace, SearchResult
from espalier.shards.messages import MaskBits, Pin, ShardAnswer, ShardQuery

PIN = Pin("sample", 3, "a" * 64, 1, 4)


def floats(rng: np.random.Generator, *shape: int) -> Float32:
    return rng.normal(size=shape).astype(np.float32)


def a_query(**changed: Any) -> ShardQuery:
    rng = np.random.default_rng(5)
    queries = QueryBatch(HistoryKind(length=4), rng.integers(-1, 50, (2, 4)))
    bits = MaskBits(np.array([255, 128], np.uint8), (np.array([7], np.int64),))
    query = ShardQuery(PIN, queries, np.array([10, 20]), np.array([5, 6]), rng.integers(-1, 50, (2, 3)), floats(rng, 2, 3, 4))
    return replace(query, **({"masks": (bits.digest, None), "sent_masks": {bits.digest: bits}} | changed))


def an_answer(**changed: Any) -> ShardAnswer:
    """Two queries with 3 and 1 of 3 items."""
    ranks = np.array([[-1, -2, -3], [-1, -np.inf, -np.inf]], np.float32)
    rows = np.array([[4, 9, 2], [7, -1, -1]])
    frontier = Frontier(np.array([[3, 5], [4, -1]]), np.array([[0, -1], [-2, -np.inf]], np.float32))
    result = SearchResult(rows, np.exp(ranks), ranks, ranks, np.array([3, 1]), np.array([True, False]), frontiers=(frontier,))
    return ShardAnswer(PIN, replace(result, **changed), "compiled-cpu", 1.5, 2)


def a_level(level: int, node: int, candidate: int) -> LevelTrace:
    """One node and one candidate of a level, for both queries."""
    zeros = np.zeros((2, 1), np.float32)
    return LevelTrace(level, np.full((2, 1), node), zeros, np.full((2, 1), candidate), zeros, zeros, zeros)
