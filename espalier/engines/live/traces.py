"""The last level of a trace with live leaves in it.

Legend: B queries, C live leaves that a query scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.search import LevelTrace

Int64 = NDArray[np.int64]


class Candidates(NamedTuple):
    """Live leaves that a query scored: their handles, ranks and keys."""

    handle_C: Int64
    ranks_C: NDArray[np.float32]
    keys_C: NDArray[np.float32]


def with_live(nodes: int, last: LevelTrace, lives: Sequence[Candidates], m_B: Int64) -> LevelTrace:
    """The last level with the live leaves, as nodes N + handle behind the trained ones; the best m of both are kept."""
    most = max((len(live.handle_C) for live in lives), default=0)
    shape = len(lives), most
    nodes_BC, ranks_BC, keys_BC = np.full(shape, -1, np.int64), np.full(shape, -np.inf, np.float32), np.full(shape, -np.inf, np.float32)
    for b, live in enumerate(lives):
        order = np.argsort(live.handle_C)
        count = len(order)
        nodes_BC[b, :count] = nodes + live.handle_C[order]
        ranks_BC[b, :count], keys_BC[b, :count] = live.ranks_C[order], live.keys_C[order]
    candidates_BC = np.concatenate([last.candidates_BC, nodes_BC], axis=1)
    candidate_ranks_BC = np.concatenate([last.candidate_ranks_BC, ranks_BC], axis=1)
    candidate_keys_BC = np.concatenate([last.candidate_keys_BC, keys_BC], axis=1)
    width = min(int(m_B.max(initial=0)), candidates_BC.shape[1])
    kept = [
        np.full((len(lives), width), filler, array.dtype) for filler, array in ((-1, nodes_BC), (-np.inf, ranks_BC), (-np.inf, keys_BC))
    ]
    for b in range(len(lives)):
        best = np.argsort(-candidate_keys_BC[b], kind="stable")[: m_B[b]]
        best = np.sort(best[candidate_keys_BC[b, best] > -np.inf])
        for array, source in zip(kept, (candidates_BC, candidate_ranks_BC, candidate_keys_BC), strict=True):
            array[b, : len(best)] = source[b, best]
    return replace(
        last,
        nodes_BK=kept[0],
        ranks_BK=kept[1],
        keys_BK=kept[2],
        candidates_BC=candidates_BC,
        candidate_ranks_BC=candidate_ranks_BC,
        candidate_keys_BC=candidate_keys_BC,
    )
