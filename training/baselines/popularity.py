"""The popularity baseline: every query gets the items that most training users touched."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidConfig
from espalier.search import NO_ITEM
from training.data.interactions import Interactions
from training.data.user_item_matrix import user_item_matrix

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Popularity:
    """best_I: int64[I], all item rows, most popular first; ties by the lower row."""

    best_I: Int64

    def rank(self, histories: list[Int64], m: int, exclude_seen: bool) -> Int64:
        """int64[B, M = m]: the m best items of each history, without its own when `exclude_seen`; NO_ITEM as padding."""
        if m < 1:
            raise InvalidConfig("m", m, "at least 1")
        rows_BM = np.full((len(histories), m), NO_ITEM, np.int64)
        for row, history in zip(rows_BM, histories, strict=True):
            best = self.best_I[: m + len(history)] if exclude_seen else self.best_I[:m]
            if exclude_seen:
                best = best[~np.isin(best, history)][:m]
            row[: len(best)] = best
        return rows_BM


def fit_popularity(interactions: Interactions, users: Int64) -> Popularity:
    """Counts how many of `users` (pass training users) touched each item; repeats of a user count once."""
    matrix = user_item_matrix(interactions, users)
    users_of_item = np.bincount(matrix.indices, minlength=interactions.item_count)
    return Popularity(np.argsort(-users_of_item, kind="stable").astype(np.int64))
