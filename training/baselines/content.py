"""Neighbours by content: items with texts and attributes like those of the history's items. New items have scores, too: no events needed.

    v_i = tf-idf of item i's words and attributes, of length 1;   score(j | history) = Σ_d recency^d · ⟨v_{h_d}, v_j⟩,   h_0 the last item

Words are those of the item table's string columns other than `id`, in lower case; each entry of a list column is one attribute. Numbers
are not content. A word of a single item says nothing about others and is left out. tf is 1 + log(count) (scikit-learn's sublinear tf). At
most MOST_ENTRIES words of all items together count: the first ones of each item.

Legend: B queries, I items, V words, M results.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import numpy as np
from scipy import sparse

from espalier.arrays import Float32, Int64
from espalier.errors import InvalidData
from espalier.items import ItemTable

from ..baselines.tuned_method import bytes_of, tune
from ..data.item_content import text_kind
from ..data.user_item_matrix import events_of_items, latest_items
from ..neighbours.fit import fading
from ..retrieval.scores import best_then_popular, by_popularity
from ..retrieval.task import Fitted, Task
from ..retrieval.tuning import Option, Options

Vectors = sparse.csr_array[np.float32]

GRID = (Option("recency", (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 1.0)),)
START: Options = {"recency": 0.9}
LONGEST = 100
"""Items of a history that count."""
VALIDATION_QUERIES = 1000
MOST_ENTRIES = 1 << 27
"""Most words of all items together, repeats included; 8 bytes each in the end."""


def answering(vectors_IV: Vectors, by_word_VI: Vectors, popular_I: Int64, options: Options) -> Fitted:
    """The method with these options. by_word_VI: v_i by words. An item that shares no word with the history has no score."""
    weight_L = fading(options["recency"], LONGEST)

    def scores(histories: Sequence[Int64]) -> Float32:
        history_BI = latest_items(histories, weight_L, len(popular_I))
        score_BI: Float32 = (history_BI @ vectors_IV @ by_word_VI).toarray()
        score_BI[score_BI <= 0] = np.nan
        return score_BI

    return Fitted(partial(best_then_popular, scores, popular_I), options, bytes_of(vectors_IV, by_word_VI, popular_I), 0.0)


def item_vectors(items: ItemTable) -> Vectors:
    """float32[I, V]: the tf-idf vector of each item; all 0 for one without words. Raises InvalidData if no two items share a word."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    columns = [name for name in items.fields if name != "id" and text_kind(items.column(name).type)]
    expected = "a column beside id with texts, or with lists of attributes, that items share"
    if not columns:
        raise InvalidData("items", items.fields, expected)
    most = max(1, MOST_ENTRIES // max(1, len(items)))
    vectorizer = TfidfVectorizer(
        analyzer=lambda row: list(islice(_words(items, columns, row), most)), min_df=2, sublinear_tf=True, dtype=np.float32
    )
    try:
        return sparse.csr_array(vectorizer.fit_transform(range(len(items))))
    except ValueError as error:  # an empty vocabulary, or nothing left by min_df
        raise InvalidData("items", columns, expected) from error


def _words(items: ItemTable, columns: Sequence[str], row: int) -> Iterator[str]:
    """An item's words, and its attributes with their column's name, so that values of different columns stay different."""
    for column in columns:
        value = items.column(column)[row].as_py()
        if isinstance(value, str):
            yield from re.findall(r"\w+", value.lower())
        else:
            yield from (f"{column}={entry}" for entry in value or () if entry is not None)


def content(task: Task) -> Fitted:
    """Choose the recency on at most VALIDATION_QUERIES validation queries; lists without an order have none.

    Raises InvalidData if the item table has only ids and numbers.
    """
    begin, deadline = time.perf_counter(), task.deadline()
    vectors = item_vectors(task.items)
    by_word = vectors.T.tocsr()
    popular = by_popularity(events_of_items(task.split.lists, task.split.train))
    ordered = task.split.lists.order != "none"
    grid, start = (GRID, START) if ordered else ((), {"recency": 1.0})

    def fitted(options: Options) -> Fitted:
        return answering(vectors, by_word, popular, options)

    return tune(task, begin, deadline, fitted, start, grid, VALIDATION_QUERIES)
