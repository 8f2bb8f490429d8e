"""Training instances: users' lists cut into a query and its targets.

Knows interactions and cut points. Does not know trees or objectives. Batch number s of a run depends on (seed, s) only, so a
resumed run continues exactly as an uninterrupted one.

Legend: B instances, T history, F numbers of a vector, P targets, X positions in a list, E events of the longest drawn list.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from espalier.arrays import Float32, Int64
from espalier.errors import InvalidData

from ..data.interactions import Interactions
from ..specification.deep import InstanceConfig

QueryRows = Int64 | Float32
"""Queries before the model: int64[B, T] item rows of histories, −1 = padding in front, or float32[B, F] vectors."""


@dataclass(frozen=True)
class Instances:
    """A batch.

    query      int64[B, T]: a history's item rows, newest last, −1 in front where there are fewer; or float32[B, F]: vectors
    target_BP  int64[B, P]: item rows, −1 where there are fewer; repeats are possible
    """

    query: QueryRows
    target_BP: Int64


class InstanceSource:
    """Draws batches from the lists of `users` (int64 rows) with at least two events, or from queries of vectors."""

    def __init__(self, interactions: Interactions, users: Int64, config: InstanceConfig, seed: int) -> None:
        noun, minimum = ("users", "two events or more") if interactions.vectors_UF is None else ("queries", "an item")
        self.users = users[np.diff(interactions.offset_U1)[users] >= (2 if interactions.vectors_UF is None else 1)]
        if len(self.users) == 0:
            raise InvalidData("log", f"{len(users)} training {noun}", f"at least one with {minimum}")
        self.interactions, self.config, self.seed = interactions, config, seed
        self.length = sum(config.windows)

    def batch(self, step: int, size: int) -> Instances:
        """The batch of one step: users drawn uniformly with replacement."""
        rng = np.random.default_rng([self.seed, 1, step])
        users = rng.choice(self.users, size)
        start_B = self.interactions.offset_U1[users]
        length_B = self.interactions.offset_U1[users + 1] - start_B
        if self.interactions.vectors_UF is not None:
            position_BP = target_positions(rng, np.zeros(size, np.int64), length_B, self.config.targets)
            items_BP = self.interactions.item_of_event_E[start_B[:, None] + np.maximum(position_BP, 0)]
            return Instances(np.asarray(self.interactions.vectors_UF[users]), np.where(position_BP >= 0, items_BP, -1).astype(np.int64))
        cut_B = length_B // 2 if self.config.split == "half" else 1 + (rng.random(size) * (length_B - 1)).astype(np.int64)
        cut_B = np.where(rng.random(size) < self.config.cold_share, 0, cut_B)
        history_BT = cut_B[:, None] + np.arange(-self.length, 0)
        target_BP = cut_B[:, None] if self.config.targets == 1 else target_positions(rng, cut_B, length_B, self.config.targets)
        position_BX = np.concatenate([history_BT, target_BP], axis=1)
        items_BX = np.where(position_BX >= 0, self._items(rng, start_B, length_B, np.maximum(position_BX, 0)), -1)
        return Instances(items_BX[:, : self.length], items_BX[:, self.length :])

    def _items(self, rng: np.random.Generator, start_B: Int64, length_B: Int64, position_BX: Int64) -> Int64:
        """int64[B, X]: the items at positions of the users' lists, which are shuffled first if the log has no order."""
        events = self.interactions.item_of_event_E
        if self.interactions.order != "none":
            return np.asarray(events[start_B[:, None] + position_BX], np.int64)
        position_E = np.arange(length_B.max())
        is_event_BE = position_E < length_B[:, None]
        key_BE = np.where(is_event_BE, rng.random(is_event_BE.shape), 2.0)
        shuffled_BE = np.argsort(key_BE, axis=1)
        return np.asarray(events[start_B[:, None] + np.take_along_axis(shuffled_BE, position_BX, 1)], np.int64)


def target_positions(rng: np.random.Generator, cut_B: Int64, length_B: Int64, count: int) -> Int64:
    """int64[B, P]: positions after the cut, −1 = none; if there are more than `count`, a systematic sample of them."""
    remaining_B1 = (length_B - cut_B)[:, None]
    slot_P = np.arange(min(count, int(remaining_B1.max())))
    drawn_BP = ((slot_P + rng.random((len(cut_B), 1))) * remaining_B1 / count).astype(np.int64)  # all positions equally likely, no repeats
    offset_BP = np.where(remaining_B1 <= count, slot_P, drawn_BP)
    return np.where(offset_BP < remaining_B1, cut_B[:, None] + offset_BP, -1)
