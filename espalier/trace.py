"""Which levels of a search a trace has: the same ones on every engine.

Engines score levels that no beam cuts where it suits them. A trace begins where the search does, on the query's start level.

Legend: B queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.masks.eligibility import NO_NODE
from espalier.search import LevelTrace
from espalier.tree import Tree


def from_start_level(tree: Tree, beam_size_B: NDArray[np.int64], levels: Sequence[LevelTrace]) -> tuple[LevelTrace, ...]:
    """The levels from each query's start level to H; a level that lies above a query's is empty for that query."""
    start_B = np.array([tree.start_level(size) for size in beam_size_B.tolist()], np.int64)
    return tuple(_without(level, start_B > level.level) for level in levels if np.any(start_B <= level.level))


def _without(level: LevelTrace, above_B: NDArray[np.bool_]) -> LevelTrace:
    if not above_B.any():
        return level
    above_B1 = above_B[:, None]

    def empty(array: NDArray[Any], filler: float) -> NDArray[Any]:
        return np.where(above_B1, array.dtype.type(filler), array)

    return replace(
        level,
        nodes_BK=empty(level.nodes_BK, NO_NODE),
        ranks_BK=empty(level.ranks_BK, -np.inf),
        keys_BK=empty(level.keys_BK, -np.inf),
        candidates_BC=empty(level.candidates_BC, NO_NODE),
        candidate_ranks_BC=empty(level.candidate_ranks_BC, -np.inf),
        candidate_keys_BC=empty(level.candidate_keys_BC, -np.inf),
    )
