"""The compiled beam search over query states and node rows: some queries, one after the other.

A level has three passes: collect the eligible children of the beam, compute their logits, then their ranks and keys. Beams are in ascending
node order, so candidates are too, and one scan merges them with other ascending lists (excluded nodes, nodes with memory). There is no
state between calls, so several threads may search at once.

Legend: B queries, N nodes, D node row, L levels, S state, X excluded nodes, M results, H levels below the root, C candidates, K beam.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from espalier.arrays import Array
from espalier.compiled_code import compiled
from espalier.engines.best_nodes import best_first, best_positions
from espalier.engines.compiled.mlp import FAST, mlp_logits
from espalier.engines.compiled.prefetch import LINE_BYTES, fetch
from espalier.stored_numbers import number, scale

LARGEST = np.finfo(np.float32).max
AHEAD = 16
"""How many candidates ahead of the current one rows are prefetched."""


@compiled(fastmath=FAST)
def search_queries(
    positions: Array, states_BLS: Array, tree: tuple[Array, ...], rows_ND: Array, scorer: tuple[Any, ...], eligible_N: Array,
    excluded_BX: Array, memory: tuple[Any, ...], knobs: tuple[Any, ...], out: tuple[Array, ...],
) -> None:  # fmt: skip
    """Search the queries at `positions` among the eligible nodes (bool[N]; empty if all are).

    states_BLS   float32: a state for each level 0 … H or one for all
    tree         level_offset, first_child, leaf_item
    rows_ND      stored as in `stored_numbers`
    scorer       of `mlp.packed`: an inner product if it has no layers
    excluded_BX  int64[B, X], ascending in each row, with −1 anywhere as padding
    memory       λ, 0 without a memory; offset_B, nodes, values of MemoryLists
    knobs        beam_size_B, m_B int64[B]; gamma float32; whether own is the log of the sigmoid, not the logit; the most candidates and the
                 most kept nodes of a level (`engine.room`); whether all levels are scored
    out          rows_BM int64, −1 as padding; ranks_BM and keys_BM float32, −inf for padding; count_B int64; finite_B bool: whether the
                 logits of all scored nodes are finite; a trace of each level: candidates_BHC int64, their ranks and keys float32, kept_BHK
                 int64, their ranks and keys float32, with no levels if there is no trace; the beam above the leaves, frontier_BK int64 and
                 its ranks float32, of width 0 if it is not requested

    One long function and plain tuples on purpose: see `linear/beam.py`.
    """
    level_offset, first_child, leaf_item = tree
    beam_size_B, m_B, gamma, log_sigmoid, max_candidates, max_kept, all_levels = knobs
    key_weight, memory_offset, memory_nodes, memory_values = memory
    (
        rows_BM, ranks_BM, keys_BM, count_B, finite_B, candidates_BHC, candidate_ranks_BHC, candidate_keys_BHC,
        kept_BHK, kept_ranks_BHK, kept_keys_BHK, frontier_BK, frontier_ranks_BK,
    ) = out  # fmt: skip
    height = len(level_offset) - 2
    width, excluded_count = np.uint64(states_BLS.shape[2]), excluded_BX.shape[1]  # in an inner product also that of rows
    zero = np.float32(0)
    masked, remembered, is_product = len(eligible_N) > 0, key_weight > 0, len(scorer[0]) == 0
    candidates, ordered = np.empty(max_candidates, np.int64), np.empty(max_candidates, np.int32)
    ranks, logits = np.empty(max_candidates, np.float32), np.empty(max_candidates, np.float32)
    keys = np.empty(max_candidates, np.float32) if remembered else ranks
    beam, chosen = np.empty(max_kept, np.int64), np.empty(max_kept, np.int64)
    beam_ranks, beam_keys = np.empty(max_kept, np.float32), np.empty(max_kept, np.float32)
    for b in positions:
        start = 1  # the first level that needs pruning: with γ = 0 the ranks above it change nothing
        while start < height and level_offset[start + 1] - level_offset[start] <= beam_size_B[b]:
            start += 1
        first_level = 1 if gamma > 0 or all_levels else start
        count = level_offset[first_level] - level_offset[first_level - 1]
        for k in range(count):
            beam[k] = level_offset[first_level - 1] + k
            beam_ranks[k] = 0
        x: Any = np.int64(0)  # a plain 0 would be another type, for which numba would compile again
        e: Any = memory_offset[b] if remembered else np.int64(0)
        last_e = memory_offset[b + 1] if remembered else np.int64(0)
        is_finite: Any = True
        for level in range(first_level, height + 1):
            ranks_matter = gamma > 0 or level >= start
            state_S = states_BLS[b, level if states_BLS.shape[1] > 1 else 0]
            if level == height and frontier_BK.shape[1] > 0:
                for k in range(frontier_BK.shape[1]):
                    frontier_BK[b, k] = beam[k] if k < count else -1
                    frontier_ranks_BK[b, k] = beam_ranks[k] if k < count else -np.inf
            scored: Any = np.int64(0)
            for k in range(count):
                inherited = gamma * beam_ranks[k]
                for n in range(first_child[beam[k]], first_child[beam[k] + 1]):
                    if masked and not eligible_N[n]:
                        continue
                    if excluded_count > 0:
                        while x < excluded_count and excluded_BX[b, x] < n:
                            x += 1
                        if x < excluded_count and excluded_BX[b, x] == n:
                            continue
                    candidates[scored], ranks[scored] = n, inherited
                    scored += 1
            if is_product:
                for c in range(scored):
                    if c + AHEAD < scored:
                        for d in range(0, rows_ND.shape[1], LINE_BYTES // rows_ND.itemsize):
                            fetch(rows_ND, candidates[c + AHEAD], d)
                    row, logit = np.uint64(candidates[c]), zero
                    for d in range(width):
                        logit += number(rows_ND[row, d]) * state_S[d]
                    logits[c] = logit * scale(rows_ND, row)
            else:
                mlp_logits(candidates, scored, rows_ND, state_S, scorer, logits)
            total: Any = np.int64(0)
            for c in range(scored):
                n, logit = candidates[c], logits[c]
                has_logit = abs(logit) <= LARGEST  # before min and max see it: they could make a finite number of NaN
                rank = logit
                if log_sigmoid:
                    rank = min(logit, zero) - np.log1p(np.exp(-abs(logit)))
                rank += ranks[c]
                lift = zero
                if remembered:
                    while e < last_e and memory_nodes[e] < n:
                        e += 1
                    if e < last_e and memory_nodes[e] == n:
                        lift = key_weight * memory_values[e]
                if not (has_logit and abs(rank) <= LARGEST and abs(rank + lift) <= LARGEST):
                    if ranks_matter:
                        is_finite = is_finite and has_logit
                        continue
                    rank = zero
                candidates[total], ranks[total] = n, rank
                if remembered:
                    keys[total] = rank + lift
                total += 1
            limit = m_B[b] if level == height else beam_size_B[b]
            count = best_positions(keys, total, limit, ordered, chosen)
            for k in range(count):
                beam[k], beam_ranks[k], beam_keys[k] = candidates[chosen[k]], ranks[chosen[k]], keys[chosen[k]]
            if kept_BHK.shape[1] > 0:
                for c in range(total):
                    candidates_BHC[b, level - 1, c] = candidates[c]
                    candidate_ranks_BHC[b, level - 1, c], candidate_keys_BHC[b, level - 1, c] = ranks[c], keys[c]
                for k in range(count):
                    kept_BHK[b, level - 1, k] = beam[k]
                    kept_ranks_BHK[b, level - 1, k], kept_keys_BHK[b, level - 1, k] = beam_ranks[k], beam_keys[k]
        order = best_first(beam_keys, count)
        for k in range(count):
            rows_BM[b, k] = leaf_item[beam[order[k]] - level_offset[height]]
            ranks_BM[b, k], keys_BM[b, k] = beam_ranks[order[k]], beam_keys[order[k]]
        for k in range(count, rows_BM.shape[1]):
            rows_BM[b, k], ranks_BM[b, k], keys_BM[b, k] = -1, -np.inf, -np.inf
        count_B[b], finite_B[b] = count, is_finite
