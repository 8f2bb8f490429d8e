"""The popularity baseline: every query gets the items that most training users touched."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from espalier.arrays import Int64

from ..data.interactions import Interactions
from ..data.user_item_matrix import users_of_items
from ..retrieval.scores import by_popularity, empty_rows, filled
from ..retrieval.task import Fitted, Task


def rank(popular_I: Int64, histories: Sequence[Int64], m: int, exclude_seen: bool) -> Int64:
    """int64[B, M = m]: the m best items of each history, without its own when `exclude_seen`; NO_ITEM as padding."""
    return filled(empty_rows(len(histories), m), histories, popular_I, exclude_seen)


def most_popular(interactions: Interactions, users: Int64) -> Int64:
    """int64[I]: all item rows, those that most of `users` (pass training users) touched first; repeats of a user count once."""
    return by_popularity(users_of_items(interactions, users))


def popularity(task: Task) -> Fitted:
    begin = time.perf_counter()
    popular_I = most_popular(task.split.lists, task.split.train)
    return Fitted(partial(rank, popular_I), {}, popular_I.nbytes, time.perf_counter() - begin)
