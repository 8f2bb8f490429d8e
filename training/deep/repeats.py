"""Chooses the repeat term by validation users: the bonus of items in the history, or whether they are left out.

There is a value for each bucket of positions, in multiples of D, the mean over queries of the largest key less the 200th. A trial does not
search: it reorders the best leaves of one search and the leaves of the history. The term is used if it finds more than no term by over a
standard error.

With seen items excluded the term has no effect, so it is chosen without that exclusion.

Legend: B queries, C candidate leaves, T history, D its distinct items, M results.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from espalier.memory import BUCKETS, Memory, bucket_of
from espalier.memory_sums import newest
from espalier.read_only import read_only

from ..deep.reweighing import CandidateLeaves
from ..deep.searches import Searches
from ..evaluate import padded
from ..retrieval.repeats import chosen_by_bucket
from ..retrieval.tuning import Figures

log = logging.getLogger(__name__)

LEFT_OUT = -np.inf
SHARES = (0.0, LEFT_OUT, 0.2, 0.4, 0.6, 0.8, 1.0, 1.4, 2.0)
"""In multiples of D. Among equally good ones the first is chosen."""
NONE = (SHARES[0],) * BUCKETS


def with_repeat(searches: Searches, gamma: float, memory: Memory | None, *, has_order: bool) -> Memory | None:
    """The memory with the best repeat term; unchanged if no term pays. Without a memory, the term gets one without entries.

    searches   of queries with whole lists, seen items not excluded
    """
    leaves = _ScoredLeaves(searches, gamma, memory)
    best = chosen_by_bucket(SHARES, leaves.measured, has_order=has_order)
    if best == NONE:
        log.info("no repeat term")
        return memory
    gain, error = leaves.measured(best).gain_over(leaves.measured(NONE))
    shares = ", ".join("left out" if share == LEFT_OUT else f"{share:g} D" for share in best)
    log.info("repeat term: %+.1f ± %.1f %% with seen items, at 0, 1, 2, 4, 8 and 16 positions: %s", 100 * gain, 100 * error, shares)
    left_out = np.array(best) == LEFT_OUT
    bonus = np.where(left_out, 0, np.maximum(best, 0) * leaves.spread).astype(np.float32)
    if memory is None:
        offset = np.zeros(searches.topology.tree.item_count + 1, np.int64)
        memory = Memory(offset, np.empty(0, np.int32), np.empty(0, np.float16), np.ones(1, np.float32), key_weight=1.0)  # without entries
    return replace(memory, repeat=(bonus / np.float32(memory.key_weight)).astype(np.float32), left_out=left_out)


class _ScoredLeaves:
    """The best leaves of a search without the term, and the leaves of the history, with their keys.

    spread  D
    """

    def __init__(self, searches: Searches, gamma: float, memory: Memory | None) -> None:
        self._searches, self._m = searches, searches.ms[-1]
        tree = searches.topology.tree
        self._candidates = CandidateLeaves(searches)
        longest = max(block.rows.shape[1] for block in searches.blocks)
        rows_BM, _ = searches.ranked(gamma, memory, min(self._m + longest, tree.item_count))
        self._candidates.add(rows_BM)
        histories = [newest(*read_only(np.ascontiguousarray(row_T))) for block in searches.blocks for row_T in block.rows]
        self._candidates.add(padded([rows_D for rows_D, _ in histories]))
        memory_BC = np.zeros(self._candidates.leaf_BC.shape, np.float32)
        if memory is not None:
            memory_BC = np.float32(memory.key_weight) * self._candidates.memory(searches.lists(memory))
        self._key_BC = self._candidates.keys(gamma, memory_BC)
        self._bucket_BC = np.full(self._key_BC.shape, BUCKETS)  # BUCKETS: not in the history
        for bucket_C, leaf_C, (rows_D, age_D) in zip(self._bucket_BC, self._candidates.leaf_BC, histories, strict=True):
            for leaf, age in zip(tree.leaf_of_item[rows_D].tolist(), age_D.tolist(), strict=True):
                bucket_C[leaf_C == leaf] = bucket_of(age)
        best_BM = -np.sort(-self._key_BC, axis=1)[:, : self._m]
        self.spread = float(np.mean([best_M[0] - best_M[np.isfinite(best_M)][-1] for best_M in best_BM]))

    def measured(self, shares: tuple[float, ...]) -> Figures:
        """The figures with one value for each bucket, in multiples of D."""
        bonus = np.array([*(share if share == LEFT_OUT else share * self.spread for share in shares), 0.0], np.float32)
        return self._searches.figures_of(self._candidates.best(self._key_BC + bonus[self._bucket_BC], self._m))
