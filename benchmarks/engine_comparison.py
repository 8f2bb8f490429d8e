"""Compare an engine's answers with the reference's: the comparisons of the signature test, for tests and for the checks on a GPU.

(a) With integer weights all arithmetic is exact, so an engine's results equal the reference's, ties included (`differences`). (b) With real
weights the reference rescores the beams that the engine kept: it finds the same candidates of the same ranks, up to the engine's rounding,
and every kept candidate is at least as good as the best dropped one, less that rounding (`wrong_beams`). (c) A query gets the same answer
in any batch (`wrong_alone`). (d) With integer weights the beams above the leaves, under which a router's live items hang, are the
reference's (`wrong_parents`). Each returns a line for every error.

Legend: B queries, K beam, C candidates, M results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from espalier.arrays import Array
from espalier.bundle import Bundle
from espalier.engines.pipeline import Pipeline
from espalier.engines.reference import ReferenceEngine, Step
from espalier.engines.reference_search import ReferenceSearch
from espalier.queries import QueryBatch
from espalier.search import Engine, LevelTrace, SearchParams, SearchResult
from espalier.tree import Tree


def differences(result: SearchResult, expected: SearchResult) -> list[str]:
    """A line for each array that differs from the reference's. Weights must be integers."""
    wrong = []
    for name in ("item_rows_BM", "ranks_BM", "keys_BM", "scores_BM", "count_B", "complete_B"):
        array, correct = getattr(result, name), getattr(expected, name)
        if array.shape != correct.shape:
            wrong.append(f"{name}: got the shape {array.shape}, expected {correct.shape}")
        elif not np.array_equal(array, correct):
            first = tuple(int(index) for index in np.argwhere(array != correct)[0])
            wrong.append(
                f"{name}: {np.sum(array != correct)} of {array.size} differ, at {first} got {array[first]}, expected {correct[first]}"
            )
    return wrong


def wrong_beams(engine: Engine, bundle: Bundle, queries: QueryBatch, params: SearchParams, rounding: float | None = None) -> list[str]:
    """Errors in the traced beams: nodes that are not among the best by the reference's scores. rounding: instead of the engine's own.

    An engine searches traced queries one by one. So the same queries are also searched in one call, which must find the same items.
    """
    rounding = engine.rounding if rounding is None else rounding
    reference = ReferenceEngine(bundle)
    result = engine.search(queries, replace(params, trace=True))
    if not result.traces:
        return ["the engine gave no trace"]
    if len(result.traces) != len(bundle.alone):
        return [f"the engine gave the traces of {len(result.traces)} trees, the bundle has {len(bundle.alone)}"]
    wrong = []
    for tree_index, (trace, tree_bundle) in enumerate(zip(result.traces, bundle.alone, strict=True)):
        for b in range(len(queries)):
            start = tree_bundle.tree.start_level(int(params.beam_size_B[b]))
            levels = {level.level: level for level in trace if level.level >= start}
            if any(_has_something(level, b) for level in trace if level.level < start):
                wrong.append(f"query {b}: the trace begins above level {start}, the first that its beam may cut")
            if list(levels) != list(range(start, tree_bundle.tree.height + 1)):
                wrong.append(f"query {b}: the trace has levels {list(levels)}, expected all from {start} to {tree_bundle.tree.height}")
            beams = {h: level.nodes_BK[b][level.nodes_BK[b] >= 0] for h, level in levels.items()}
            steps, worse_lines = replayed(reference, queries, params, b, beams, rounding, tree_index)
            wrong += worse_lines
            for step in steps:
                if step.level in levels:
                    wrong += [f"query {b}, level {step.level}: {line}" for line in _wrong_candidates(levels[step.level], b, step, rounding)]
    again = engine.search(queries, params)
    if not np.array_equal(again.item_rows_BM, result.item_rows_BM):
        wrong.append("item_rows_BM: a search without a trace finds other items")
    return wrong


def _has_something(level: LevelTrace, b: int) -> bool:
    """Whether a level has candidates, nodes or ranks of query b."""
    ranks = (level.ranks_BK[b], level.keys_BK[b], level.candidate_ranks_BC[b], level.candidate_keys_BC[b])
    return bool((level.candidates_BC[b] >= 0).any() or (level.nodes_BK[b] >= 0).any() or any((array > -np.inf).any() for array in ranks))


def wrong_alone(engine: Engine, queries: QueryBatch, params: SearchParams, count: int | None = None) -> list[str]:
    """Which of the first `count` queries (None: all) get another answer alone than in the batch."""
    batch_result = engine.search(queries, params)
    wrong = []
    for b in range(len(queries) if count is None else min(count, len(queries))):
        position = np.array([b])
        single_result = engine.search(queries.take(position), params.take(position))
        m = params.m_B[b]
        for name in ("item_rows_BM", "ranks_BM", "keys_BM"):
            if not np.array_equal(getattr(single_result, name)[0], getattr(batch_result, name)[b, :m]):
                wrong.append(f"query {b}: {name} differs between alone and in a batch of {len(queries)}")
    return wrong


def wrong_parents(engine: Pipeline, bundle: Bundle, queries: QueryBatch, params: SearchParams) -> list[str]:
    """Where results, and the beams above the leaves, differ from the reference's. Weights must be integers."""
    got, expected = engine.parents(queries, params), Pipeline(bundle, ReferenceSearch(bundle)).parents(queries, params)
    wrong = differences(got, expected)
    mine_BS, right_BS = got.leaf_states_BS, expected.leaf_states_BS
    if right_BS is not None and (mine_BS is None or not np.array_equal(mine_BS, right_BS)):
        wrong.append("other states on the leaf level")
    for tree_index, (tree_bundle, got_beam, expected_beam) in enumerate(zip(bundle.alone, got.frontiers, expected.frontiers, strict=True)):
        for b, beam_size in enumerate(params.beam_size_B.tolist()):
            beams = ((beam.nodes_BK[b], beam.ranks_BK[b]) for beam in (got_beam, expected_beam))
            lines = _wrong_parents(tree_bundle.tree, bundle.manifest.ranking.gamma, beam_size, *beams)
            wrong += [f"tree {tree_index}, query {b}: {line}" for line in lines]
    return wrong


def _wrong_parents(tree: Tree, gamma: float, beam_size: int, got: tuple[Array, Array], expected: tuple[Array, Array]) -> list[str]:
    """How a query's beam differs. If no level above the leaves is pruned, it may have more nodes; at γ = 0 their ranks do not count."""
    nodes_K, ranks_K = got
    is_node_K = nodes_K >= 0
    if np.any(is_node_K[1:] & ~is_node_K[:-1]) or np.any(ranks_K[~is_node_K] != -np.inf) or np.any(np.diff(nodes_K[is_node_K]) <= 0):
        return ["nodes that do not rise, or no padding behind them"]
    got_ranks = dict(zip(nodes_K[is_node_K].tolist(), ranks_K[is_node_K].tolist(), strict=True))
    expected_ranks = {node: rank for node, rank in zip(*(array_K.tolist() for array_K in expected), strict=True) if node >= 0}
    if tree.start_level(beam_size) == tree.height:
        parent_level = tree.level(tree.height - 1)
        if not expected_ranks.keys() <= got_ranks.keys() <= set(parent_level):
            return [f"nodes {list(got_ranks)}, expected all of {list(expected_ranks)}, and none but those of the level"]
        return [] if gamma == 0 or all(got_ranks[node] == rank for node, rank in expected_ranks.items()) else ["other ranks"]
    return [] if got_ranks == expected_ranks else [f"nodes and ranks {got_ranks}, expected {expected_ranks}"]


def replayed(
    reference: ReferenceEngine,
    queries: QueryBatch,
    params: SearchParams,
    b: int,
    beams: Mapping[int, Array],
    rounding: float,
    tree_index: int = 0,
) -> tuple[list[Step], list[str]]:
    """The reference's steps for query b along an engine's beams, and a line for each beam that is not the best of its candidates.

    tree_index  of a forest's trees, from 0
    """
    steps = reference.steps(queries, params, b, dict(beams), tree_index)
    wrong = []
    tree_bundles = reference.bundle.alone
    for step in steps:
        beam = beams.get(step.level, step.kept_K)
        is_kept_C = np.isin(step.candidates_C, beam)
        size = int(params.beam_size_B[b])
        if step.level == tree_bundles[tree_index].tree.height:
            size = int(params.m_B[b]) if len(tree_bundles) == 1 else len(is_kept_C)
        position = f"query {b}, level {step.level}"
        if is_kept_C.sum() != len(beam):
            wrong.append(f"{position}: {len(beam) - is_kept_C.sum()} kept nodes are no candidates")
        if is_kept_C.sum() != min(len(is_kept_C), size):
            wrong.append(f"{position}: {is_kept_C.sum()} of {len(is_kept_C)} candidates kept, expected {min(len(is_kept_C), size)}")
        if is_kept_C.any() and not is_kept_C.all() and not step.keys_C[is_kept_C].min() >= step.keys_C[~is_kept_C].max() - rounding:
            worse = step.keys_C[~is_kept_C].max() - step.keys_C[is_kept_C].min()
            wrong.append(f"{position}: a kept node is worse than a dropped one by {worse:.3g}, rounding {rounding:g}")
    return steps, wrong


def _wrong_candidates(level: LevelTrace, b: int, step: Step, rounding: float) -> list[str]:
    """Errors in the candidates of query b, in their ranks, and in the ranks of the kept nodes."""
    eligible_C = level.candidates_BC[b] >= 0
    candidates_C = level.candidates_BC[b][eligible_C]
    if not np.array_equal(candidates_C, step.candidates_C):
        return [f"{len(candidates_C)} candidates, the reference has {len(step.candidates_C)} or others"]
    wrong = []
    for name, of_step in (("rank", step.ranks_C), ("key", step.keys_C)):
        all_C, kept_K = getattr(level, f"candidate_{name}s_BC")[b], getattr(level, f"{name}s_BK")[b]
        mine_C, is_kept = all_C[eligible_C], level.nodes_BK[b] >= 0
        close_C = np.isclose(mine_C, of_step, rtol=0, atol=rounding)  # −inf is close to −inf
        if not close_C.all():
            away = np.abs(mine_C[~close_C] - of_step[~close_C]).max()
            wrong.append(f"the {name}s of {np.sum(~close_C)} candidates are up to {away:.3g} away, rounding {rounding:g}")
        if not np.all(all_C[~eligible_C] == -np.inf):
            wrong.append(f"an empty candidate slot has a {name}")
        if not np.all(kept_K[~is_kept] == -np.inf):
            wrong.append(f"an empty beam slot has a {name}")
        of_node = dict(zip(candidates_C.tolist(), mine_C.tolist(), strict=True))
        if [of_node.get(node) for node in level.nodes_BK[b][is_kept].tolist()] != kept_K[is_kept].tolist():
            wrong.append(f"a kept node has another {name} than as a candidate")
    return wrong
