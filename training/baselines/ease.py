"""EASE^R: item-to-item weights by ridge regression in closed form (Steck 2019, "Embarrassingly shallow autoencoders for sparse data").

    P = (XᵀX + diag(λ · pop^ridge))⁻¹,   B = −P / diag(P) by columns, 0 on the diagonal
    score(j | history) = pop_j^−column · Σ_{d < L} recency^d · pop_{h_d}^−row · B[h_d, j],   h_0 the last item of the history

X holds, for each training user and each item of the list, |list|^(−user / 2). pop is how many training users have the item. ridge, row,
column and user at 0 and recency at 1 are the paper's model; ridge = a, row = 0 and column = a / 2 are the one whose columns of X, and of
histories, are scaled by pop^(−a/2). Lists without an order have a recency of 1.

Two dense I × I matrices of float32 are in memory: the inverse being computed and the best so far. A trial of λ, ridge or user takes an
inversion, so these come after recency, row and column, which take none. A deadline leaves out the last trials.

Legend: B queries, I items, M results, L items of a history that count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
from scipy import sparse
from scipy.linalg import lapack

from espalier.arrays import Float32, Int64
from espalier.errors import InvalidConfig, InvalidData

from ..baselines.tuned_method import bytes_of, tune
from ..data.interactions import Interactions
from ..data.user_item_matrix import damped_items, user_item_matrix
from ..neighbours.fit import fading
from ..retrieval.needs import LEAST_S, Needs, available_bytes
from ..retrieval.scores import best_then_popular, by_popularity
from ..retrieval.task import Fitted, Task
from ..retrieval.tuning import Option, Options, Remembered

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
"""Most items of a history that count: the latest; without an order, any."""
VALIDATION_QUERIES = 5000
BLOCK = 512
"""Rows of XᵀX made at a time."""
MOST_BYTES = 16 << 30
"""Most bytes of both matrices; they also take at most half of the machine's available memory."""
ONCE, SEARCH = 1.5, 8.0
"""The time of one fit, and of the search over options, in inversions."""
ANSWERING_S = 20.0
"""Seconds in the search over options for answers to validation queries. Unused seconds go to other methods."""
PROBE = 2500
"""Items of the matrix whose inversion is timed."""


def answering(weights_II: Float32, users_I: Int64, options: Options, longest: int) -> Fitted:
    """B with the options that need no inversion. users_I: how many training users an item has.

    Items without training users have no score. If no item of the history has training users, no item has a score.
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
    """float32[I, I]: B, of the binary matrix of training users and items. Computed in place of XᵀX, so it needs one such matrix."""
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
    """Invert a symmetric positive definite matrix in place, by Cholesky. Raises InvalidData if it is not positive definite."""
    _, failed = lapack.spotrf(matrix_II.T, lower=0, clean=0, overwrite_a=1)
    if not failed:
        _, failed = lapack.spotri(matrix_II.T, lower=0, overwrite_c=1)
    if failed:
        raise InvalidData("l2", "a matrix that float32 cannot invert", "a larger one")
    for first in range(0, len(matrix_II), BLOCK):  # LAPACK wrote only the lower triangle
        last = first + BLOCK
        matrix_II[first:last, last:] = matrix_II[last:, first:last].T
        corner = matrix_II[first:last, first:last]
        corner[...] = np.tril(corner) + np.tril(corner, -1).T


def ease(task: Task) -> Fitted:
    """Choose the options on at most VALIDATION_QUERIES validation queries, and fit on all training users.

    Raises InvalidData if the two matrices would take too much memory, InvalidConfig if one inversion would take longer than the task has.
    """
    begin, deadline = time.perf_counter(), task.deadline()
    interactions = task.split.lists
    refuse_too_many(interactions)
    inversion_s = inversion_seconds(interactions.item_count)
    if inversion_s > deadline.left_s():
        raise InvalidConfig(
            "seconds", round(task.seconds or 0, 1), f"at least {inversion_s:.0f} for EASE's inversion of {interactions.item_count} items"
        )
    has_order = interactions.order != "none"
    options_without_inversion, longest = WITHOUT_INVERSION[0 if has_order else 1 :], LONGEST if has_order else LONGEST_WITHOUT_ORDER
    matrix = user_item_matrix(interactions, task.split.train)
    users_I = np.bincount(matrix.indices, minlength=interactions.item_count)
    inverses = Remembered(lambda options: weights(matrix, options), tuple(option.name for option in WITH_INVERSION))

    def fitted(options: Options) -> Fitted:
        return answering(inverses.of(options), users_I, options, longest)

    def cost_s(options: Options) -> float:
        return 0.0 if inverses.has(options) else inversion_s

    grid = (*options_without_inversion, *WITH_INVERSION)
    return tune(task, begin, deadline, fitted, START, grid, VALIDATION_QUERIES, inverses, cost_s=cost_s)


def needs(task: Task) -> Needs:
    """The needs, by the number of inversions. Raises InvalidData if the matrices would take too much memory."""
    refuse_too_many(task.split.lists)
    inversion_s = inversion_seconds(task.split.lists.item_count)
    return Needs(max(LEAST_S, ONCE * inversion_s), ANSWERING_S + SEARCH * inversion_s)


def refuse_too_many(interactions: Interactions) -> None:
    """Raises InvalidData if two I × I matrices would take more than MOST_BYTES or half of the available memory."""
    items = interactions.item_count
    most_bytes = min(MOST_BYTES, available_bytes() // 2)
    if 8 * items**2 > most_bytes:
        expected = f"at most {int((most_bytes / 8) ** 0.5)}: EASE's two matrices would take {8 * items**2 / 2**30:.1f} GiB"
        time_ = f"an inversion would take {inversion_seconds(items):,.0f} s"
        raise InvalidData("items", f"{items} items", f"{expected} and may take {most_bytes / 2**30:.1f} GiB; {time_}")


def inversion_seconds(items: int) -> float:
    """About the seconds of an inversion on this machine, from a small one; the time grows with I³."""
    if items <= PROBE:
        return 0.0
    invert(np.eye(BLOCK, dtype=np.float32))  # the first one starts threads
    times = []
    for _ in range(3):  # the quickest counts: other programs may have used the cores
        probe = np.eye(PROBE, dtype=np.float32)
        begin = time.perf_counter()
        invert(probe)
        times.append(time.perf_counter() - begin)
    return min(times) * (items / PROBE) ** 3
