"""EASE^R: item-to-item weights by ridge regression in closed form (Steck 2019, "Embarrassingly shallow autoencoders for sparse data").

    P = (XᵀX + diag(λ · pop^ridge))⁻¹,   B = −P / diag(P) by columns, 0 on the diagonal
    score(j | history) = pop_j^−column · Σ_{d < L} recency^d · pop_{h_d}^−row · B[h_d, j],   h_0 the last item of the history

X holds, for each training user and each item of the list, |list|^(−user / 2). pop is how many training users have the item. ridge, row,
column and user at 0 and recency at 1 are the paper's model; ridge = a, row = 0 and column = a / 2 are the one whose columns of X, and of
histories, are scaled by pop^(−a/2). Lists without an order have a recency of 1.

Two dense I × I matrices of float32 are held, the inverse that is being made and the best so far. λ, ridge and user take an inversion
each, so they come after recency, row and column, which take none, and a deadline leaves out what they would have found.

Legend: B queries, I items, M results, L items of a history that count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.linalg import lapack

from espalier.errors import InvalidConfig, InvalidData

from ..baselines.tuned_method import bytes_of, tune
from ..data.interactions import Interactions
from ..data.user_item_matrix import damped_items, user_item_matrix
from ..neighbours.fit import fading
from ..retrieval.needs import LEAST_S, Needs, available_bytes
from ..retrieval.scores import best_then_popular, by_popularity
from ..retrieval.task import Fitted, Task
from ..retrieval.tuning import Option, Options, Remembered

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

WITHOUT_INVERSION = (
    Option("recency", (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.99, 1.0)),
    Option("column", (-0.2, -0.1, 0.0, 0.1, 0.2), add=0.1, least=-1.0, most=1.0),
    Option("row", (0.0, 0.1, 0.2, 0.3, 0.4), add=0.1, least=-0.5, most=1.0),
)
WITH_INVERSION = (
    Option("l2", (30.0, 100.0, 300.0, 1000.0), times=3, least=0.1, most=1e5),
    Option("ridge", (0.0, 0.25, 0.5, 0.75)),
    Option("user", (0.0, 0.5, 1.0)),
)
START: Options = {"recency": 1.0, "column": 0.0, "row": 0.0, "l2": 300.0, "ridge": 0.0, "user": 0.0}
LONGEST, LONGEST_WITHOUT_ORDER = 200, 2000
"""The latest items of a history that count; without an order, any so many."""
VALIDATION_QUERIES = 5000
BLOCK = 512
"""Rows of XᵀX made at a time."""
MOST_BYTES = 16 << 30
"""The matrices take no more, nor more than half of the memory that the machine has left."""
ONCE, SEARCH = 1.5, 8.0
"""What one fit, and the search over options, take in inversions."""
ANSWERING_S = 20.0
"""Seconds that the search over options is given for the answers to validation queries. What is left of them goes to other methods."""
PROBE = 2500
"""Items of the matrix whose inversion says how long one takes here."""


def answering(weights_II: Float32, users_I: NDArray[np.int64], options: Options, longest: int) -> Fitted:
    """B with what the other options say. users_I: how many training users an item has.

    An item without training users has no score, and no item has one where no item of the history has any.
    """
    damped_I = np.maximum(users_I, 1).astype(np.float64)
    row_I, column_I = damped_I ** -options["row"], np.where(users_I > 0, damped_I ** -options["column"], np.nan)
    weight_L, popular_I = fading(options["recency"], longest), by_popularity(users_I)

    def scores(histories: Sequence[Int64]) -> Float32:
        history_BI, known_B = damped_items(histories, weight_L, row_I, np.isfinite(column_I))
        score_BI: Float32 = (history_BI @ weights_II) * column_I.astype(np.float32)
        score_BI[~known_B] = np.nan
        return score_BI

    return Fitted(partial(best_then_popular, scores, popular_I), options, bytes_of(weights_II, row_I, column_I, popular_I), 0.0)


def weights(matrix: sparse.csr_array[np.float64], options: Options) -> Float32:
    """float32[I, I]: B, of the binary matrix of training users and items. In place of XᵀX: one such matrix is all that it needs."""
    items = matrix.shape[1]
    length = np.diff(matrix.indptr)
    scaled = sparse.csr_array(
        (np.repeat(np.maximum(length, 1.0) ** (-options["user"] / 2), length).astype(np.float32), matrix.indices, matrix.indptr),
        shape=matrix.shape,
    )
    by_item = scaled.T.tocsr()
    gram_II = np.empty((items, items), np.float32)
    for first in range(0, items, BLOCK):
        (by_item[first : first + BLOCK] @ scaled).toarray(out=gram_II[first : first + BLOCK])
    users_I = np.bincount(matrix.indices, minlength=items)
    gram_II[np.diag_indices(items)] += (options["l2"] * np.maximum(users_I, 1.0) ** options["ridge"]).astype(np.float32)
    invert(gram_II)
    diagonal_I = gram_II.diagonal().copy()
    for first in range(0, items, BLOCK):
        gram_II[first : first + BLOCK] /= -diagonal_I
    np.fill_diagonal(gram_II, 0)
    return gram_II


def invert(matrix_II: Float32) -> None:
    """The inverse of a symmetric positive definite matrix in its place, by Cholesky. Raises InvalidData where it is not such a one."""
    _, failed = lapack.spotrf(matrix_II.T, lower=0, clean=0, overwrite_a=1)
    if not failed:
        _, failed = lapack.spotri(matrix_II.T, lower=0, overwrite_c=1)
    if failed:
        raise InvalidData("l2", "a matrix that float32 cannot invert", "a larger one")
    for first in range(0, len(matrix_II), BLOCK):  # LAPACK wrote one triangle, here the lower one
        last = first + BLOCK
        matrix_II[first:last, last:] = matrix_II[last:, first:last].T
        corner = matrix_II[first:last, first:last]
        corner[...] = np.tril(corner) + np.tril(corner, -1).T


def ease(task: Task, most_bytes: int | None = None) -> Fitted:
    """Choose the options on validation queries, at most VALIDATION_QUERIES, and fit on all training users.

    most_bytes  what the two matrices may take; None for MOST_BYTES, or half of what the machine has left where that is less

    Raises InvalidData where they would take more, and InvalidConfig where one inversion would take longer than the task has.
    """
    begin, deadline = time.perf_counter(), task.deadline()
    interactions = task.split.lists
    refuse_too_many(interactions, most_bytes)
    inversion_s = inversion_seconds(interactions.item_count)
    if inversion_s > deadline.left_s():
        raise InvalidConfig(
            "seconds", round(task.seconds or 0, 1), f"at least {inversion_s:.0f} for EASE's inversion of {interactions.item_count} items"
        )
    ordered = interactions.order != "none"
    cheap, longest = WITHOUT_INVERSION[0 if ordered else 1 :], LONGEST if ordered else LONGEST_WITHOUT_ORDER
    matrix = user_item_matrix(interactions, task.split.train)
    users_I = np.bincount(matrix.indices, minlength=interactions.item_count)
    inverses = Remembered(lambda options: weights(matrix, options), tuple(option.name for option in WITH_INVERSION))

    def fitted(options: Options) -> Fitted:
        return answering(inverses.of(options), users_I, options, longest)

    def cost_s(options: Options) -> float:
        return 0.0 if inverses.has(options) else inversion_s

    grid = (*cheap, *WITH_INVERSION)
    return tune(task, begin, deadline, fitted, START, grid, VALIDATION_QUERIES, inverses, cost_s=cost_s)


def needs(task: Task) -> Needs:
    """Of inversions. Raises InvalidData where the matrices take more memory than they may."""
    refuse_too_many(task.split.lists, None)
    inversion_s = inversion_seconds(task.split.lists.item_count)
    return Needs(max(LEAST_S, ONCE * inversion_s), ANSWERING_S + SEARCH * inversion_s)


def refuse_too_many(interactions: Interactions, most_bytes: int | None) -> None:
    """Raises InvalidData where two I × I matrices take more memory than they may; None as `ease` says."""
    items = interactions.item_count
    most_bytes = min(MOST_BYTES, available_bytes() // 2) if most_bytes is None else most_bytes
    if 8 * items**2 > most_bytes:
        expected = f"at most {int((most_bytes / 8) ** 0.5)}: EASE's two matrices would take {8 * items**2 / 2**30:.1f} GiB"
        time_ = f"an inversion would take {inversion_seconds(items):,.0f} s"
        raise InvalidData("items", f"{items} items", f"{expected} and may take {most_bytes / 2**30:.1f} GiB; {time_}")


def inversion_seconds(items: int) -> float:
    """About how long an inversion takes here, by a small one; it grows with I³."""
    if items <= PROBE:
        return 0.0
    invert(np.eye(BLOCK, dtype=np.float32))  # the first one starts threads
    found = []
    for _ in range(3):  # the quickest: other programs may have had the cores
        probe = np.eye(PROBE, dtype=np.float32)
        begin = time.perf_counter()
        invert(probe)
        found.append(time.perf_counter() - begin)
    return min(found) * (items / PROBE) ** 3
