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
    attribute.COLUMN        a numeric column of the item table; false is 0, true is 1
    query.NAME              what the caller sends with the query
    item.NAME               what the caller sends with the query for an item

Node rows are those of leaves. `espalier.rerank.features` computes the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

RETRIEVAL = ("retrieval.log_position", "retrieval.rank", "retrieval.score")
COSINES = ("history.best", "history.top3", "history.mean", "history.recent", "history.last")
HISTORY = ("history.length", "history.seen", *COSINES)
LEAF = ("leaf.norm",)
KNOWN = (*RETRIEVAL, *LEAF, *HISTORY, "attribute.COLUMN", "query.NAME", "item.NAME")
NAME = re.compile(r"(retrieval|history|leaf)\.\w+|(attribute|query|item)\.\S{1,64}")
HALF_LIFE = 8
"""Positions after which an item of the history weighs half in `history.recent`."""


def check_names(names: Sequence[str]) -> None:
    """Raise ValueError unless these are valid, distinct names of features."""
    for name in names:
        is_prefixed = name.split(".", 1)[0] in ("attribute", "query", "item")
        if not NAME.fullmatch(name) or not (is_prefixed or name in (*RETRIEVAL, *HISTORY, *LEAF)):
            raise ValueError(f"{name!r} is no feature of a candidate: expected {', '.join(KNOWN)}")
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is there twice")


def needs_node_rows(name: str) -> bool:
    """Whether a feature is computed from node rows, which bundles of linear scorers lack."""
    return name in LEAF or name in COSINES
