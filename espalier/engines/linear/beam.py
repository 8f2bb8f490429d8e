"""The compiled beam search over linear node scorers: some queries, one after the other.

With tables by feature, each of the query's features is looked up for all nodes of the beam. With tables by node, the smaller side is looked
up in the larger one: a node's features in the query if the node has fewer rows than the query has features, otherwise the query's features
in the node's table. A node whose logit or rank is not finite cannot be ordered, so it is no candidate.

Legend: B queries, N nodes, F features, X excluded nodes, M results, H levels, C candidates, K beam.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from espalier.arrays import Array
from espalier.compiled_code import compiled
from espalier.engines.best_nodes import best_first, best_positions
from espalier.engines.compiled.prefetch import LINE_BYTES, fetch_number
from espalier.engines.linear.feature_tables import ENTRY_COUNTS, NO_ROW, slot_of
from espalier.stored_numbers import number

Arrays = tuple[Array, ...]
FAST = {"reassoc", "contract", "arcp", "nsz"}
"""Fast-math without `nnan` and `ninf`: numbers that are not finite must be seen."""
LARGEST = np.finfo(np.float32).max
BLOCK = 64
"""How many features of a query are looked up in a node's table before their weights are read."""
AHEAD = 4
"""How many features ahead of the current one weights are prefetched; slots are prefetched twice as far ahead."""


@compiled(fastmath=FAST)
def search_queries(
    positions: Array, queries: Arrays, tables: Arrays, eligible_N: Array, ranker: tuple[Any, int], work: Arrays, out: Arrays
) -> int:
    """Search the queries at `positions` among the eligible nodes (bool[N]; empty if all are). Of T trees, position b · T + t is query b in
    tree t.

    queries  indptr, indices, values: the features; beam_size_B, m_B: int64[B], an m of 0 returns all scored results, by node number,
             without padding; excluded_BX: int64[B, X], −1 as padding
    tables   the fields of FeatureTables
    ranker   gamma: float32; power: of the hinge, 0 for the sigmoid, −1 for logits
    work     buffers of one thread: query_F float32[F], the values of the current query, 0 between queries; excluded_N bool[N], the nodes
             that the current query excludes, False between queries; and for one level: beam int64, beam_ranks float32, candidates int64,
             ranks float32, ordered int32, chosen int64
    out      by position: nodes_BM int64, ranks_BM float32, count_B int64: how many results a query has; a trace of each level:
             candidates_BHC int64, their ranks float32, kept_BHK int64, their ranks float32, with no levels if there is no trace. For the
             frontier alone kept_BHK has one level, the one above the results, and candidates_BHC none

    Tuples are plain, because numba takes twice as long to unpack named ones, 5 µs a call. Returns −1, or stops and returns the position of
    a feature number that is out of range or of a value that is not finite.

    It is one long function on purpose: numba counts references to each array that a function is given. With separate functions for logits
    and ranks a query took 12 to 18 % longer at beam 50, and compiling took longer.
    """
    indptr, indices, values, beam_size_B, m_B, excluded_BX = queries
    (
        first_child, chunk_row, row_feature, row_entry, entry_child, entry_weight, bias,
        table_from, is_direct, slot_feature, slot_location, dense_weight, root_T, last_T, slots_T,
    ) = tables  # fmt: skip
    gamma, power = ranker
    query_F, excluded_N, beam, beam_ranks, candidates, ranks, ordered, chosen = work
    nodes_BM, ranks_BM, count_B, candidates_BHC, candidate_ranks_BHC, kept_BHK, kept_ranks_BHK = out
    one, zero, nan = np.float32(1), np.float32(0), np.float32(np.nan)
    locations = np.empty(BLOCK, np.int64)
    by_feature = len(table_from) == 0
    filtered = len(eligible_N) > 0 or excluded_BX.shape[1] > 0
    traced = candidates_BHC.shape[1] > 0
    trees = len(root_T)
    for result_row in positions:
        b, t = result_row // trees, result_row % trees
        root, last = root_T[t], last_T[t]
        begin, end = indptr[b], indptr[b + 1]
        for j in range(begin, end):  # check all features before writing to query_F
            if indices[j] < 0 or indices[j] >= len(query_F) or not abs(values[j]) <= LARGEST:
                return j
        for j in range(begin, end):
            query_F[indices[j]] = values[j]
        for x in range(excluded_BX.shape[1]):
            if excluded_BX[b, x] >= 0:
                excluded_N[excluded_BX[b, x]] = True
        count: Any = np.int64(1)  # a plain 1 would be another type, for which numba would compile again
        beam[0] = root
        beam_ranks[0] = 0
        level_begin: Any = root
        level_end: Any = root + 1
        for level in range(last):
            above_begin, above_end = level_begin, level_end
            level_begin, level_end = first_child[above_begin], first_child[above_end]
            is_last = level + 1 == last
            if is_last and not traced and kept_BHK.shape[1] > 0:
                for k in range(count):
                    kept_BHK[result_row, 0, k], kept_ranks_BHK[result_row, 0, k] = beam[k], beam_ranks[k]
            # With γ = 0 the ranks of a level that fits in the beam change nothing.
            ranks_matter = gamma > 0 or is_last or level_end - level_begin > beam_size_B[b]
            # Logits of the children of all kept nodes; those of node k begin at chosen[k].
            total: Any = np.int64(0)
            for k in range(count):
                p = beam[k]
                chosen[k] = total
                for c in range(first_child[p], first_child[p + 1]):
                    ranks[total + c - first_child[p]] = bias[c]
                total += first_child[p + 1] - first_child[p]
            if by_feature:
                nodes = above_end - above_begin
                level_slots = slots_T[t] + above_begin * len(query_F) - above_begin
                narrow = count * LINE_BYTES < nodes * slot_location.itemsize  # a wide beam reads whole cache lines in order
                for j in range(begin, end):
                    value, slots = values[j], level_slots + indices[j] * nodes
                    if narrow and j + 2 * AHEAD < end:
                        later = level_slots + indices[j + 2 * AHEAD] * nodes
                        for k in range(np.uint64(count)):
                            fetch_number(slot_location, later + beam[k])
                    if narrow and j + AHEAD < end:
                        later = level_slots + indices[j + AHEAD] * nodes
                        for k in range(np.uint64(count)):
                            location = slot_location[np.uint64(later + beam[k])]
                            if location >= 0:
                                fetch_number(entry_weight, location // ENTRY_COUNTS)
                            elif location != NO_ROW:
                                fetch_number(dense_weight, -1 - location)
                    for k in range(np.uint64(count)):
                        location = slot_location[np.uint64(slots + beam[k])]
                        if location == NO_ROW:
                            continue
                        base = np.uint64(chosen[k])  # unsigned: numba tests every signed index for whether it counts from the end
                        if location >= 0:
                            first_entry = location // ENTRY_COUNTS
                            for e in range(first_entry, first_entry + location % ENTRY_COUNTS):
                                ranks[base + np.uint64(entry_child[np.uint64(e)])] += value * number(entry_weight[np.uint64(e)])
                        else:
                            dense = np.uint64(-1 - location)
                            for c in range(np.uint64(first_child[beam[k] + 1] - first_child[beam[k]])):
                                ranks[base + c] += value * number(dense_weight[dense + c])
            else:
                for k in range(count):
                    p, base = beam[k], np.uint64(chosen[k])
                    if chunk_row[p + 1] - chunk_row[p] < end - begin:
                        for row in range(chunk_row[p], chunk_row[p + 1]):
                            value = query_F[row_feature[row]]
                            if value != 0:
                                for e in range(row_entry[row], row_entry[row + 1]):
                                    ranks[base + np.uint64(entry_child[np.uint64(e)])] += value * number(entry_weight[np.uint64(e)])
                        continue
                    if k + 1 < count:  # prefetch the slots of the next node
                        q = beam[k + 1]
                        start, size, direct = table_from[q], table_from[q + 1] - table_from[q], is_direct[q]
                        for j in range(begin, end):
                            slot = indices[j] if direct else slot_of(indices[j], size)
                            fetch_number(slot_location, start + slot)
                            if not direct:
                                fetch_number(slot_feature, start + slot)
                    start, size, direct = table_from[p], table_from[p + 1] - table_from[p], is_direct[p]
                    for j_begin in range(begin, end, BLOCK):  # first locate and prefetch the weights, then read them
                        j_end = min(j_begin + BLOCK, end)
                        for j in range(j_begin, j_end):
                            slot = indices[j]
                            if not direct:
                                slot = slot_of(indices[j], size)
                                while slot_location[start + slot] != NO_ROW and slot_feature[start + slot] != indices[j]:
                                    slot = (slot + 1) & (size - 1)
                            location = locations[j - j_begin] = slot_location[start + slot]
                            if location >= 0:
                                fetch_number(entry_weight, location // ENTRY_COUNTS)
                                fetch_number(entry_child, location // ENTRY_COUNTS)
                            elif location != NO_ROW:
                                fetch_number(dense_weight, -1 - location)
                        for j in range(j_begin, j_end):
                            location, value = locations[j - j_begin], values[j]
                            if location >= 0:
                                first_entry = location // ENTRY_COUNTS
                                for e in range(first_entry, first_entry + location % ENTRY_COUNTS):
                                    ranks[base + np.uint64(entry_child[np.uint64(e)])] += value * number(entry_weight[np.uint64(e)])
                            elif location != NO_ROW:
                                dense = np.uint64(-1 - location)
                                for c in range(np.uint64(first_child[p + 1] - first_child[p])):
                                    ranks[base + c] += value * number(dense_weight[dense + c])
            total = 0
            for k in range(count):
                p, at = beam[k], chosen[k]
                first, children = first_child[p], first_child[p + 1] - first_child[p]
                # The ranks of these children. Logits are tested before min and max, which could turn NaN into a finite number.
                inherited = gamma * beam_ranks[k]
                if power > 0:
                    for c in range(at, at + children):
                        finite = abs(ranks[c]) <= LARGEST
                        short = max(one - ranks[c], zero)
                        loss = short
                        for _ in range(1, power):
                            loss *= short
                        ranks[c] = inherited - loss if finite else nan
                elif power == 0:
                    for c in range(at, at + children):
                        finite = abs(ranks[c]) <= LARGEST
                        own_rank = min(ranks[c], zero) - np.log1p(np.exp(-abs(ranks[c])))
                        ranks[c] = inherited + own_rank if finite else nan
                else:
                    for c in range(at, at + children):
                        ranks[c] += inherited
                not_finite: Any = np.int64(0)
                for c in range(at, at + children):
                    not_finite += not abs(ranks[c]) <= LARGEST
                if not_finite > 0 and not ranks_matter:
                    not_finite = 0
                    for c in range(at, at + children):
                        if not abs(ranks[c]) <= LARGEST:
                            ranks[c] = 0
                # The eligible children become candidates.
                if filtered or not_finite > 0:
                    to = total
                    for c in range(children):
                        rank = ranks[at + c]
                        is_eligible = (len(eligible_N) == 0 or eligible_N[first + c]) and not excluded_N[first + c]
                        if is_eligible and abs(rank) <= LARGEST:
                            candidates[to], ranks[to] = first + c, rank
                            to += 1
                    total = to
                else:
                    for c in range(children):
                        candidates[total + c] = first + c
                    if total < at:  # some earlier candidates were dropped
                        for c in range(children):
                            ranks[total + c] = ranks[at + c]
                    total += children
            limit = beam_size_B[b] if not is_last else m_B[b] if m_B[b] > 0 else total
            count = best_positions(ranks, total, limit, ordered, chosen)
            for k in range(count):
                beam[k], beam_ranks[k] = candidates[chosen[k]], ranks[chosen[k]]
            if traced:
                for c in range(total):
                    candidates_BHC[result_row, level, c], candidate_ranks_BHC[result_row, level, c] = candidates[c], ranks[c]
                for k in range(count):
                    kept_BHK[result_row, level, k], kept_ranks_BHK[result_row, level, k] = beam[k], beam_ranks[k]
        for j in range(begin, end):
            query_F[indices[j]] = 0
        for x in range(excluded_BX.shape[1]):
            if excluded_BX[b, x] >= 0:
                excluded_N[excluded_BX[b, x]] = False
        count_B[result_row] = count
        if m_B[b] == 0:
            for k in range(count):
                nodes_BM[result_row, k], ranks_BM[result_row, k] = beam[k], beam_ranks[k]
            continue
        order = best_first(beam_ranks, count)
        for k in range(count):
            nodes_BM[result_row, k] = beam[order[k]]
            ranks_BM[result_row, k] = beam_ranks[order[k]]
        for k in range(count, nodes_BM.shape[1]):
            nodes_BM[result_row, k] = -1
            ranks_BM[result_row, k] = -np.inf
    return -1
