"""Training instances: users' lists cut into a query and its targets.

Knows interactions and cut points. Does not know trees or objectives. Batch number s of a run depends on (seed, s) only, so that a
resumed run goes on exactly as it would have.

Legend: B instances, T history, P targets, E events of the drawn users.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidData
from training.config import InstanceConfig
from training.data.interactions import Interactions

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Instances:
    """A batch.

    history_BT  int64[B, T]: item rows, newest last, −1 in front where there are fewer
    target_BP   int64[B, P]: item rows, −1 where there are fewer; repeats are possible
    """

    history_BT: Int64
    target_BP: Int64


class InstanceSource:
    """Draws batches from the lists of some users (int64 rows), those with at least two events."""

    def __init__(self, interactions: Interactions, users: Int64, config: InstanceConfig, seed: int) -> None:
        length = np.diff(interactions.offset_U1)
        self.users = users[length[users] >= 2]
        if len(self.users) == 0:
            raise InvalidData("log", f"{len(users)} training users", "at least one with two events or more")
        self.interactions, self.config, self.seed = interactions, config, seed
        self.length = sum(config.windows)

    def batch(self, step: int, size: int) -> Instances:
        """The batch of one step: users drawn uniformly with replacement."""
        rng = np.random.default_rng([self.seed, 1, step])
        users = rng.choice(self.users, size)
        start_B = self.interactions.offset_U1[users]
        length_B = self.interactions.offset_U1[users + 1] - start_B
        lists_BE = self._lists(rng, start_B, length_B)
        cut_B = length_B // 2 if self.config.split == "half" else 1 + (rng.random(size) * (length_B - 1)).astype(np.int64)
        cut_B = np.where(rng.random(size) < self.config.cold_share, 0, cut_B)
        behind_T = np.arange(-self.length, 0)
        place_BT = cut_B[:, None] + behind_T
        history_BT = np.where(place_BT >= 0, np.take_along_axis(lists_BE, np.maximum(place_BT, 0), 1), -1)
        return Instances(history_BT, self._targets(rng, lists_BE, cut_B, length_B))

    def _lists(self, rng: np.random.Generator, start_B: Int64, length_B: Int64) -> Int64:
        """int64[B, E]: the users' lists, shuffled where the log has no order; what lies past a list's end means nothing."""
        place_E = np.arange(length_B.max())
        inside_BE = place_E < length_B[:, None]
        lists_BE = self.interactions.item_of_event_E[np.where(inside_BE, start_B[:, None] + place_E, 0)].astype(np.int64)
        if self.interactions.order == "none":
            key_BE = np.where(inside_BE, rng.random(lists_BE.shape), 2.0)
            lists_BE = np.take_along_axis(lists_BE, np.argsort(key_BE, axis=1), 1)
        return lists_BE

    def _targets(self, rng: np.random.Generator, lists_BE: Int64, cut_B: Int64, length_B: Int64) -> Int64:
        """All items after the cut, or `targets` of them: the next one, or one at random from each of equal stretches."""
        wanted = self.config.targets
        rest_B = length_B - cut_B
        if wanted == 1:
            return np.take_along_axis(lists_BE, cut_B[:, None], 1)
        slot_P = np.arange(min(wanted, int(rest_B.max())))
        stretch_BP = (slot_P + rng.random((len(cut_B), len(slot_P)))) * (rest_B / wanted)[:, None]
        offset_BP = np.where((rest_B <= wanted)[:, None], slot_P, np.minimum(stretch_BP.astype(np.int64), rest_B[:, None] - 1))
        real_BP = offset_BP < rest_B[:, None]
        place_BP = np.where(real_BP, cut_B[:, None] + offset_BP, 0)
        return np.where(real_BP, np.take_along_axis(lists_BE, place_BP, 1), -1)
