"""Baselines of text search: BM25 over all fields as one text, BM25F, centroids, and a vote of the nearest queries.

They answer exactly, from inverted indices. Validation queries choose the options; no method learns from these while its options are chosen.

    score = Σ_word idf · f · (k1 + 1) / (f + k1),     f = Σ_c w_c · tf_c / (1 − b + b · length_c / mean length_c)

is BM25F (Robertson, Zaragoza and Taylor 2004), and of one field BM25.

Words are those of the vectoriser; those that differ only in frequent endings are one (`espalier/text/endings.py`).

Legend: B queries, I items, F words or features, M results.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_array, diags_array

from espalier.arrays import Array, Int64
from espalier.errors import InvalidConfig
from espalier.search import padded
from espalier.text.endings import same_words
from espalier.text.vectoriser import Vectoriser, words_of

from ..baselines.tuned_method import bytes_of
from ..data.csr import Csr, as_matrix
from ..data.query_logs import LabelledTexts
from ..retrieval.task import NO_DEADLINE, Deadline, Fitted, Metric, Question, Rank
from ..retrieval.tuning import Option, Options, search

K1, B = Option("k1", (0.3, 0.6, 1.2, 2.0), times=1.7, least=0.01, most=20), Option("b", (0.0, 0.3, 0.6, 0.75, 0.9, 1.0))
METRIC = Metric("ndcg", 10)
"""The figure of validation queries that chooses options."""
WEIGHTS = (0.0, 0.1, 0.3, 1.0, 3.0)
"""Weights of a column that BM25F tries."""
NEIGHBOURS = Option("neighbours", (10, 30, 100, 300))
Find = Callable[[str], tuple[Int64, Array]]
"""A text → the items that share something with it, in any order, and their scores."""


@dataclass(frozen=True, eq=False)
class Learned:
    """What a method learns from.

    queries    with their items; there may be none
    centroids  float32[I, F]: items in the vectoriser's features, made of these queries and of the items' words
    """

    queries: LabelledTexts
    centroids: Csr

    def most_frequent(self) -> Int64:
        """int64[I]: all items, by descending weight of their queries, then in the table's order."""
        return np.argsort(-np.asarray(self.queries.labels.sum(0)), kind="stable")


@dataclass(frozen=True, eq=False)
class TextTask:
    """The data of a method of texts.

    columns           the texts of all items, by column; there may be none
    whole             all training data
    part              the same without validation queries, if these are of the log
    validation        queries of the log, or made of words of the items
    vectoriser        of n-grams
    has_made_queries  whether the validation queries are made of words of the items
    deadline          after which no further options are tried
    """

    columns: Sequence[Sequence[str]]
    whole: Learned
    part: Learned
    validation: Sequence[Question]
    vectoriser: Vectoriser
    has_made_queries: bool = False
    deadline: Deadline = NO_DEADLINE

    def chosen(self, grid: Sequence[Option], build: Callable[[Learned], SizedFinder]) -> Fitted:
        """The method with the best options, learned from `whole`. The figures of the trials are those of `part`.

        build  training data → the bytes that answers need, and a function from options to `Find`
        """
        begin_s = time.monotonic()
        queries = [pair.query for pair in self.validation]
        _, find_with = build(self.part)

        def figure(options: Options) -> float:
            rank = best_of(find_with(options), self.part.most_frequent())
            return float(METRIC.of(rank(queries, METRIC.m, False), self.validation).mean())

        search_result = search(figure, [{option.name: option.values[len(option.values) // 2] for option in grid}], grid, self.deadline)
        if self.part is not self.whole:
            del find_with
        size, find_with = build(self.whole)
        best = search_result.best.options
        rank = best_of(find_with(best), self.whole.most_frequent())
        return Fitted(rank, best, size, time.monotonic() - begin_s, search_result.trials, search_result.ended)


SizedFinder = tuple[int, Callable[[Options], Find]]
TextMethod = Callable[[TextTask], Fitted]


def best_of(find: Find, filler_I: Int64) -> Rank:
    """A ranking by descending score, ties by the lower row. Fewer than m items are filled up from `filler_I`, since a tree's are, too."""

    def rank(queries: Sequence[Any], /, m: int, exclude_seen: bool) -> Int64:
        lists = []
        for query in queries:
            rows, scores = find(query)
            if len(rows) > m:
                top = np.argpartition(-scores, m - 1)[:m]
                top = np.flatnonzero(scores >= scores[top].min())
                rows, scores = rows[top], scores[top]
            best = rows[np.lexsort((rows, -scores))][:m]
            first_filler = filler_I[:m]  # at most len(best) of them are in `best`
            lists.append(np.append(best, first_filler[~np.isin(first_filler, best)])[:m])
        return padded(lists, m)

    return rank


class WordIndex:
    """An index of the words of items' texts. of_field: float32[I, F] for each field, how often an item has a word."""

    def __init__(self, fields: Sequence[Sequence[str]]) -> None:
        self._number: dict[str, int] = {}
        entries = [[self._numbers(text, new=True) for text in texts] for texts in fields]
        counts_as_F = self._join_forms(entries)
        self.of_field = [self._matrix(rows, counts_as_F) for rows in entries]

    @property
    def nbytes(self) -> int:
        return bytes_of(*self.of_field)

    def joined(self) -> WordIndex:
        joined_index = WordIndex([])
        joined_index._number, joined_index.of_field = self._number, [sum(self.of_field[1:], start=self.of_field[0])]
        return joined_index

    def scorer(self, weights: Sequence[float], k1: float, b: float) -> Find:
        """BM25F; with one field of weight 1 it is BM25."""
        weighted_fields = []
        for weight, field in zip(weights, self.of_field, strict=True):
            length = field.sum(1)
            mean_length = length[length > 0].mean() if length.any() else 1.0
            factor = weight / np.maximum(1 - b + b * length / mean_length, 1e-9)  # an empty field has no word
            weighted_fields.append(diags_array(factor) @ field)
        frequency = csr_array(sum(weighted_fields[1:], start=weighted_fields[0]))
        frequency.eliminate_zeros()
        items_F = np.bincount(frequency.indices, minlength=frequency.shape[1])
        frequency.data *= (k1 + 1) / (frequency.data + k1)
        idf_F = np.log1p((frequency.shape[0] - items_F + 0.5) / (items_F + 0.5))
        by_word = csr_array((frequency @ diags_array(idf_F)).T)

        def find(query: str) -> tuple[Int64, Array]:
            total = np.zeros(by_word.shape[1])
            for word in self._numbers(query):
                entries = slice(by_word.indptr[word], by_word.indptr[word + 1])
                total[by_word.indices[entries]] += by_word.data[entries]
            rows = np.flatnonzero(total)
            return rows, total[rows]

        return find

    def _numbers(self, text: str, *, new: bool = False) -> list[int]:
        words = words_of(text)
        if new:
            return [self._number.setdefault(word, len(self._number)) for word in words]
        return [self._number[word] for word in words if word in self._number]

    def _join_forms(self, entries: Sequence[Sequence[Sequence[int]]]) -> Int64:
        """Number words anew that differ only in endings, by the most frequent one. Returns the new number of each."""
        words = list(self._number)
        numbers = itertools.chain.from_iterable(itertools.chain.from_iterable(entries))
        order_F = np.argsort(-np.bincount(np.fromiter(numbers, np.int64), minlength=len(words)), kind="stable")
        counts_as_F = np.empty(len(words), np.int64)
        counts_as_F[order_F] = order_F[same_words([words[number] for number in order_F])]
        self._number = dict(zip(words, counts_as_F.tolist(), strict=True))
        return counts_as_F

    def _matrix(self, rows: Sequence[Sequence[int]], counts_as_F: Int64) -> Csr:
        begin = np.cumsum([0, *map(len, rows)])
        columns = counts_as_F[np.fromiter(itertools.chain.from_iterable(rows), np.int64, begin[-1])]
        matrix = csr_array((np.ones(len(columns), np.float32), columns, begin), shape=(len(rows), len(self._number)))
        matrix.sum_duplicates()
        return matrix


def fields_of(columns: Sequence[Sequence[str]], queries: LabelledTexts) -> list[list[str]]:
    """The texts of each column, and one more field: the queries that led to each item."""
    fields = [list(column) for column in columns]
    if len(queries):
        queries_I: list[list[str]] = [[] for _ in range(queries.labels.shape[1])]
        labels = queries.labels
        for b, text in enumerate(queries.texts):
            for item in labels.indices[labels.indptr[b] : labels.indptr[b + 1]].tolist():
                queries_I[item].append(text)
        fields.append([" ".join(texts) for texts in queries_I])
    return fields


def bm25(task: TextTask) -> Fitted:
    """BM25 over all fields as one text, with chosen k1 and b."""

    def build(learned: Learned) -> SizedFinder:
        index = WordIndex(fields_of(task.columns, learned.queries)).joined()
        return index.nbytes, lambda options: index.scorer((1.0,), options["k1"], options["b"])

    return task.chosen((K1, B), build)


def bm25f(task: TextTask) -> Fitted:
    """BM25F with chosen weights of the fields, k1 and b."""
    weights = [Option(f"weight {position + 1}", WEIGHTS) for position in range(len(task.columns) + (len(task.part.queries) > 0))]

    def build(learned: Learned) -> SizedFinder:
        index = WordIndex(fields_of(task.columns, learned.queries))

        def find_with(options: Options) -> Find:
            field_weights = [options[weight.name] for weight in weights]
            return index.scorer(field_weights if any(field_weights) else [1.0] * len(field_weights), options["k1"], options["b"])

        return index.nbytes, find_with

    return task.chosen((*weights, K1, B), build)


def centroids(task: TextTask) -> Fitted:
    """The inner product of a query and each item's centroid. A tree's leaves are scored by the same centroids."""

    def build(learned: Learned) -> SizedFinder:
        by_feature = csr_array(learned.centroids.T)

        def find(text: str) -> tuple[Int64, Array]:
            scores = as_matrix(task.vectoriser.transform([text])) @ by_feature
            return scores.indices.astype(np.int64), scores.data

        return bytes_of(by_feature), lambda _: find

    return task.chosen((), build)


def query_neighbours(task: TextTask) -> Fitted:
    """The nearest queries vote for their items: a vote is the cosine times the item's weight. How many vote is chosen."""
    if not len(task.part.queries):
        raise InvalidConfig("--methods", "query-neighbours", "a log: queries vote, and there are none")

    def build(learned: Learned) -> SizedFinder:
        labels = learned.queries.labels
        by_feature = csr_array(as_matrix(task.vectoriser.transform(learned.queries.texts)).T)

        def find_with(options: Options) -> Find:
            def find(text: str) -> tuple[Int64, Array]:
                scores = as_matrix(task.vectoriser.transform([text])) @ by_feature
                nearest = np.argsort(-scores.data, kind="stable")[: options["neighbours"]]
                vote_labels = labels[scores.indices[nearest]]
                rows, position = np.unique(vote_labels.indices, return_inverse=True)
                votes = np.bincount(position, vote_labels.data * np.repeat(scores.data[nearest], np.diff(vote_labels.indptr)), len(rows))
                return rows.astype(np.int64), votes

            return find

        return bytes_of(by_feature, labels), find_with

    return task.chosen((NEIGHBOURS,), build)


METHODS: dict[str, TextMethod] = {"bm25": bm25, "bm25f": bm25f, "centroids": centroids, "query-neighbours": query_neighbours}
