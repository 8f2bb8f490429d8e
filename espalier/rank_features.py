"""The names of a re-ranker's features of a candidate: numbers, NaN if one is missing.

    retrieval.log_position  natural logarithm of its position in the retrieved list, from 1
    retrieval.rank          its rank; without a memory the search orders by it
    retrieval.score         its score
    leaf.norm               length of its node row
    history.length          known items of the history
    history.seen            number of items after the item's last occurrence in the history; NaN if it is not in the history
    history.best            largest cosine between its node row and those of the history's items
    history.top3            mean of the three largest
    history.mean            mean of all
    history.recent          weighted mean of all: an item weighs half as much as one that is HALF_LIFE positions newer
    history.last            cosine to the newest item
    text.words.COLUMN       inner product of the words of a text query with those of a text column of the item table
    text.pairs.COLUMN       the same of several words in a row
    text.letters.COLUMN     the same of several letters in a row
    text.coverage.COLUMN    share of the query's words, by weight, that the column has
    text.length.COLUMN      natural logarithm of 1 + distinct known words of the column
    attribute.COLUMN        a numeric column of the item table; false is 0, true is 1
    query.NAME              what the caller sends with the query
    item.NAME               what the caller sends with the query for an item

Node rows are those of leaves. n-grams weigh as in searches. The features of a text without a known one are NaN, and the
coverage for a query without a word. `espalier.rerank.features` computes the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

RETRIEVAL = ("retrieval.log_position", "retrieval.rank", "retrieval.score")
COSINES = ("history.best", "history.top3", "history.mean", "history.recent", "history.last")
HISTORY = ("history.length", "history.seen", *COSINES)
LEAF = ("leaf.norm",)
TEXT = ("text.words.", "text.pairs.", "text.letters.", "text.coverage.", "text.length.")
"""Each is followed by the name of a column."""
KNOWN = (*RETRIEVAL, *LEAF, *HISTORY, *(f"{prefix}COLUMN" for prefix in TEXT), "attribute.COLUMN", "query.NAME", "item.NAME")
NAME = re.compile(r"(retrieval|history|leaf)\.\w+|(attribute|query|item|text\.\w+)\.\S{1,64}")
HALF_LIFE = 8
"""Positions after which an item of the history weighs half in `history.recent`."""


def check_names(names: Sequence[str]) -> None:
    """Raise ValueError unless these are valid, distinct names of features."""
    for name in names:
        is_prefixed = name.startswith(("attribute.", "query.", "item.", *TEXT))
        if not NAME.fullmatch(name) or not (is_prefixed or name in (*RETRIEVAL, *HISTORY, *LEAF)):
            raise ValueError(f"{name!r} is no feature of a candidate: expected {', '.join(KNOWN)}")
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is there twice")


def needs_node_rows(name: str) -> bool:
    """Whether a feature is computed from node rows, which bundles of linear scorers lack."""
    return name in LEAF or name in COSINES


def compared_columns(names: Sequence[str]) -> tuple[str, ...]:
    """The columns whose texts these features compare with a query's, in order of appearance."""
    parts = (name.split(".", 2) for name in names if name.startswith(TEXT))
    return tuple(dict.fromkeys(column for _, _, column in parts))
