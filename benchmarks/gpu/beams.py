"""Does a search give the beams above the leaves that the reference gives? A router's live items hang under them.

Legend: B queries, K beam.
"""

from __future__ import annotations

import numpy as np

from benchmarks.engine_comparison import differences
from espalier.bundle import Bundle
from espalier.engines.pipeline import Pipeline
from espalier.engines.reference_search import ReferenceSearch
from espalier.engines.stages import Frontier
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from espalier.tree import Tree


def wrong_parents(engine: Pipeline, bundle: Bundle, queries: QueryBatch, params: SearchParams) -> list[str]:
    """Where an engine's results and the beams that led to them are not the reference's, with integer weights."""
    got, expected = engine.parents(queries, params), Pipeline(bundle, ReferenceSearch(bundle)).parents(queries, params)
    wrong = differences(got.result, expected.result)
    mine_BS, right_BS = got.leaf_states_BS, expected.leaf_states_BS
    if right_BS is not None and (mine_BS is None or not np.array_equal(mine_BS, right_BS)):
        wrong.append("other states on the leaf level")
    for place, (alone, mine, right) in enumerate(zip(bundle.alone, got.frontiers, expected.frontiers, strict=True)):
        for b in range(len(queries)):
            lines = _wrong_beam(alone.tree, bundle.manifest.ranking.gamma, int(params.beam_size_B[b]), _of(mine, b), _of(right, b))
            wrong += [f"tree {place}, query {b}: {line}" for line in lines]
    return wrong


def _of(frontier: Frontier, b: int) -> Frontier:
    return Frontier(frontier.nodes_BK[b : b + 1], frontier.ranks_BK[b : b + 1])


def _wrong_beam(tree: Tree, gamma: float, beam_size: int, got: Frontier, expected: Frontier) -> list[str]:
    """Where a query's beam differs: where no level above the leaves is pruned, by more nodes, and ranks that mean nothing, it may."""
    (nodes_K,), (ranks_K,) = got.nodes_BK, got.ranks_BK
    there_K = nodes_K >= 0
    if np.any(there_K[1:] & ~there_K[:-1]) or np.any(ranks_K[~there_K] != -np.inf) or np.any(np.diff(nodes_K[there_K]) <= 0):
        return ["nodes that do not rise, or no padding behind them"]
    mine = dict(zip(nodes_K[there_K].tolist(), ranks_K[there_K].tolist(), strict=True))
    right_nodes = expected.nodes_BK[expected.nodes_BK >= 0].tolist()
    right = dict(zip(right_nodes, expected.ranks_BK[expected.nodes_BK >= 0].tolist(), strict=True))
    if tree.start_level(beam_size) == tree.height:
        above = tree.level(tree.height - 1)
        if not right.keys() <= mine.keys() <= set(above):
            return [f"nodes {list(mine)}, expected all of {right_nodes}, and none but those of the level"]
        return [] if gamma == 0 or all(mine[node] == rank for node, rank in right.items()) else ["other ranks"]
    return [] if mine == right else [f"nodes and ranks {mine}, expected {right}"]
