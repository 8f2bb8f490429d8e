"""Compiled: the live leaves under the beams of a call, and their merge with the leaves of the trained tree.

The live leaves of a parent are its overflow list: a fold would make them its children. The merge orders live and trained leaves by key,
then by (parent, slot), which is the order of leaves after a fold. So the answer is that of the folded bundle.

Legend: B queries, K beam, M results, C live leaves under a query's beam, G distinct masks, R handles.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.engines.best_nodes import best_first
from espalier.entry_lists import BORN, DIED, KEY, NEXT, OTHER_KEY
from espalier.live.overlay import SLOT
from espalier.memory import NO_REPEAT
from espalier.memory_lists import NO_LIVE_ITEMS
from espalier.memory_sums import of_leaves
from espalier.read_only import read_only

Array = NDArray[Any]
LARGEST = np.finfo(np.float32).max


class ScoredLive(NamedTuple):
    """Live leaves that were scored: those of query b are begin_B[b] … begin_B[b + 1] − 1.

    begin_B     int64[B + 1]
    entry_C     int64: their entries
    ranks_C     float32, finite: leaves without a finite rank are left out
    finite_B    bool[B]: False where some leaf has a logit that is not finite; None: not checked
    """

    begin_B: NDArray[np.int64]
    entry_C: NDArray[np.int64]
    ranks_C: NDArray[np.float32]
    finite_B: NDArray[np.bool_] | None = None

    @property
    def spans(self) -> list[slice]:
        """The span of each query's leaves."""
        return [slice(begin, end) for begin, end in pairwise(self.begin_B.tolist())]


def masks_of(live_BR: Sequence[NDArray[np.bool_] | None]) -> tuple[Array, ...]:
    """int64[B]: the mask of each query, −1 for none; bool[G, R]: the masks."""
    if len(live_BR) == 1 and live_BR[0] is not None:
        return read_only(FIRST, live_BR[0][None])
    distinct = list({id(live_R): live_R for live_R in live_BR if live_R is not None}.values())
    mask_number = {id(live_R): g for g, live_R in enumerate(distinct)}
    mask_B = np.array([-1 if live_R is None else mask_number[id(live_R)] for live_R in live_BR], np.int64)
    if len(distinct) == 1:
        return read_only(mask_B, distinct[0][None])
    eligible_GR = np.zeros((len(distinct), max(map(len, distinct), default=0)), np.bool_)
    for eligible_R, live_R in zip(eligible_GR, distinct, strict=True):
        eligible_R[: len(live_R)] = live_R
    return read_only(mask_B, eligible_GR)


(FIRST,) = read_only(np.zeros(1, np.int64))
_NO_ROWS = np.empty(0, np.int64)
_NO_TRAINED = read_only(_NO_ROWS, np.empty(0, np.int32), np.empty(0, np.int16), np.empty(0, np.float32), NO_REPEAT, _NO_ROWS)
NO_MEMORY = np.float32(0), *read_only(np.empty((0, 0), np.int64)), _NO_TRAINED, NO_LIVE_ITEMS.memory, np.empty(0), np.empty(0)
"""The argument `memory` of `joined` for a bundle without a memory."""


@compiled()
def under_beams(beams: Any, entries: Any, masks: Any, gamma: Any) -> tuple[Array, Array, Array]:
    """The eligible live leaves under each query's beam: begin_B and entry_C of ScoredLive, and float32[C]: γ · their parents' ranks.

    beams    nodes_BK, ranks_BK of a frontier; −1 after a query's nodes
    entries  `EntryArrays` of live leaves
    masks    of `masks_of`
    """
    nodes_BK, ranks_BK = beams
    rows, first, length, _, moment = entries
    mask_B, eligible_GR = masks
    batch, beam = nodes_BK.shape
    max_leaves = 0
    for b in range(batch):
        for k in range(beam if mask_B[b] >= 0 else 0):
            if nodes_BK[b, k] < 0:
                break
            max_leaves += length[nodes_BK[b, k]]
    begin_B, count = np.zeros(batch + 1, np.int64), 0
    entry_C, inherited_C = np.empty(max_leaves, np.int64), np.empty(max_leaves, np.float32)
    for b in range(batch):
        for k in range(beam if mask_B[b] >= 0 else 0):
            if nodes_BK[b, k] < 0:
                break
            inherited = gamma * ranks_BK[b, k] if gamma > 0 else np.float32(0)
            entry = first[nodes_BK[b, k]]
            while entry > 0:
                if rows[entry, BORN] <= moment < rows[entry, DIED]:
                    handle = rows[entry, OTHER_KEY]
                    if handle < eligible_GR.shape[1] and eligible_GR[mask_B[b], handle]:
                        entry_C[count], inherited_C[count] = entry, inherited
                        count += 1
                entry = rows[entry, NEXT]
        begin_B[b + 1] = count
    return begin_B, entry_C[:count], inherited_C[:count]


@compiled()
def in_fold_order(order: Array, keys: Array, entry_C: Array, rows: Array) -> None:
    """Order leaves of equal keys as a fold does, the lower (parent, slot) first; the leaves are already ordered by key."""
    begin, count = 0, len(order)
    while begin < count:
        end = begin + 1
        while end < count and keys[order[end]] == keys[order[begin]]:
            end += 1
        if end - begin > 1:
            run = order[begin:end].copy()
            for column in (SLOT, KEY):
                run = run[best_first(-rows[entry_C[run], column], len(run))]
            order[begin:end] = run
        begin = end


@compiled()
def joined(trained_leaves: Any, scored: Any, leaves: Any, tree: Any, m_B: Array, memory: Any) -> tuple[Array, Array, Array, Array, Array]:
    """The best m of trained and live leaves, best first: item rows int64[B, M], ranks and keys float32[B, M], their number int64[B]; and
    the keys of all live leaves, float32[C], also of those whose keys are not finite, which cannot be results.

    trained_leaves  item_rows_BM, ranks_BM, keys_BM, count_B of the trained tree
    scored          begin_B, entry_C, ranks_C
    leaves          the rows of the entries of live leaves, and item_R
    tree            leaf_of_item, parent, first_child
    memory          λ, 0 without a memory; history_BT; trained, live, sum_L, sum_R of `of_leaves`
    Of equal keys the lower (parent, slot) comes first.
    """
    rows_BM, ranks_BM, keys_BM, count_B = trained_leaves
    begin_B, entry_C, ranks_C = scored
    rows, item_R = leaves
    leaf_of_item, parent_N, first_child = tree
    key_weight, history_BT, memory_entries, live_entries, sum_L, sum_R = memory
    keys_C, row_C = ranks_C, np.empty(len(entry_C), np.int64)
    for c in range(len(entry_C)):
        row_C[c] = item_R[rows[entry_C[c], OTHER_KEY]]
    if key_weight > 0:
        leaf_offset = len(parent_N) - len(sum_L)
        sums = memory_entries, live_entries, leaf_of_item, leaf_offset, sum_L, sum_R
        keys_C = ranks_C + key_weight * of_leaves(history_BT, begin_B, row_C, *sums)
    new_rows_BM, new_count_B = np.full(rows_BM.shape, -1, np.int64), count_B.copy()
    new_ranks_BM, new_keys_BM = np.full(rows_BM.shape, -np.inf, np.float32), np.full(rows_BM.shape, -np.inf, np.float32)
    best_C = np.empty(len(keys_C), np.int64)
    for b in range(len(m_B)):
        lowest = keys_BM[b, m_B[b] - 1] if 0 < m_B[b] == count_B[b] else np.float32(-np.inf)
        live_count, i, j, count = 0, 0, 0, 0
        for c in range(begin_B[b], begin_B[b + 1]):
            if abs(keys_C[c]) <= LARGEST and keys_C[c] >= lowest:
                best_C[live_count] = c
                live_count += 1
        order = best_first(keys_C[best_C[:live_count]], live_count)
        in_fold_order(order, keys_C[best_C[:live_count]], entry_C[best_C[:live_count]], rows)
        while count < m_B[b] and (i < count_B[b] or j < live_count):
            is_live_next = i == count_B[b]
            if not is_live_next and j < live_count:
                c = best_C[order[j]]
                is_live_next = keys_C[c] > keys_BM[b, i]
                if keys_C[c] == keys_BM[b, i]:
                    leaf, x = leaf_of_item[rows_BM[b, i]], entry_C[c]
                    p = parent_N[leaf]
                    is_live_next = rows[x, KEY] < p or (rows[x, KEY] == p and rows[x, SLOT] < leaf - first_child[p])
            if is_live_next:
                c = best_C[order[j]]
                new_rows_BM[b, count], new_ranks_BM[b, count], new_keys_BM[b, count] = row_C[c], ranks_C[c], keys_C[c]
                j += 1
            else:
                new_rows_BM[b, count], new_ranks_BM[b, count], new_keys_BM[b, count] = rows_BM[b, i], ranks_BM[b, i], keys_BM[b, i]
                i += 1
            count += 1
        new_count_B[b] = count
    return new_rows_BM, new_ranks_BM, new_keys_BM, new_count_B, keys_C
