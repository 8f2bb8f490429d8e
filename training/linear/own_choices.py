"""What people's queries say of items' own texts: how much a word of each column says, and how many queries say as much as the texts.

Queries are answered from all items by the inner product with the items' rows, without a tree, and nDCG@10 decides. Queries that are texts
of items choose nothing: every choice finds them.

Knows rows and queries. Does not know trees.

Legend: B queries, I items, F features, C columns, T choices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.text.vectoriser import Vectoriser

from ..data.csr import Csr, as_matrix
from ..data.xmc import LabelledPoints
from ..linear.label_features import beside, summed
from ..linear.own_texts import Own, column_weights
from ..specification.linear import LinearOptions

Floats = NDArray[np.float32]
Int64 = NDArray[np.int64]
FEWEST, MOST, MOST_SCORED = 30, 500, 100_000
"""Queries that choose, and the items that they are answered from."""
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
FACTORS = (1 / 3, 3.0)
"""What the weight of one column is also multiplied by, of at most FACTORED columns: every trial scores all items for every query."""
FACTORED = 8
CLEARLY = 2.0
"""Standard errors, over queries, by which other weights must find more than the rule's."""
QUERIES, USUAL_QUERIES = (1.0, 5.0, 20.0, 80.0, math.inf), 20.0
"""Queries that say as much of an item as its own texts; of those that find as much the most."""
FOLDS = 5
TOP, MOST_RIGHT, EQUAL = 10, 20, 1e-5
"""Places that count, items of a query that count, and the relative difference of keys that are equal but for rounding."""


def chosen_weights(vectoriser: Vectoriser, columns: Sequence[Sequence[str]], train: LabelledPoints) -> list[float]:
    """What a word of each column says: what the rule says, or what finds clearly more.

    columns  the texts of all items, by column
    train    points of which some, at least FEWEST, are people's queries; else the rule decides
    """
    usual = column_weights(columns)
    rows, items = _sample(train)
    if len(columns) < 2 or len(rows) < FEWEST:
        return usual
    asked = _answered_from(train, rows, items)
    tried = [usual]
    one_by_one = list(itertools.product(range(len(columns)), FACTORS)) if len(columns) <= FACTORED else []
    for exponent in EXPONENTS:
        weights = column_weights(columns, exponent)
        tried += [weights, *([*weights[:c], factor * weights[c], *weights[c + 1 :]] for c, factor in one_by_one)]
    few = [[texts[item] for item in items.tolist()] for texts in columns]
    found_TB = by_weights(vectoriser, few, asked, np.array(tried, np.float32))
    best = int(found_TB.mean(axis=1).argmax())
    gain_B = found_TB[best] - found_TB[0]
    error = float(gain_B.std(ddof=1)) / len(asked) ** 0.5
    return tried[best] if gain_B.mean() > CLEARLY * error else usual


def chosen_queries(train: LabelledPoints, rows: Csr, options: LinearOptions) -> float:
    """How many queries of an item say as much of it as its own texts `rows` [I, F]: those by which held-out queries find most."""
    asked, items = _sample(train)
    if len(asked) < FEWEST:
        return USUAL_QUERIES
    own, found = rows[items], []
    for fold in range(FOLDS):
        held = asked[fold::FOLDS]
        known = _answered_from(train, np.setdiff1d(train.asked, held), items)
        found.append(_by_queries(known, own, _answered_from(train, held, items), options))
    means = np.round(np.concatenate(found, axis=1).mean(axis=1), 4).tolist()
    return max(queries for queries, mean in zip(QUERIES, means, strict=True) if mean == max(means))


def _sample(train: LabelledPoints) -> tuple[Int64, Int64]:
    """Some of people's queries at random, and the items that they are answered from, those that they led to among them: positions."""
    rng = np.random.default_rng(0)
    rows = train.unseen
    rows = rng.permutation(rows[np.diff(train.labels.indptr)[rows] > 0])[:MOST]
    asked_for = np.unique(np.concatenate([_right_of(train, row)[0] for row in rows.tolist()] or [rows])).astype(np.int64)
    others = rng.permutation(np.setdiff1d(np.arange(train.labels.shape[1]), asked_for))
    return rows, np.sort(np.concatenate([asked_for, others[: max(0, MOST_SCORED - len(asked_for))]]))


def _right_of(points: LabelledPoints, row: int) -> tuple[Int64, Floats]:
    """The items of a query that have the largest weights, MOST_RIGHT at most, and these."""
    weights = points.weights_of(row)
    kept = np.argsort(-weights, kind="stable")[:MOST_RIGHT]
    return points.labels_of(row)[kept], weights[kept]


def _answered_from(train: LabelledPoints, rows: Int64, items: Int64) -> LabelledPoints:
    """Some points, with the labels that are some items."""
    return LabelledPoints(train.points[rows], train.labels[rows][:, items])


def by_weights(vectoriser: Vectoriser, columns: Sequence[Sequence[str]], asked: LabelledPoints, tried_TC: Floats) -> Floats:
    """nDCG@10 [T, B] of queries by rows of length 1 that add up columns with each of the weights.

    The score is linear in the weights but for the row's length, whose square is a quadratic form of them.
    """
    parts = [as_matrix(vectoriser.documents(texts)) for texts in columns]
    square_TI = np.zeros((len(tried_TC), parts[0].shape[0]), np.float32)
    for a, b in itertools.product(range(len(parts)), repeat=2):
        product_I = np.asarray(parts[a].multiply(parts[b]).sum(axis=1), np.float32).ravel()
        square_TI += (tried_TC[:, a] * tried_TC[:, b])[:, None] * product_I
    length_TI = np.sqrt(np.maximum(square_TI, np.finfo(np.float32).tiny))
    return _figures(asked, parts, lambda score_CI: tried_TC @ score_CI / length_TI)


def _by_queries(known: LabelledPoints, own: Csr, held: LabelledPoints, options: LinearOptions) -> Floats:
    """nDCG@10 [T, B] of held queries by rows made of the known ones, with each of QUERIES."""
    sums, counts_I = summed(known, options), np.bincount(known.labels.indices, minlength=own.shape[0])
    return _figures(held, [beside(sums, counts_I, Own(own, (), queries)) for queries in QUERIES], lambda score_TI: score_TI)


def _figures(asked: LabelledPoints, rows: Sequence[Csr], keys: Callable[[Floats], NDArray[Any]]) -> Floats:
    """nDCG@10 [T, B] of queries. keys: a query's products with each of the `rows` → its keys [T, I]."""
    scores = [(asked.points @ rows_IF.T).tocsr() for rows_IF in rows]
    found_BT = []
    for b in range(len(asked)):
        key_TI = keys(np.stack([score[[b]].toarray()[0] for score in scores]))
        found_BT.append(_ndcg(key_TI, *_right_of(asked, b)))
    return np.stack(found_BT, axis=1)


def _ndcg(key_TI: Floats, right: Int64, gains: Floats) -> Floats:
    """nDCG@10 [T] of one query. Of equal keys, but for rounding, each has their mean place; what has no key above 0 is not found."""
    discount = np.append(1 / np.log2(np.arange(TOP) + 2), 0)
    best = np.sort(gains)[::-1][:TOP]
    place_TR = np.full((len(key_TI), len(right)), TOP)
    for r, item in enumerate(right.tolist()):
        own_T1 = key_TI[:, [item]]
        above_T, alike_T = ((key_TI > own_T1 * factor).sum(axis=1) for factor in (1 + EQUAL, 1 - EQUAL))
        place_T = np.minimum((above_T + alike_T - 1) // 2, TOP)
        place_TR[:, r] = np.where(own_T1[:, 0] > 0, place_T, TOP)
    found_T: Floats = (discount[place_TR] @ gains / (best @ discount[: len(best)])).astype(np.float32)
    return found_T
