"""The evaluation protocol of TDM, JTM and OTM: held-out users, and the halves of their lists.

Knows interactions and seeds. Does not know models or metrics. By hand: the cuts are two lines, and
scikit-learn's splitters would give other users for the same seed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidConfig
from training.data.interactions import Interactions

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """int64 user rows, ascending; every user is in exactly one part."""

    train: Int64
    validation: Int64
    test: Int64


@dataclass(frozen=True)
class EvaluationPair:
    """One held-out query: int64 item rows of the history (oldest first) and of what came after; neither is empty."""

    user: int
    history: Int64
    relevant: Int64


def split_users(interactions: Interactions, test_share: float = 0.1, validation_share: float = 0.1, *, seed: int) -> Split:
    """Users at random: the first ⌊share · U⌋ of one seeded permutation are test users, the next validation users, the rest train."""
    for name, share in (("test_share", test_share), ("validation_share", validation_share)):
        if not 0 <= share < 1:
            raise InvalidConfig(name, share, "at least 0 and below 1")
    if test_share + validation_share >= 1:
        raise InvalidConfig("validation_share", validation_share, f"less than {1 - test_share:g}, so that training users remain")
    users = interactions.user_count
    shuffled = np.random.default_rng(seed).permutation(users).astype(np.int64)
    test, validation = int(test_share * users), int(validation_share * users)
    parts = np.split(shuffled, [test, test + validation])
    return Split(test=np.sort(parts[0]), validation=np.sort(parts[1]), train=np.sort(parts[2]))


def halves(interactions: Interactions, users: Int64, *, seed: int) -> list[EvaluationPair]:
    """Each user's list cut in the middle (mid = ⌊length / 2⌋): the first half is the query, the whole second half is relevant.

    Repeats stay, as in the published preparation; the metrics decide whether they count. Lists without an order are shuffled first,
    by a permutation that depends on the seed and the user only. Users whose list is too short for two halves are skipped.
    """
    pairs = []
    for user in users.tolist():
        items = interactions.of(user)
        if interactions.order == "none":
            items = np.random.default_rng([seed, user]).permutation(items)
        middle = len(items) // 2
        if middle:
            pairs.append(EvaluationPair(user, items[:middle], items[middle:]))
    return pairs


def without_seen(pairs: Iterable[EvaluationPair]) -> list[EvaluationPair]:
    """The same pairs with the history's items taken out of `relevant`; a pair with nothing left is dropped.

    For models that never return what the history holds (`exclude_seen`): without this they could not reach full recall. TDM's filtered
    rows are measured so; its unfiltered rows, JTM and OTM are measured on the pairs as they are.
    """
    unseen = (EvaluationPair(pair.user, pair.history, pair.relevant[~np.isin(pair.relevant, pair.history)]) for pair in pairs)
    return [pair for pair in unseen if len(pair.relevant)]
