"""Words of the nearest items: a query finds an item by words that only items like it use, as synonyms are.

With the K nearest other items, by the cosine of their words, S the sum of the cosines of those that have a word, and w the mean of its
weights in their rows, weighed by the cosines, an item that lacks the word gets it with the weight

    min(MOST, S) · w

Words that the item has keep their weights: otherwise items with many alike would come before the one that is asked for. This is document
expansion (Tao, Wang, Mei and Zhai 2006).

Knows rows. Does not know texts.

Legend: I items, F features, n items of a block, K neighbours.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from scipy.sparse import csr_array

from espalier.arrays import Int64
from espalier.hardware import cores
from espalier.placement.near_items import NearItems
from espalier.text.sparse_rows import SparseRows

from ..data.csr import Csr, as_rows, normalised, stacked

MOST = 0.5
"""Largest weight of an added word, relative to its weight in the nearest items."""
LOOKED_UP = 5_000
"""Most entries of other items that are read to find an item's nearest: of its rarest words first. Bounds the time of large catalogues."""
BLOCK = 4096
"""Items that a thread takes at once."""


def near_words(rows: Csr, words: range, near: int) -> Csr:
    """float32[I, F]: the words of the `near` nearest items that each item lacks.

    rows   float32[I, F], at least 0
    words  the features that are words
    """
    if not near or not len(words):
        return csr_array((np.empty(0, np.float32), np.empty(0, np.int32), np.zeros(rows.shape[0] + 1, np.int32)), shape=rows.shape)
    word_rows = csr_array(rows[:, words.start : words.stop])
    word_rows.eliminate_zeros()
    expansion = _Expansion(word_rows, near)
    with ThreadPoolExecutor(cores()) as pool:
        added = stacked(pool.map(expansion.of, range(0, rows.shape[0], BLOCK)), len(words))
    return csr_array((added.data, added.indices + words.start, added.indptr), shape=rows.shape)


class _Expansion:
    """Finds the words to add. Used by any number of threads."""

    def __init__(self, word_rows: Csr, near: int) -> None:
        self._near = near
        self._rows = word_rows
        self._has = csr_array((np.ones_like(word_rows.data), word_rows.indices, word_rows.indptr), shape=word_rows.shape)
        self._unit_rows = as_rows(normalised(word_rows))
        self._index = NearItems(self._unit_rows)
        self._items_F = np.bincount(word_rows.indices, minlength=word_rows.shape[1])

    def of(self, first: int) -> Csr:
        """float32[n, words]: the words to add to a block of items."""
        block = slice(first, min(first + BLOCK, len(self._unit_rows)))
        near = self._nearest(block.start, block.stop)
        weight, share = csr_array(near @ self._rows), csr_array(near @ self._has)
        weight.sort_indices()
        share.sort_indices()  # both have the same entries
        weight.data *= np.minimum(1, MOST / share.data)
        added = csr_array(weight - weight.multiply(self._has[block]))
        added.eliminate_zeros()
        return added

    def _nearest(self, first: int, end: int) -> Csr:
        """float32[n, I]: the cosines of the nearest other items, and mostly of an item itself, which has no words that it lacks."""
        item_nK, cosine_nK = self._index.nearest(self._rarest_words(self._unit_rows.between(first, end)), self._near + 1)
        has_itself_n = (item_nK == np.arange(first, end)[:, None]).any(axis=1)
        cosine_nK[~has_itself_n, self._near :] = 0
        row, place = np.nonzero(cosine_nK)
        return csr_array((cosine_nK[row, place], (row, item_nK[row, place])), shape=(end - first, len(self._unit_rows)))

    def _rarest_words(self, rows: SparseRows) -> SparseRows:
        """The rows with their rarest words, as many as LOOKED_UP allows."""
        row = np.repeat(np.arange(len(rows)), np.diff(rows.indptr))
        items = self._items_F[rows.indices]
        order = np.lexsort((items, row))
        read = np.append(0, np.cumsum(items[order]))
        is_kept = np.empty(len(items), np.bool_)
        is_kept[order] = read[1:] - read[rows.indptr[row]] <= LOOKED_UP
        indptr: Int64 = np.append(0, np.cumsum(is_kept))[rows.indptr]
        return SparseRows(indptr, rows.indices[is_kept], rows.values[is_kept], rows.width)
