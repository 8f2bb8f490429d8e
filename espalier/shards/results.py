"""The result of a search as arrays of a message, and back.

Legend: B queries, M results, K beam, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from espalier.arrays import Array, Int64
from espalier.engines.stages import OF_LEVELS, TreeQuery
from espalier.errors import InvalidMessage
from espalier.manifest import MAX_TREES
from espalier.masks.eligibility import NO_NODE
from espalier.queries import Kind, VectorKind
from espalier.search import NO_ITEM, Frontier, LevelTrace, SearchResult
from espalier.shards.framing import Arrays, Fields

MAX_LEVELS = 64
HEAD_BYTES, TRACE_BYTES = 1 << 16, 256 << 20
"""Most bytes of an answer's header, and of an answer with traces, which list all candidates."""


def result_arrays(result: SearchResult) -> tuple[dict[str, Any], dict[str, Array]]:
    """The message fields and the arrays of a result."""
    arrays: dict[str, Array] = {
        "item_rows": result.item_rows_BM,
        "scores": result.scores_BM,
        "ranks": result.ranks_BM,
        "keys": result.keys_BM,
        "count": result.count_B,
        "complete": result.complete_B.view(np.uint8),
    }
    if result.finite_B is not None:
        arrays["finite"] = result.finite_B.view(np.uint8)
    levels = [[level.level for level in trace] for trace in result.traces]
    for tree, trace in enumerate(result.traces):
        for level in trace:
            arrays |= {f"trace.{tree}.{level.level}.{name}": getattr(level, name) for name in OF_LEVELS}
    for tree, frontier in enumerate(result.frontiers):
        arrays |= {f"frontier.{tree}.nodes": frontier.nodes_BK, f"frontier.{tree}.ranks": frontier.ranks_BK}
    return {"traces": levels, "frontiers": len(result.frontiers)}, arrays


def result_of(message: Fields, arrays: Arrays) -> SearchResult:
    """The result of a decoded message. Raises InvalidMessage."""
    item_rows_BM = arrays.take("item_rows", np.int64, (None, None))
    batch, m = item_rows_BM.shape
    scores_BM, ranks_BM, keys_BM = (arrays.take(name, np.float32, (batch, m)) for name in ("scores", "ranks", "keys"))
    count_B = arrays.take("count", np.int64, (batch,))
    frontiers = tuple(_frontier(arrays, tree, batch) for tree in range(message.integer("frontiers", 0, MAX_TREES)))
    return SearchResult(
        item_rows_BM,
        scores_BM,
        ranks_BM,
        keys_BM,
        count_B,
        arrays.take("complete", np.uint8, (batch,)) != 0,
        traces=_traces(message.take("traces", list), arrays, batch),
        finite_B=arrays.take("finite", np.uint8, (batch,)) != 0 if "finite" in arrays else None,
        frontiers=frontiers,
    )


def answer_bytes(query: TreeQuery) -> int:
    """Most bytes of the answer to a search."""
    if query.trace:
        return TRACE_BYTES
    batch, m = len(query), int(query.m_B.max(initial=0))
    size = HEAD_BYTES + batch * (32 + 20 * m)  # rows of 8 bytes, scores, ranks and keys of 4
    if query.frontier:
        size += len(query.eligible_T) * batch * 16 * int(query.beam_size_B.max(initial=0))
    return size


def check_result(result: SearchResult, batch: int, m: int, items: int, levels: Sequence[Int64], kind: Kind) -> None:
    """Raise InvalidMessage unless a decoded result may be the answer to `batch` queries of a kind for at most `m` items.

    items   of the whole catalogue
    levels  int64[H+2] of each whole tree: its `level_offset`
    Each row begins with its results and is padded with NO_ITEM. Numbers are finite, and scores are from 0 to 1. A trace ends on the leaves.
    Its nodes lie on its levels, those of frontiers on the level above the leaves. Exactly for vectors, the result says which queries have
    finite logits.
    """
    rows, most = result.item_rows_BM.shape
    if rows != batch or most > m:
        raise InvalidMessage("item_rows", f"{rows} queries with {most} items", f"{batch} queries with at most {m} items")
    _check_range("count", result.count_B, 0, most)
    _check_range("item_rows", result.item_rows_BM, NO_ITEM, items - 1)
    is_item_BM = np.arange(most) < result.count_B[:, None]
    if not np.array_equal(is_item_BM, result.item_rows_BM != NO_ITEM):
        raise InvalidMessage("count", result.count_B[:8].tolist(), "the number of items in each row, which stand in front")
    for name, array in (("scores", result.scores_BM), ("ranks", result.ranks_BM), ("keys", result.keys_BM)):
        if not np.isfinite(array[is_item_BM]).all():
            raise InvalidMessage(name, "numbers that are not finite", "a finite number for every item")
    scores = result.scores_BM[is_item_BM]
    if scores.size and (scores.min() < 0 or scores.max() > 1):
        raise InvalidMessage("scores", float(scores.max() if scores.max() > 1 else scores.min()), "from 0 to 1")
    if (result.finite_B is not None) != isinstance(kind, VectorKind):
        raise InvalidMessage(
            "finite", "something" if result.finite_B is not None else "nothing", "of queries that are vectors, and of no others"
        )
    for tree, (trace, offset) in enumerate(zip(result.traces, levels, strict=False)):
        if not trace or trace[-1].level != len(offset) - 2:
            raise InvalidMessage(f"trace.{tree}", [level.level for level in trace], f"levels down to {len(offset) - 2}, the leaves")
        for level in trace:
            if level.level > len(offset) - 2:
                raise InvalidMessage(f"trace.{tree}", level.level, f"levels of a tree of height {len(offset) - 2}")
            _check_nodes(f"trace.{tree}", level.nodes_BK, offset, level.level)
            _check_nodes(f"trace.{tree}", level.candidates_BC, offset, level.level)
    for tree, (frontier, offset) in enumerate(zip(result.frontiers, levels, strict=False)):
        _check_nodes(f"frontier.{tree}", frontier.nodes_BK, offset, len(offset) - 3)
        if not np.isfinite(frontier.ranks_BK[frontier.nodes_BK != NO_NODE]).all():
            raise InvalidMessage(f"frontier.{tree}.ranks", "numbers that are not finite", "a finite number for every node")
    if len(result.traces) > len(levels) or len(result.frontiers) > len(levels):
        raise InvalidMessage("frontiers", max(len(result.traces), len(result.frontiers)), f"at most {len(levels)} trees")


def _check_range(field: str, array: Array, least: int, most: int) -> None:
    if array.size and (array.min() < least or array.max() > most):
        raise InvalidMessage(field, int(array.max() if array.max() > most else array.min()), f"from {least} to {most}")


def _check_nodes(field: str, nodes: Array, offset: Int64, level: int) -> None:
    """Raise InvalidMessage unless all are nodes of this level, or padding."""
    _check_range(field, nodes[nodes != NO_NODE], int(offset[level]), int(offset[level + 1]) - 1)


def _traces(described: list[Any], arrays: Arrays, batch: int) -> tuple[tuple[LevelTrace, ...], ...]:
    if len(described) > MAX_TREES:
        raise InvalidMessage("traces", f"{len(described)} trees", f"at most {MAX_TREES}")
    traces = []
    for tree, levels in enumerate(described):
        if not isinstance(levels, list) or not all(type(level) is int and 0 <= level < MAX_LEVELS for level in levels):
            raise InvalidMessage(f"traces[{tree}]", levels, f"levels from 0 to {MAX_LEVELS - 1}")
        traces.append(tuple(_level(arrays, f"trace.{tree}", level, batch) for level in levels))
    return tuple(traces)


def _level(arrays: Arrays, prefix: str, level: int, batch: int) -> LevelTrace:
    nodes_BK = arrays.take(f"{prefix}.{level}.nodes_BK", np.int64, (batch, None))
    candidates_BC = arrays.take(f"{prefix}.{level}.candidates_BC", np.int64, (batch, None))
    beam_shape, candidates_shape = nodes_BK.shape, candidates_BC.shape
    return LevelTrace(
        level,
        nodes_BK,
        arrays.take(f"{prefix}.{level}.ranks_BK", np.float32, beam_shape),
        candidates_BC,
        arrays.take(f"{prefix}.{level}.candidate_ranks_BC", np.float32, candidates_shape),
        arrays.take(f"{prefix}.{level}.keys_BK", np.float32, beam_shape),
        arrays.take(f"{prefix}.{level}.candidate_keys_BC", np.float32, candidates_shape),
    )


def _frontier(arrays: Arrays, tree: int, batch: int) -> Frontier:
    nodes_BK = arrays.take(f"frontier.{tree}.nodes", np.int64, (batch, None))
    return Frontier(nodes_BK, arrays.take(f"frontier.{tree}.ranks", np.float32, nodes_BK.shape))
