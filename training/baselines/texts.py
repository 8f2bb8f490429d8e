"""Baselines of text search: BM25 over all fields as one text, BM25F, centroids, and a vote of the nearest queries.

They answer from inverted indices, exactly. Options are chosen by validation queries, which are none of those that a method learns from.

    score = Σ_word idf · f · (k1 + 1) / (f + k1),     f = Σ_c w_c · tf_c / (1 − b + b · length_c / mean length_c)

is BM25F (Robertson, Zaragoza and Taylor 2004), and of one field BM25.

Words are those of the vectoriser.

Legend: B queries, I items, F words or features, M results.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array

from espalier.errors import InvalidConfig
from espalier.search import NO_ITEM
from espalier.text.vectoriser import Vectoriser, words_of

from ..baselines.tuned_method import bytes_of
from ..data.csr import Csr, as_matrix
from ..data.query_logs import LabelledTexts
from ..retrieval.task import NO_DEADLINE, Deadline, Fitted, Int64, Metric, Question, Rank
from ..retrieval.tuning import Option, Options, search

K1, B = Option("k1", (0.3, 0.6, 1.2, 2.0), times=1.7, least=0.01, most=20), Option("b", (0.0, 0.3, 0.6, 0.75, 0.9, 1.0))
METRIC = Metric("ndcg", 10)
"""Of validation queries, by which options are chosen."""
WEIGHTS = (0.0, 0.1, 0.3, 1.0, 3.0)
"""Of a column in BM25F."""
NEIGHBOURS = Option("neighbours", (10, 30, 100, 300))
Find = Callable[[str], tuple[Int64, NDArray[Any]]]
"""A text → the items that have something in common with it, in any order, and their scores."""


@dataclass(frozen=True, eq=False)
class Learned:
    """queries    with their items; there may be none
    centroids  float32[I, F]: items in the features of the vectoriser, by these queries and their own words
    """

    queries: LabelledTexts
    centroids: Csr


@dataclass(frozen=True, eq=False)
class TextTask:
    """What a method of texts learns from, and by what it chooses.

    columns     the texts of all items, by column; there may be none
    whole       all that may be learned from · part: without the validation queries, where these are of the log
    validation  queries of the log, or made of words of the items
    vectoriser  of n-grams
    made        whether the validation queries are made of words of the items
    deadline    after which no further options are tried
    """

    columns: Sequence[Sequence[str]]
    whole: Learned
    part: Learned
    validation: Sequence[Question]
    vectoriser: Vectoriser
    made: bool = False
    deadline: Deadline = NO_DEADLINE

    def chosen(self, grid: Sequence[Option], begun: Callable[[Learned], Made]) -> Fitted:
        """What the best of the options makes of the whole; the trials' figures are those of the part.

        begun  what was learned from → the bytes of what answers need, and options → how it answers
        """
        begin = time.monotonic()
        queries = [pair.query for pair in self.validation]
        _, made = begun(self.part)

        def figure(tried: Options) -> float:
            return float(METRIC.of(best_of(made(tried))(queries, METRIC.m, False), self.validation).mean())

        found = search(figure, [{option.name: option.values[len(option.values) // 2] for option in grid}], grid, self.deadline)
        if self.part is not self.whole:
            del made
        size, made = begun(self.whole)
        best = found.best.options
        return Fitted(best_of(made(best)), best, size, time.monotonic() - begin, found.trials, found.ended)


Made = tuple[int, Callable[[Options], Find]]
TextMethod = Callable[[TextTask], Fitted]


def best_of(find: Find) -> Rank:
    """How it answers: the best first, of equals the item that comes first."""

    def rank(queries: Sequence[Any], /, m: int, exclude_seen: bool) -> Int64:
        rows_BM = np.full((len(queries), m), NO_ITEM, np.int64)
        for place, query in enumerate(queries):
            rows, scores = find(query)
            if len(rows) > m:
                kept = np.argpartition(-scores, m - 1)[:m]
                kept = np.flatnonzero(scores >= scores[kept].min())
                rows, scores = rows[kept], scores[kept]
            best = rows[np.lexsort((rows, -scores))][:m]
            rows_BM[place, : len(best)] = best
        return rows_BM

    return rank


class WordIndex:
    """The words of items' texts, by field. of_field: float32[I, F] each, how often an item has a word."""

    def __init__(self, fields: Sequence[Sequence[str]]) -> None:
        self._number: dict[str, int] = {}
        entries = [[self._numbers(text, new=True) for text in texts] for texts in fields]
        self.of_field = [self._matrix(rows) for rows in entries]

    @property
    def nbytes(self) -> int:
        return bytes_of(*self.of_field)

    def joined(self) -> WordIndex:
        whole = WordIndex([])
        whole._number, whole.of_field = self._number, [sum(self.of_field[1:], start=self.of_field[0])]
        return whole

    def scorer(self, weights: Sequence[float], k1: float, b: float) -> Find:
        """BM25F; of one field, and the weight 1, BM25."""
        parts = []
        for weight, field in zip(weights, self.of_field, strict=True):
            length = field.sum(1)
            usual = length[length > 0].mean() if length.any() else 1.0
            parts.append(diags_array(weight / np.maximum(1 - b + b * length / usual, 1e-9)) @ field)  # an empty field has no word
        frequency = csr_array(sum(parts[1:], start=parts[0]))
        frequency.eliminate_zeros()
        items_F = np.bincount(frequency.indices, minlength=frequency.shape[1])
        frequency.data *= (k1 + 1) / (frequency.data + k1)
        idf_F = np.log1p((frequency.shape[0] - items_F + 0.5) / (items_F + 0.5))
        by_word = csr_array((frequency @ diags_array(idf_F)).T)

        def find(query: str) -> tuple[Int64, NDArray[Any]]:
            total = np.zeros(by_word.shape[1])
            for number in self._numbers(query):
                own = slice(by_word.indptr[number], by_word.indptr[number + 1])
                total[by_word.indices[own]] += by_word.data[own]
            rows = np.flatnonzero(total)
            return rows, total[rows]

        return find

    def _numbers(self, text: str, *, new: bool = False) -> list[int]:
        words = words_of(text)
        if new:
            return [self._number.setdefault(word, len(self._number)) for word in words]
        return [self._number[word] for word in words if word in self._number]

    def _matrix(self, rows: Sequence[Sequence[int]]) -> Csr:
        begin = np.cumsum([0, *map(len, rows)])
        columns = np.fromiter(itertools.chain.from_iterable(rows), np.int64, begin[-1])
        matrix = csr_array((np.ones(len(columns), np.float32), columns, begin), shape=(len(rows), len(self._number)))
        matrix.sum_duplicates()
        return matrix


def fields_of(columns: Sequence[Sequence[str]], queries: LabelledTexts) -> list[list[str]]:
    """The texts of each column; and what was asked for and led to an item, as one more."""
    fields = [list(column) for column in columns]
    if len(queries):
        asked: list[list[str]] = [[] for _ in range(queries.labels.shape[1])]
        labels = queries.labels
        for place, text in enumerate(queries.texts):
            for item in labels.indices[labels.indptr[place] : labels.indptr[place + 1]].tolist():
                asked[item].append(text)
        fields.append([" ".join(texts) for texts in asked])
    return fields


def bm25(task: TextTask) -> Fitted:
    """Of all fields as one text; k1 and b are chosen."""

    def begun(learned: Learned) -> Made:
        index = WordIndex(fields_of(task.columns, learned.queries)).joined()
        return index.nbytes, lambda tried: index.scorer((1.0,), tried["k1"], tried["b"])

    return task.chosen((K1, B), begun)


def bm25f(task: TextTask) -> Fitted:
    """Weights of the fields, k1 and b are chosen."""
    weights = [Option(f"weight {place + 1}", WEIGHTS) for place in range(len(task.columns) + (len(task.part.queries) > 0))]

    def begun(learned: Learned) -> Made:
        index = WordIndex(fields_of(task.columns, learned.queries))

        def made(tried: Options) -> Find:
            given = [tried[weight.name] for weight in weights]
            return index.scorer(given if any(given) else [1.0] * len(given), tried["k1"], tried["b"])

        return index.nbytes, made

    return task.chosen((*weights, K1, B), begun)


def centroids(task: TextTask) -> Fitted:
    """The cosine of a query to each item's features, which are those that a tree is built from."""

    def begun(learned: Learned) -> Made:
        by_feature = csr_array(learned.centroids.T)

        def find(text: str) -> tuple[Int64, NDArray[Any]]:
            scores = as_matrix(task.vectoriser.transform([text])) @ by_feature
            return scores.indices.astype(np.int64), scores.data

        return bytes_of(by_feature), lambda _: find

    return task.chosen((), begun)


def query_neighbours(task: TextTask) -> Fitted:
    """The nearest queries by their cosine vote for their items with it, by the weights of these; how many vote is chosen."""
    if not len(task.part.queries):
        raise InvalidConfig("--methods", "query-neighbours", "a log: queries vote, and there are none")

    def begun(learned: Learned) -> Made:
        labels = learned.queries.labels
        by_feature = csr_array(as_matrix(task.vectoriser.transform(learned.queries.texts)).T)

        def made(tried: Options) -> Find:
            def find(text: str) -> tuple[Int64, NDArray[Any]]:
                scores = as_matrix(task.vectoriser.transform([text])) @ by_feature
                nearest = np.argsort(-scores.data, kind="stable")[: tried["neighbours"]]
                own = labels[scores.indices[nearest]]
                rows, place = np.unique(own.indices, return_inverse=True)
                votes = np.bincount(place, own.data * np.repeat(scores.data[nearest], np.diff(own.indptr)), len(rows))
                return rows.astype(np.int64), votes

            return find

        return bytes_of(by_feature, labels), made

    return task.chosen((NEIGHBOURS,), begun)


METHODS: dict[str, TextMethod] = {"bm25": bm25, "bm25f": bm25f, "centroids": centroids, "query-neighbours": query_neighbours}
