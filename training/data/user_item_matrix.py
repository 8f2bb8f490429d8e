"""The sparse user–item matrix of some users (scipy.sparse), from which neighbours and embeddings are computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import sparse

from espalier.arrays import Bool, Float64, Int32, Int64
from espalier.compiled_code import compiled

from ..data.interactions import Interactions


def user_item_matrix(interactions: Interactions, users: Int64) -> sparse.csr_array[np.float64]:
    """float64[len(users), I]: 1 if the user touched the item, however often, else 0; columns ascending in each row."""
    start, length = interactions.offset_U1[users], np.diff(interactions.offset_U1)[users]
    offset = np.concatenate([[0], np.cumsum(length)]).astype(np.int64)
    within = np.arange(offset[-1]) - np.repeat(offset[:-1], length)
    items = np.asarray(interactions.item_of_event_E)[np.repeat(start, length) + within]
    matrix = sparse.csr_array((np.ones(len(items)), items, offset), shape=(len(users), interactions.item_count))
    matrix.sum_duplicates()
    matrix.data[:] = 1.0
    return matrix


def latest_items(histories: Sequence[Int64], weight_L: Float64, items: int) -> sparse.csr_array[np.float32]:
    """float32[len(histories), I]: the weights of each history's last L items, weight_L[0] for the last one.

    An item that a history has twice is stored twice; products of the matrix add its weights.
    """
    latest = [history[::-1][: len(weight_L)] for history in histories]
    offset = np.concatenate([[0], np.cumsum([len(rows) for rows in latest])])
    weights = np.concatenate([np.zeros(0), *(weight_L[: len(rows)] for rows in latest)]).astype(np.float32)
    return sparse.csr_array((weights, np.concatenate([np.zeros(0, np.int64), *latest]), offset), shape=(len(latest), items))


def damped_items(histories: Sequence[Int64], weight_L: Float64, row_I: Float64, known_I: Bool) -> tuple[sparse.csr_array[np.float32], Bool]:
    """float32[B, I], `latest_items` times row_I; and bool[B], whether some item of a history is among known_I."""
    history_BI = latest_items(histories, weight_L, len(row_I))
    known_B = history_BI.astype(np.bool_) @ known_I
    history_BI.data *= row_I[history_BI.indices].astype(np.float32)
    return history_BI, known_B


def users_of_items(interactions: Interactions, users: Int64) -> Int64:
    """int64[I]: how many of `users` touched each item; repeats of a user count once."""
    return np.bincount(user_item_matrix(interactions, users).indices, minlength=interactions.item_count)


def events_of_items(interactions: Interactions, users: Int64) -> Float64:
    """float64[I]: how many events of `users` each item has."""
    count_I = np.zeros(interactions.item_count, np.int64)
    begin_U, end_U = interactions.offset_U1[users], interactions.offset_U1[users + 1]
    _add_events(interactions.item_of_event_E, begin_U, end_U, count_I)
    return count_I.astype(np.float64)


@compiled()
def _add_events(item_E: Int32, begin_U: Int64, end_U: Int64, count_I: Int64) -> None:
    for user in range(len(begin_U)):
        for event in range(begin_U[user], end_U[user]):
            count_I[item_E[event]] += 1
