"""What shards answer together, by the reference: the router's merge in a few lines of NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from espalier.bundle import Bundle
from espalier.engines.reference import ReferenceEngine
from espalier.engines.stages import GivenQueries
from espalier.manifest import GraphScorer
from espalier.queries import QueryBatch
from espalier.search import Engine, SearchParams

Answer = list[tuple[int, float, float]]
"""Item row in the whole bundle, rank and key of each result, best first."""


def answers_of(bundle: Bundle, engine: Engine, queries: QueryBatch, params: SearchParams) -> list[Answer]:
    """What an engine answers, of a shard in the rows of the whole bundle."""
    result = engine.search(queries, params)
    rows = np.arange(bundle.tree.item_count) if bundle.shard is None else bundle.shard.items
    return [
        [(int(rows[row]), float(rank), float(key)) for row, rank, key in zip(*found, strict=True) if row >= 0]
        for found in zip(result.item_rows_BM, result.ranks_BM, result.keys_BM, strict=True)
    ]


def merged(
    whole: Bundle,
    shards: Sequence[Bundle],
    queries: QueryBatch,
    params: SearchParams,
    opened: Callable[[Bundle], Engine] = ReferenceEngine,
) -> list[Answer]:
    """The best m of all shards by key; ties go to the lower leaf of the whole tree, in a forest to the lower item row."""
    queries = with_states(whole, queries)
    answers = [answers_of(shard, opened(shard), queries, params) for shard in shards]
    place_I = np.arange(whole.tree.item_count) if whole.manifest.trees else whole.tree.leaf_of_item
    together = [sum(of_query, start=Answer()) for of_query in zip(*answers, strict=True)]
    return [
        sorted(found, key=lambda entry: (-entry[2], place_I[entry[0]]))[:m] for found, m in zip(together, params.m_B.tolist(), strict=True)
    ]


def with_states(whole: Bundle, queries: QueryBatch, frontier: bool = False) -> GivenQueries:
    """Queries as shards take them: of scorers that are graphs with the states that the whole bundle makes of them."""
    states_BLS = ReferenceEngine(whole).states(queries) if isinstance(whole.manifest.scorer, GraphScorer) else None
    return GivenQueries(queries.kind, queries.rows, states_BLS, frontier=frontier)
