"""The queries of a call that are searched alike, and their results put together.

Most calls have one part. Queries whose histories hold live items bring their states; frozen ones must not see the memory of live items.

Legend: B queries, T history, M results, K beam, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.masks.eligibility import NO_NODE
from espalier.search import NO_ITEM, Coverage, Frontier, LevelTrace, SearchResult

Array = NDArray[Any]
Int64 = NDArray[np.int64]
NODES = {"nodes_BK", "candidates_BC"}


class Part(NamedTuple):
    """Queries (int64 positions) and what the wrapped engine found for them."""

    members: Int64
    found: SearchResult


def together(batch: int, width: int, parts: Sequence[Part]) -> SearchResult:
    """The result of a call of `batch` queries, the largest m of which is `width`, from those of its parts."""
    if len(parts) == 1:
        return parts[0].found
    results = [part.found for part in parts]
    trace = None
    if results[0].trace is not None:
        levels = [{level.level: level for level in result.trace or ()} for result in results]
        trace = tuple(_level(batch, h, parts, [own.get(h) for own in levels]) for h in sorted(set().union(*levels)))
    frontiers = tuple(_frontier(batch, parts, place) for place in range(len(results[0].frontiers)))

    def joined(name: str, filler: float, wide: int | None) -> Array:
        return _joined(batch, parts, [getattr(result, name) for result in results], filler, wide)

    return SearchResult(
        item_rows_BM=joined("item_rows_BM", NO_ITEM, width),
        scores_BM=joined("scores_BM", 0, width),
        ranks_BM=joined("ranks_BM", -np.inf, width),
        keys_BM=joined("keys_BM", -np.inf, width),
        count_B=joined("count_B", 0, None),
        complete_B=joined("complete_B", 0, None),
        trace=trace,
        finite_B=None if results[0].finite_B is None else joined("finite_B", 1, None),
        frontiers=frontiers,
        coverage=_coverage(batch, parts),
    )


def _coverage(batch: int, parts: Sequence[Part]) -> Coverage | None:
    known = [part.found.coverage for part in parts if part.found.coverage is not None]
    if not known:
        return None
    return replace(known[0], answered_BS=_joined(batch, parts, [coverage.answered_BS for coverage in known], 0, len(known[0].items_S)))


def _joined(batch: int, parts: Sequence[Part], arrays: Sequence[Array | None], filler: float, width: int | None) -> Array:
    """The rows of some arrays, `filler` where one has none; width: of the result, None where rows are single numbers."""
    known = [array for array in arrays if array is not None]
    out = np.full(batch if width is None else (batch, width), filler, known[0].dtype)
    for part, array in zip(parts, arrays, strict=True):
        if array is not None and width is None:
            out[part.members] = array
        elif array is not None:
            out[part.members, : array.shape[1]] = array
    return out


def _level(batch: int, h: int, parts: Sequence[Part], levels: Sequence[LevelTrace | None]) -> LevelTrace:
    joined = {}
    names = ("nodes_BK", "ranks_BK", "keys_BK", "candidates_BC", "candidate_ranks_BC", "candidate_keys_BC")
    for name in names:
        arrays = [None if level is None else getattr(level, name) for level in levels]
        width = max(array.shape[1] for array in arrays if array is not None)
        joined[name] = _joined(batch, parts, arrays, NO_NODE if name in NODES else -np.inf, width)
    return LevelTrace(h, **joined)


def _frontier(batch: int, parts: Sequence[Part], place: int) -> Frontier:
    own = [part.found.frontiers[place] for part in parts]
    width = max(frontier.nodes_BK.shape[1] for frontier in own)
    states = [frontier.states_BS for frontier in own]
    return replace(
        own[0],
        nodes_BK=_joined(batch, parts, [frontier.nodes_BK for frontier in own], NO_NODE, width),
        ranks_BK=_joined(batch, parts, [frontier.ranks_BK for frontier in own], -np.inf, width),
        states_BS=None if states[0] is None else _joined(batch, parts, states, 0, states[0].shape[1]),
    )
