"""Chooses, by people's queries, the weights of the items' text columns, and how many queries weigh as much as an item's own texts.

Every query ranks all items by the inner product with their rows, without a tree, and nDCG@10 decides. Queries that are texts of items do
not count: every choice finds them.

Knows rows and queries. Does not know trees.

Legend: B queries, I items, F features, C columns, T choices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from espalier.arrays import Float32, Int64
from espalier.text.vectoriser import Vectoriser

from ..data.csr import Csr, as_matrix, scaled
from ..data.xmc import LabelledPoints
from ..linear.label_features import add_own_texts, sum_points
from ..linear.own_texts import column_weights, combined, squares
from ..specification.linear import LinearOptions

LEAST_QUERIES, MOST_QUERIES, MOST_ITEMS = 30, 500, 100_000
"""Least and most queries to choose by, and most items that they rank."""
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
FACTORS = (1 / 3, 3.0)
"""Then each column's weight is also tried multiplied by these, if there are at most MOST_FACTORED columns: a trial scores all items."""
MOST_FACTORED = 8
MARGIN = 2.0
"""Clearly better is an nDCG that is higher by more than so many standard errors over queries. Other weights must be, to be chosen."""
QUERIES, DEFAULT_QUERIES = (1.0, 5.0, 20.0, 80.0, math.inf), 20.0
"""Values to try for `OwnTexts.queries`; among equally good ones the default or the next smaller one is chosen. Then the default."""
FOLDS = 5
TOP, MOST_RELEVANT, ROUNDING = 10, 20, 1e-5
"""The cut of nDCG, most relevant items of a query that count, and the relative difference of keys that counts as rounding."""


def chosen_weights(vectoriser: Vectoriser, columns: Sequence[Sequence[str]], train: LabelledPoints) -> list[float]:
    """The weight of a word of each column: the default, or weights that find clearly more.

    columns  the texts of all items, by column
    train    points; with fewer than LEAST_QUERIES people's queries among them, the default is returned
    """
    default = column_weights(columns)
    query_rows, items = _sample(train)
    if len(columns) < 2 or len(query_rows) < LEAST_QUERIES:
        return default
    sampled_columns = [[texts[item] for item in items.tolist()] for texts in columns]
    ndcg_of = weighted_ndcg(vectoriser, sampled_columns, _restricted(train, query_rows, items))
    default_B = ndcg_of(default)
    best, best_B = default, default_B
    for weights in (column_weights(columns, exponent) for exponent in EXPONENTS):
        best, best_B = _better(best, best_B, weights, ndcg_of(weights))
    for column, factor in itertools.product(range(len(columns)), FACTORS) if len(columns) <= MOST_FACTORED else ():
        weights = [*best[:column], factor * best[column], *best[column + 1 :]]
        best, best_B = _better(best, best_B, weights, ndcg_of(weights))
    return best if _is_clearly_better(best_B, default_B) else default


def _is_clearly_better(ndcg_B: Float32, default_B: Float32) -> bool:
    gain_B = ndcg_B - default_B
    return bool(gain_B.mean() > MARGIN * float(gain_B.std(ddof=1)) / len(gain_B) ** 0.5)


def _better(weights: list[float], ndcg_B: Float32, other_weights: list[float], other_B: Float32) -> tuple[list[float], Float32]:
    return (other_weights, other_B) if other_B.mean() > ndcg_B.mean() else (weights, ndcg_B)


def chosen_queries(train: LabelledPoints, text_rows: Csr, options: LinearOptions) -> float:
    """How many queries of an item weigh as much as its own texts `text_rows` [I, F]: the number by which held-out queries find most.

    A number above the default must find clearly more: held-out queries do not show how much more is found when a query is asked again.
    """
    query_rows, items = _sample(train)
    if len(query_rows) < LEAST_QUERIES:
        return DEFAULT_QUERIES
    item_rows, ndcgs = text_rows[items], []
    for fold in range(FOLDS):
        held_out = query_rows[fold::FOLDS]
        training_points = _restricted(train, np.setdiff1d(train.asked, held_out), items)
        ndcgs.append(_ndcg_by_queries(training_points, item_rows, _restricted(train, held_out, items), options))
    ndcg_of = dict(zip(QUERIES, np.concatenate(ndcgs, axis=1), strict=True))
    best = max(QUERIES, key=lambda queries: (round(float(ndcg_of[queries].mean()), 4), queries <= DEFAULT_QUERIES, queries))
    return best if best <= DEFAULT_QUERIES or _is_clearly_better(ndcg_of[best], ndcg_of[DEFAULT_QUERIES]) else DEFAULT_QUERIES


def _sample(train: LabelledPoints) -> tuple[Int64, Int64]:
    """The positions of random people's queries, and of the items that they rank, among them all relevant ones."""
    rng = np.random.default_rng(0)
    query_rows = train.unseen
    query_rows = rng.permutation(query_rows[np.diff(train.labels.indptr)[query_rows] > 0])[:MOST_QUERIES]
    relevant = np.unique(np.concatenate([_relevant_items(train, row)[0] for row in query_rows.tolist()] or [query_rows])).astype(np.int64)
    other_items = rng.permutation(np.setdiff1d(np.arange(train.labels.shape[1]), relevant))
    return query_rows, np.sort(np.concatenate([relevant, other_items[: max(0, MOST_ITEMS - len(relevant))]]))


def _relevant_items(points: LabelledPoints, row: int) -> tuple[Int64, Float32]:
    """The items of a query with the largest weights, at most MOST_RELEVANT, and these weights."""
    weights = points.weights_of(row)
    best = np.argsort(-weights, kind="stable")[:MOST_RELEVANT]
    return points.labels_of(row)[best], weights[best]


def _restricted(train: LabelledPoints, rows: Int64, items: Int64) -> LabelledPoints:
    """Some points, with only these items as labels."""
    return LabelledPoints(train.points[rows], train.labels[rows][:, items])


def weighted_ndcg(
    vectoriser: Vectoriser, columns: Sequence[Sequence[str]], queries: LabelledPoints
) -> Callable[[Sequence[float]], Float32]:
    """Returns a function from weights of the columns to the nDCG@10 [B] of queries against the items' rows (`text_rows`)."""
    asked_features = np.unique(queries.points.indices)
    square_rows = [squares(as_matrix(vectoriser.documents(texts))) for texts in columns]
    square_CI = np.stack([np.asarray(rows.sum(axis=1), np.float32).ravel() for rows in square_rows])
    asked_squares = [rows[:, asked_features] for rows in square_rows]
    asked = LabelledPoints(queries.points[:, asked_features], queries.labels)

    def ndcg_of(weights: Sequence[float]) -> Float32:
        length_I = np.sqrt(np.maximum(np.square(weights, dtype=np.float32) @ square_CI, np.finfo(np.float32).tiny))
        ndcg_TB = _figures(asked, [scaled(combined(asked_squares, weights), 1 / np.sqrt(length_I))])
        return ndcg_TB.ravel()

    return ndcg_of


def _ndcg_by_queries(training_points: LabelledPoints, text_rows: Csr, held_out: LabelledPoints, options: LinearOptions) -> Float32:
    """nDCG@10 [T, B] of held-out queries against rows made of the training points, for each of QUERIES."""
    sums, counts_I = sum_points(training_points, options), np.bincount(training_points.labels.indices, minlength=text_rows.shape[0])
    return _figures(held_out, [add_own_texts(sums, counts_I, text_rows, queries) for queries in QUERIES])


def _figures(queries: LabelledPoints, rows: Sequence[Csr]) -> Float32:
    """nDCG@10 [T, B] of queries, by their products with each of the `rows`."""
    scores = [(queries.points @ rows_IF.T).tocsr() for rows_IF in rows]
    ndcg_BT = []
    for b in range(len(queries)):
        key_TI = np.stack([score[[b]].toarray()[0] for score in scores])
        ndcg_BT.append(_ndcg(key_TI, *_relevant_items(queries, b)))
    return np.stack(ndcg_BT, axis=1)


def _ndcg(key_TI: Float32, relevant: Int64, gains: Float32) -> Float32:
    """nDCG@10 [T] of one query. Ties (up to rounding) get their mean position. Items without a key above 0 are not found."""
    discount = np.append(1 / np.log2(np.arange(TOP) + 2), 0)
    best = np.sort(gains)[::-1][:TOP]
    position_TR = np.full((len(key_TI), len(relevant)), TOP)
    for r, item in enumerate(relevant.tolist()):
        key_T1 = key_TI[:, [item]]
        above_T, tied_T = ((key_TI > key_T1 * factor).sum(axis=1) for factor in (1 + ROUNDING, 1 - ROUNDING))
        position_T = np.minimum((above_T + tied_T - 1) // 2, TOP)
        position_TR[:, r] = np.where(key_T1[:, 0] > 0, position_T, TOP)
    ndcg_T: Float32 = (discount[position_TR] @ gains / (best @ discount[: len(best)])).astype(np.float32)
    return ndcg_T
