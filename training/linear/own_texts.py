"""Items by their own words: what the texts of an item's columns say, as BM25F does, and queries that are made of them.

    own_i = Σ_f w_f · d(text of column f of item i), of length 1,     w_f = min(1, (SHORT / words of column f)^a)

d is a document's row (`Vectoriser.documents`), the words of a column are the mean over its texts. BM25F (Robertson, Zaragoza and Taylor
2004) weighs columns by hand, as `data.own_weights` does. Without it a is ½: a word among a hundred says less than one of a title, and one
of a title as much as a brand. Where people's queries say clearly that other weights find more, these are taken (`own_choices.py`).

Knows texts and a vectoriser. Does not know files.

Legend: I items, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from espalier.errors import InvalidData
from espalier.text.vectoriser import Vectoriser, words_of

from ..data.csr import Csr, as_matrix, normalised

FEWEST_WORDS, MOST_WORDS = 2, 5
"""Of a made query."""
MISSPELT, LEAST_LETTERS = 0.1, 4
"""The share of its words of so many letters in which two letters that follow each other change places."""
MOST_MADE = 5000
SHORT = 8
"""Words of a column that weighs 1, at most."""
COUNTED = 10_000
"""Texts whose words are counted, evenly spread: of a million it would take seconds."""
RULE = 0.5
"""The exponent where nobody's queries say better."""


def column_weights(columns: Sequence[Sequence[str]], exponent: float = RULE) -> list[float]:
    """min(1, (SHORT / words)^exponent), by the mean words of a column's texts that are not empty."""
    means = []
    for texts in columns:
        counts = [len(words_of(text)) for text in texts[:: max(1, -(-len(texts) // COUNTED))] if text]
        means.append(max(1, sum(counts)) / max(1, len(counts)))
    return [min(1.0, (SHORT / mean) ** exponent) for mean in means]


@dataclass(frozen=True, eq=False)
class Own:
    """What items' own texts say.

    rows     float32[I, F], of length 1
    weights  what a word of each column says
    queries  so many queries of an item say as much of it as its own texts: few are of people who looked for something like it, among
             others; infinite: none does
    """

    rows: Csr
    weights: Sequence[float]
    queries: float


def own_rows(vectoriser: Vectoriser, columns: Sequence[Sequence[str]], weights: Sequence[float]) -> Csr:
    """float32 rows [I, F] of length 1; an item without a known word has an empty row.

    columns  the texts of all items, by column
    weights  what a word of each says

    Raises InvalidData where no word tells items apart.
    """
    parts = [as_matrix(vectoriser.documents(texts)) for texts in columns]
    for part, weight in zip(parts, weights, strict=True):
        part.data *= np.float32(weight)
    whole = sum(parts[1:], start=parts[0]).tocsr()
    parts.clear()
    own = normalised(whole)
    if not own.nnz:
        raise InvalidData("data.own_texts", f"texts of {own.shape[0]} items", "words that some of the items have and others have not")
    return own


def made_queries(ids: Sequence[str], columns: Sequence[Sequence[str]], share: float, seed: int) -> pl.DataFrame:
    """`query`, `item` and `weight` 1: of a share of the items, at most MOST_MADE, two to five words of one text, in their order.

    Of a text of one word that one.
    """
    rng = np.random.default_rng([seed, 0x9E57])
    found = []
    for row in np.sort(rng.permutation(len(ids))[: min(MOST_MADE, round(share * len(ids)))]).tolist():
        texts = [words for words in (words_of(texts[row]) for texts in columns) if words]
        if texts:
            words = texts[rng.integers(len(texts))]
            count = min(len(words), int(rng.integers(FEWEST_WORDS, MOST_WORDS + 1)))
            chosen = [words[place] for place in np.sort(rng.permutation(len(words))[:count]).tolist()]
            found.append((" ".join(_misspelt(word, rng) for word in chosen), ids[row]))
    frame = pl.DataFrame(found, schema={"query": pl.String, "item": pl.String}, orient="row")
    return frame.with_columns(weight=pl.lit(1.0))


def _misspelt(word: str, rng: np.random.Generator) -> str:
    if len(word) < LEAST_LETTERS or rng.random() >= MISSPELT:
        return word
    place = int(rng.integers(len(word) - 1))
    return word[:place] + word[place + 1] + word[place] + word[place + 2 :]
