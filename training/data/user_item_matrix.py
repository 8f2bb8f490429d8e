"""The sparse user–item matrix of some users (scipy.sparse), from which neighbours and embeddings are computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import sparse

from espalier.arrays import Array, Bool, Float64, Int32, Int64
from espalier.compiled_code import compiled

from ..data.interactions import Interactions


def user_item_matrix(interactions: Interactions, users: Int64) -> sparse.csr_array[np.float64]:
    """float64[len(users), I]: 1 if the user touched the item, however often, else 0; columns ascending in each row."""
    offset_U1, item_N = items_of(interactions, users)
    matrix = sparse.csr_array((np.ones(len(item_N)), item_N, offset_U1), shape=(len(users), interactions.item_count))
    matrix.sort_indices()
    return matrix


def items_of(interactions: Interactions, users: Int64) -> tuple[Int64, Int32]:
    """offset_U1 and item_N: the distinct items of each user, in the order of their first events."""
    begin_U, end_U = interactions.offset_U1[users], interactions.offset_U1[users + 1]
    item_N = np.empty(int((end_U - begin_U).sum()), np.int32)
    offset_U1 = np.zeros(len(users) + 1, np.int64)
    last_I = np.full(interactions.item_count, -1, np.int32)
    used = _distinct(np.asarray(interactions.item_of_event_E), begin_U, end_U, last_I, offset_U1, item_N)
    return offset_U1, item_N[:used]


@compiled()
def _distinct(item_E: Array, begin_U: Array, end_U: Array, last_I: Array, offset_U1: Array, item_N: Array) -> int:
    """Fills offset_U1 and item_N, and returns how many pairs there are. last_I: −1, then the last user of each item."""
    used = 0
    for user in range(len(begin_U)):
        for event in range(begin_U[user], end_U[user]):
            item = item_E[event]
            if last_I[item] != user:
                last_I[item] = user
                item_N[used] = item
                used += 1
        offset_U1[user + 1] = used
    return used


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
    return np.bincount(items_of(interactions, users)[1], minlength=interactions.item_count)


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
