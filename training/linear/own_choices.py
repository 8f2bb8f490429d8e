"""What people's queries say of items' own texts: how much a word of each column says, and how many queries say as much as the texts.

Queries are answered from all items by the inner product with the items' rows, without a tree, and nDCG@10 decides. Queries that are texts
of items choose nothing: every choice finds them.

Knows rows and queries. Does not know trees.

Legend: B queries, I items, F features, C columns, T choices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from espalier.text.vectoriser import Vectoriser
from training.data.csr import Csr, as_matrix
from training.data.xmc import LabelledPoints
from training.linear.label_features import label_features
from training.linear.own_texts import Own, column_weights
from training.specification.linear import LinearOptions

Floats = NDArray[np.float32]
Int64 = NDArray[np.int64]
FEWEST, MOST, MOST_SCORED = 30, 500, 100_000
"""Queries that choose, and the items that they are answered from."""
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
FACTORS = (1 / 3, 3.0)
"""What the weight of one column is also multiplied by."""
CLEARLY = 2.0
"""Standard errors, over queries, by which other weights must find more than the rule's."""
QUERIES, USUAL_QUERIES = (1.0, 5.0, 20.0, 80.0, math.inf), 20.0
"""Queries that say as much of an item as its own texts; of those that find as much the most."""
FOLDS = 5
TOP = 10


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
    for exponent in EXPONENTS:
        weights = column_weights(columns, exponent)
        tried += [weights, *([*weights[:c], factor * weights[c], *weights[c + 1 :]] for c in range(len(weights)) for factor in FACTORS)]
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
    asked_for = np.unique(train.labels[rows].indices).astype(np.int64)
    others = rng.permutation(np.setdiff1d(np.arange(train.labels.shape[1]), asked_for))
    return rows, np.sort(np.concatenate([asked_for, others[: max(0, MOST_SCORED - len(asked_for))]]))


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
    scores = [(asked.points @ part.T).tocsr() for part in parts]
    found_TB = np.empty((len(tried_TC), len(asked)), np.float32)
    for b in range(len(asked)):
        key_TI = tried_TC @ np.stack([score[[b]].toarray()[0] for score in scores]) / length_TI
        found_TB[:, b] = _ndcg(key_TI, asked.labels_of(b), asked.weights_of(b))
    return found_TB


def _by_queries(known: LabelledPoints, own: Csr, held: LabelledPoints, options: LinearOptions) -> Floats:
    """nDCG@10 [T, B] of held queries by rows made of the known ones, with each of QUERIES."""
    scores = [(held.points @ label_features(known, Own(own, (), queries), options)[1].T).tocsr() for queries in QUERIES]
    found_TB = np.empty((len(QUERIES), len(held)), np.float32)
    for b in range(len(held)):
        key_TI = np.stack([score[[b]].toarray()[0] for score in scores])
        found_TB[:, b] = _ndcg(key_TI, held.labels_of(b), held.weights_of(b))
    return found_TB


def _ndcg(key_TI: Floats, right: Int64, gains: Floats) -> Floats:
    """nDCG@10 [T] of one query; of equal keys what is right comes first, and what has no key above 0 is not found."""
    discount = np.append(1 / np.log2(np.arange(TOP) + 2), 0)
    place_TR = np.stack([np.minimum((key_TI > key_TI[:, [item]]).sum(axis=1), TOP) for item in right], axis=1)
    place_TR[key_TI[:, right] <= 0] = TOP
    best = np.sort(gains)[::-1][:TOP]
    found_T: Floats = (discount[place_TR] @ gains / (best @ discount[: len(best)])).astype(np.float32)
    return found_T
