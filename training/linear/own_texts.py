"""Feature rows of items from the texts in their columns, weighed as in BM25F, and queries that are made of these texts.

    sum_i = √Σ_f (w_f · d(text of column f of item i))²     w_f = min(1, (SHORT / words of column f)^a)
    own_i = sum_i / √(|sum_i| · median of |sum|)

d is a document's row (`Vectoriser.documents`); square and root are of each feature. A word in two columns counts more than in one, but not
twice: shops repeat titles in descriptions. Rows are divided by the root of their length, as with BM25's b below 1. Divided by the length, a
text of three words would need only one of the query's to be ahead of a long text with all of them.

The words of a column are the mean over its texts. BM25F (Robertson, Zaragoza and Taylor 2004) weighs columns by hand, as
`data.own_weights` does. Without it a is ⅓: a word among a hundred weighs less than a word of a title, which weighs as much as a brand. If
other weights find clearly more for people's queries, these are used (`own_choices.py`).

Knows texts and a vectoriser. Does not know files.

Legend: I items, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from scipy.sparse import csr_array

from espalier.arrays import Bool
from espalier.errors import InvalidData
from espalier.hardware import cores
from espalier.text.vectoriser import Vectoriser, words_of

from ..data.csr import Csr, as_matrix, as_rows, lengths, normalised, scaled, stacked
from ..linear.near_words import near_words

FEWEST_WORDS, MOST_WORDS = 2, 5
"""Words of a made query."""
MISSPELLED, LEAST_LETTERS = 0.1, 4
"""The share of misspelled words in made queries, among words of at least so many letters; two neighbouring letters are swapped."""
MOST_MADE_QUERIES = 5000
SHORT = 8
"""A column with at most so many words weighs 1."""
COUNTED_TEXTS = 10_000
"""Most texts of a column whose words are counted, evenly spread: a million would take seconds."""
BLOCK = 1 << 14
"""Items whose texts a thread reads at once."""
RULE = 1 / 3
"""The default exponent a."""


def column_weights(columns: Sequence[Sequence[str]], exponent: float = RULE) -> list[float]:
    """min(1, (SHORT / words)^exponent), by the mean words of a column's texts that are not empty."""
    means = []
    for texts in columns:
        counts = [len(words_of(text)) for text in texts[:: max(1, -(-len(texts) // COUNTED_TEXTS))] if text]
        means.append(max(1, sum(counts)) / max(1, len(counts)))
    return [min(1.0, (SHORT / mean) ** exponent) for mean in means]


@dataclass(frozen=True, eq=False)
class OwnTexts:
    """Feature rows of the items' own texts.

    rows     float32[I, F], with which queries are compared: the items' own words, the median of whose lengths is 1, and words of near items
    is_near  bool[entries]: the words of near items (`near_words.py`)
    weights  the weight of a word of each column
    length   the median of the lengths of the items' sums
    queries  this many queries of an item weigh as much as its own texts; infinite: queries weigh nothing
    """

    rows: Csr
    is_near: Bool
    weights: Sequence[float]
    length: float
    queries: float

    @staticmethod
    def of(vectoriser: Vectoriser, columns: Sequence[Sequence[str]], weights: Sequence[float], near: int, queries: float) -> OwnTexts:
        """Of the texts of all items, by column, with words of so many near items; the other arguments are as in `text_rows`."""
        rows, length = text_rows(vectoriser, columns, weights)
        added = near_words(rows, vectoriser.words, near)
        both = csr_array(rows - added)  # an item lacks the words that are added: only these are negative
        is_near = both.data < 0
        np.abs(both.data, out=both.data)
        return OwnTexts(both, is_near, weights, length, queries)

    def own_directions(self) -> Csr:
        """float32[I, F] of length 1, without words of near items, whose values are 0."""
        rows = as_rows(self.rows)
        return normalised(as_matrix(replace(rows, values=np.where(self.is_near, np.float32(0), rows.values))))


def text_rows(vectoriser: Vectoriser, columns: Sequence[Sequence[str]], weights: Sequence[float]) -> tuple[Csr, float]:
    """float32 rows [I, F] and the median length of their sums; an item without a known word has an empty row.

    columns  the texts of all items, by column
    weights  the weight of a word of each column
    Raises InvalidData if no word distinguishes items: its idf is above 0 if at least two of the texts that the vectoriser knows lack it.
    """
    count = len(columns[0])

    def sums_from(first: int) -> Csr:
        return combined([squares(as_matrix(vectoriser.documents(texts[first : first + BLOCK]))) for texts in columns], weights)

    with ThreadPoolExecutor(cores()) as pool:
        sums = stacked(pool.map(sums_from, range(0, count, BLOCK)), vectoriser.width)
    if not sums.nnz:
        different = len({text for texts in columns for text in texts if text})
        expected = "at least three, and words that some of them have and at least two have not"
        raise InvalidData("data.own_texts", f"{different} different texts of {count} items", expected)
    length_I = lengths(sums)
    median = float(np.median(length_I[length_I > 0]))
    return scaled(sums, 1 / np.sqrt(np.where(length_I > 0, length_I, 1) * median)), median


def squares(rows: Csr) -> Csr:
    """The square of each entry."""
    return csr_array((np.square(rows.data), rows.indices, rows.indptr), shape=rows.shape)


def combined(square_rows: Sequence[Csr], weights: Sequence[float]) -> Csr:
    """√Σ_f w_f² · square_rows_f: the items' sums."""
    weighted = [rows * np.float32(weight**2) for rows, weight in zip(square_rows, weights, strict=True)]
    sums = sum(weighted[1:], start=weighted[0])
    return csr_array((np.sqrt(sums.data), sums.indices, sums.indptr), shape=sums.shape)


def made_queries(ids: Sequence[str], columns: Sequence[Sequence[str]], share: float, seed: int) -> pl.DataFrame:
    """Columns `query`, `item` and `weight` (1): for a share of the items, at most MOST_MADE_QUERIES, a query of two to five words of one
    text, in their order. A text of one word gives a query of one word.
    """
    rng = np.random.default_rng([seed, 0x9E57])
    pairs = []
    for row in np.sort(rng.permutation(len(ids))[: min(MOST_MADE_QUERIES, round(share * len(ids)))]).tolist():
        texts = [words for words in (words_of(texts[row]) for texts in columns) if words]
        if texts:
            words = texts[rng.integers(len(texts))]
            count = min(len(words), int(rng.integers(FEWEST_WORDS, MOST_WORDS + 1)))
            chosen = [words[position] for position in np.sort(rng.permutation(len(words))[:count]).tolist()]
            pairs.append((" ".join(_misspelled(word, rng) for word in chosen), ids[row]))
    frame = pl.DataFrame(pairs, schema={"query": pl.String, "item": pl.String}, orient="row")
    return frame.with_columns(weight=pl.lit(1.0))


def _misspelled(word: str, rng: np.random.Generator) -> str:
    if len(word) < LEAST_LETTERS or rng.random() >= MISSPELLED:
        return word
    first = int(rng.integers(len(word) - 1))
    return word[:first] + word[first + 1] + word[first] + word[first + 2 :]
