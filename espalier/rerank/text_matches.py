"""Compares a query's text with the texts of its candidates, column by column: the features `text.…` of a re-ranker.

Legend: N candidates, C columns, Q n-grams of a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from espalier.arrays import Array, Float32, Float64, Int64, read_only
from espalier.bundle import Bundle
from espalier.compiled_code import compiled
from espalier.queries import QueryBatch
from espalier.rank_features import TEXT, compared_columns
from espalier.ranker_texts import STEP, RankerTexts
from espalier.rerank.live_candidates import LiveCandidates, texts_of
from espalier.text.blocks import TextBlock

WORDS, PAIRS, LETTERS, COVERED, LENGTH = range(5)
"""Sums of a text: products by kind of n-gram, the weights of the query's words that it has, and the number of its words."""

BLOCK = 1 << 12
"""Items whose texts are read at a time."""


def ranker_texts(bundle: Bundle, names: Sequence[str]) -> RankerTexts | None:
    """The texts of all items in the columns of these features: those of the bundle's ranker, or read from the item table. None: no such
    columns.
    """
    columns, items = compared_columns(names), bundle.items
    if not columns:
        return None
    if bundle.manifest.ranker is not None and compared_columns(bundle.manifest.ranker.features) == columns:
        return bundle.ranker_texts

    def texts(begin: int) -> list[str]:
        rows = np.arange(begin, min(begin + BLOCK, len(items)))
        return texts_of([items.values(name, rows) for name in columns])

    return RankerTexts.of_texts(bundle.vectoriser, map(texts, range(0, len(items), BLOCK)))


class TextMatches:
    """Compares queries with items' texts. Any number of threads may call it. Raises BundleCorrupt if the bundle's queries are no texts.

    texts  of all items in these columns of the item table
    """

    def __init__(self, bundle: Bundle, columns: Sequence[str], texts: RankerTexts) -> None:
        self._columns, self._vectoriser, self._items = tuple(columns), bundle.vectoriser, bundle.manifest.tree.items
        self._kind_of_block = np.array([_kind_of(block) for block in self._vectoriser.blocks])
        self._arrays = _arrays_of(texts)

    def of(self, queries: QueryBatch, b: int, rows_N: Int64, live: LiveCandidates | None) -> dict[str, Float32]:
        """float32[N] by name: the features of item rows for query b, NaN for a text without a known n-gram."""
        indices, values = queries.features.row(b)
        kind_Q = self._kind_of_block[self._vectoriser.block_of(indices)]
        query = read_only(indices, values, kind_Q)
        sums_NCS = self._sums(query, rows_N if live is None else np.where(rows_N < self._items, rows_N, 0), self._arrays)
        if live is not None:
            positions, texts = live.texts(self._columns, rows_N)
            if len(positions):
                arrays = _arrays_of(RankerTexts.of_texts(self._vectoriser, [texts]))
                sums_NCS[positions] = self._sums(query, np.arange(len(positions)), arrays)
        words = float(values[kind_Q == WORDS].sum(dtype=np.float64))
        sums_NCS[:, :, COVERED] /= words or np.nan
        sums_NCS[:, :, LENGTH] = np.log1p(sums_NCS[:, :, LENGTH])
        features_CSN = sums_NCS.astype(np.float32).transpose(1, 2, 0)
        return {prefix + column: features_CSN[c, s] for c, column in enumerate(self._columns) for s, prefix in enumerate(TEXT)}

    def _sums(self, query: tuple[Array, ...], rows_N: Int64, texts: tuple[Array, ...]) -> Float64:
        sums_NCS = np.zeros((len(rows_N), len(self._columns), len(TEXT)))
        words = self._vectoriser.words
        compare(query, *read_only(rows_N), texts, (words.start, words.stop), sums_NCS)
        return sums_NCS


def _kind_of(block: TextBlock) -> int:
    return LETTERS if block.unit == "char" else WORDS if block.n == 1 else PAIRS


def _arrays_of(texts: RankerTexts) -> tuple[Array, ...]:
    return read_only(texts.row_begin, texts.feature, texts.weight)


@compiled()
def compare(query: Any, rows_N: Array, texts: Any, words: tuple[int, int], sums_NCS: Array) -> None:
    """Add up what each candidate's texts have in common with the query. A text without an entry gets NaN."""
    indices, values, kind_Q = query
    row_begin, feature, weight = texts
    first_word, end_words = words
    columns = sums_NCS.shape[1]
    for n in range(len(rows_N)):
        for c in range(columns):
            row = rows_N[n] * columns + c
            sums = sums_NCS[n, c]
            if row_begin[row] == row_begin[row + 1]:
                sums[:] = np.nan
            q = 0
            for entry in range(row_begin[row], row_begin[row + 1]):
                f = feature[entry]
                if first_word <= f < end_words:
                    sums[LENGTH] += 1
                while q < len(indices) and indices[q] < f:
                    q += 1
                if q < len(indices) and indices[q] == f:
                    sums[kind_Q[q]] += values[q] * (weight[entry] * STEP)
                    if kind_Q[q] == WORDS:
                        sums[COVERED] += values[q]
