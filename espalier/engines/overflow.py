"""Live leaves under the beams of a call, and scored ones joined to what the trained tree gave; compiled.

The live leaves of a parent are its overflow list: what a fold would make its children. Scored here beside the children, they are cut with
them by key, then by (parent, slot), the order of leaves in a fold, so that the answer is that of the fold.

Legend: B queries, K beam, M results, X live leaves, Y parents of live leaves, C live leaves under a query's beam, G distinct masks,
R handles.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.engines.best_nodes import best_first
from espalier.memory_lists import NO_ENTRIES
from espalier.memory_sums import of_live_leaves
from espalier.read_only import read_only

Array = NDArray[Any]
LARGEST = np.finfo(np.float32).max


class ScoredLive(NamedTuple):
    """Live leaves that were scored: those of query b are begin_B[b] … begin_B[b + 1] − 1, ascending by (parent, slot).

    begin_B     int64[B + 1]
    position_C  int64: among the live leaves of the tree
    ranks_C     float32, finite: leaves without a finite rank are left out
    finite_B    bool[B]: False where some leaf has a logit that is not finite; None: not asked
    """

    begin_B: NDArray[np.int64]
    position_C: NDArray[np.int64]
    ranks_C: NDArray[np.float32]
    finite_B: NDArray[np.bool_] | None = None

    @property
    def spans(self) -> list[slice]:
        """Those of each query."""
        return [slice(begin, end) for begin, end in pairwise(self.begin_B.tolist())]


def masks_of(live_BR: Sequence[NDArray[np.bool_] | None]) -> tuple[Array, ...]:
    """int64[B]: the mask of each query, −1 for none; bool[G, R]: the masks."""
    if len(live_BR) == 1 and live_BR[0] is not None:
        return read_only(FIRST, live_BR[0][None])
    distinct = list({id(live_R): live_R for live_R in live_BR if live_R is not None}.values())
    place = {id(live_R): g for g, live_R in enumerate(distinct)}
    mask_B = np.array([-1 if live_R is None else place[id(live_R)] for live_R in live_BR], np.int64)
    if len(distinct) == 1:
        return read_only(mask_B, distinct[0][None])
    eligible_GR = np.zeros((len(distinct), max(map(len, distinct), default=0)), np.bool_)
    for eligible_R, live_R in zip(eligible_GR, distinct, strict=True):
        eligible_R[: len(live_R)] = live_R
    return read_only(mask_B, eligible_GR)


(FIRST,) = read_only(np.zeros(1, np.int64))
_NO_TRAINED = read_only(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.float32))
NO_MEMORY = np.float32(0), *read_only(np.empty((0, 0), np.int64)), _NO_TRAINED, NO_ENTRIES, np.empty(0)
"""What `joined` takes without a memory."""


@compiled()
def parents_of(nodes_K: Array, parent_Y: Array, at_K: Array) -> None:
    """Where each node of a beam (ascending, −1 behind) is among the parents of live leaves (ascending): −1 for one that is not."""
    count = 0
    while count < len(nodes_K) and nodes_K[count] >= 0:
        count += 1
    at_K[count:] = -1
    low, parents = 0, len(parent_Y)
    for k in range(count):
        node = nodes_K[k]
        if low < parents and parent_Y[low] < node:  # in ever longer steps from the place before, which is near in memory too
            step = 1
            while low + step < parents and parent_Y[low + step] < node:
                low += step
                step *= 2
            high = min(low + step, parents)
            low += 1
            while low < high:
                middle = (low + high) // 2
                if parent_Y[middle] < node:
                    low = middle + 1
                else:
                    high = middle
        at_K[k] = low if low < parents and parent_Y[low] == node else -1


@compiled()
def under_beams(beams: Any, leaves: Any, masks: Any, gamma: Any) -> tuple[Array, Array, Array]:
    """The eligible live leaves under each query's beam: begin_B and position_C of ScoredLive, and float32[C]: what their parents pass down.

    beams   nodes_BK, ranks_BK of a frontier
    leaves  parent_Y, begin_Y, handle_X
    masks   those of `masks_of`
    """
    nodes_BK, ranks_BK = beams
    parent_Y, begin_Y, handle_X = leaves
    mask_B, eligible_GR = masks
    batch, most = len(mask_B), 0
    begin_B, at_BK = np.zeros(batch + 1, np.int64), np.empty(nodes_BK.shape, np.int64)
    for b in range(batch):
        if mask_B[b] >= 0:
            parents_of(nodes_BK[b], parent_Y, at_BK[b])
            for at in at_BK[b]:
                if at >= 0:
                    most += begin_Y[at + 1] - begin_Y[at]
    position_C, above_C, count = np.empty(most, np.int64), np.empty(most, np.float32), 0
    for b in range(batch):
        if mask_B[b] >= 0 and most > 0:
            for k in range(nodes_BK.shape[1]):
                if at_BK[b, k] < 0:
                    continue
                above = gamma * ranks_BK[b, k] if gamma > 0 else np.float32(0)
                for x in range(begin_Y[at_BK[b, k]], begin_Y[at_BK[b, k] + 1]):
                    if handle_X[x] < eligible_GR.shape[1] and eligible_GR[mask_B[b], handle_X[x]]:
                        position_C[count], above_C[count] = x, above
                        count += 1
        begin_B[b + 1] = count
    return begin_B, position_C[:count], above_C[:count]


@compiled()
def joined(found: Any, scored: Any, leaves: Any, tree: Any, m_B: Array, memory: Any) -> tuple[Array, Array, Array, Array, Array]:
    """The best m of trained and live leaves, best first: item rows int64[B, M], ranks and keys float32[B, M], and how many, int64[B]; and
    the keys of all live leaves, float32[C], those that are not finite among them, which are left out.

    found   item_rows_BM, ranks_BM, keys_BM, count_B of the trained tree
    scored  begin_B, position_C, ranks_C
    leaves  parent_X, slot_X and row_X, their item rows
    tree    leaf_of_item, parent, first_child
    memory  λ, 0 without a memory; history_BT; trained, live, sum_R of `of_live_leaves`
    Of equal keys the lower (parent, slot) comes first.
    """
    rows_BM, ranks_BM, keys_BM, count_B = found
    begin_B, position_C, ranks_C = scored
    parent_X, slot_X, row_X = leaves
    leaf_of_item, parent, first_child = tree
    key_weight, history_BT, trained, live_entries, sum_R = memory
    keys_C = ranks_C
    if key_weight > 0:
        items, row_C = len(leaf_of_item), row_X[position_C]
        keys_C = ranks_C + key_weight * of_live_leaves(history_BT, begin_B, row_C, items, trained, live_entries, sum_R)
    new_rows_BM, new_count_B = np.full(rows_BM.shape, -1, np.int64), count_B.copy()
    new_ranks_BM, new_keys_BM = np.full(rows_BM.shape, -np.inf, np.float32), np.full(rows_BM.shape, -np.inf, np.float32)
    best_C = np.empty(len(keys_C), np.int64)
    for b in range(len(m_B)):
        lowest = keys_BM[b, m_B[b] - 1] if 0 < m_B[b] == count_B[b] else np.float32(-np.inf)
        live, i, j, count = 0, 0, 0, 0
        for c in range(begin_B[b], begin_B[b + 1]):
            if abs(keys_C[c]) <= LARGEST and keys_C[c] >= lowest:
                best_C[live] = c
                live += 1
        order = best_first(keys_C[best_C[:live]], live)
        while count < m_B[b] and (i < count_B[b] or j < live):
            takes_live = i == count_B[b]
            if not takes_live and j < live:
                c = best_C[order[j]]
                takes_live = keys_C[c] > keys_BM[b, i]
                if keys_C[c] == keys_BM[b, i]:
                    leaf, x = leaf_of_item[rows_BM[b, i]], position_C[c]
                    above = parent[leaf]
                    takes_live = parent_X[x] < above or (parent_X[x] == above and slot_X[x] < leaf - first_child[above])
            if takes_live:
                c = best_C[order[j]]
                new_rows_BM[b, count], new_ranks_BM[b, count], new_keys_BM[b, count] = row_X[position_C[c]], ranks_C[c], keys_C[c]
                j += 1
            else:
                new_rows_BM[b, count], new_ranks_BM[b, count], new_keys_BM[b, count] = rows_BM[b, i], ranks_BM[b, i], keys_BM[b, i]
                i += 1
            count += 1
        new_count_B[b] = count
    return new_rows_BM, new_ranks_BM, new_keys_BM, new_count_B, keys_C
