"""The popularity baseline: every query gets the items that most training users touched."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.arrays import Int64

from ..data.interactions import Interactions
from ..data.user_item_matrix import users_of_items
from ..retrieval.scores import by_popularity, empty_rows, filled
from ..retrieval.task import Fitted, Task


@dataclass(frozen=True)
class Popularity:
    """best_I: int64[I], all item rows, most popular first; ties by the lower row."""

    best_I: Int64

    def rank(self, histories: Sequence[Int64], m: int, exclude_seen: bool) -> Int64:
        """int64[B, M = m]: the m best items of each history, without its own when `exclude_seen`; NO_ITEM as padding."""
        return filled(empty_rows(len(histories), m), histories, self.best_I, exclude_seen)


def fit_popularity(interactions: Interactions, users: Int64) -> Popularity:
    """Counts how many of `users` (pass training users) touched each item; repeats of a user count once."""
    return Popularity(by_popularity(users_of_items(interactions, users)))


def popularity(task: Task) -> Fitted:
    begin = time.perf_counter()
    fitted = fit_popularity(task.split.lists, task.split.train)
    return Fitted(fitted.rank, {}, fitted.best_I.nbytes, time.perf_counter() - begin)
