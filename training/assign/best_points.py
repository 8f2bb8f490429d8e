"""The best points of each item over the blocks of points so far. The state can be written to disk, so that a killed run can go on.

Legend: I eligible items, K points of an item.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from espalier.arrays import Float32, Int64
from espalier.durable import atomic_write
from espalier.errors import InvalidConfig

from ..assign.labelwise import Pairs

MAX_PAIRS = 1 << 26
"""Most items times points times trees. A stored pair takes 12 bytes; while a block is predicted, each tree takes some 100 a pair."""
MERGED_PAIRS = 1 << 18
"""Stored pairs that are merged with a block's at once. This bounds memory, and sorting fewer pairs is faster."""
ALL = slice(None)


class BestPoints:
    """For each eligible item the K points with the highest scores. At ties the earlier point wins.

    item_I    int64[I], ascending item rows
    point_IK  int64[I, K], −1 for no point
    score_IK  float32[I, K], descending, −inf for no point
    """

    def __init__(self, item_I: Int64, per_item: int, trees: int = 1) -> None:
        if len(item_I) * per_item * trees > MAX_PAIRS:
            most = (
                f"at most {MAX_PAIRS // (len(item_I) * trees)} for {len(item_I)} items and {trees} trees: a --filter makes the items fewer"
            )
            raise InvalidConfig("--per-item", per_item, most)
        self.item_I = item_I
        self.point_IK = np.full((len(item_I), per_item), -1, np.int64)
        self.score_IK = np.full((len(item_I), per_item), -np.inf, np.float32)
        self.done = 0

    def add(self, pairs: Pairs, points: int) -> None:
        """Add the pairs of the next block of so many points. Pairs are sorted by item; point positions count from the block's first."""
        row = np.searchsorted(self.item_I, pairs.item)
        is_better = pairs.score > self.score_IK[row, -1]
        row, point, score = row[is_better], pairs.point[is_better] + self.done, pairs.score[is_better]
        changed = np.unique(row)
        rows_at_once = max(1, MERGED_PAIRS // self.point_IK.shape[1])
        for begin in range(0, len(changed), rows_at_once):
            rows = changed[begin : begin + rows_at_once]
            entries = slice(*np.searchsorted(row, [rows[0], rows[-1] + 1]))
            self._merge(rows, row[entries], point[entries], score[entries])
        self.done += points

    def _merge(self, rows: Int64, row: Int64, point: Int64, score: Float32) -> None:
        """Add points to `rows`, each of which has a new one. `row` is the ascending row of each point."""
        per_item = self.point_IK.shape[1]
        row = np.concatenate([np.repeat(rows, per_item), row])
        point = np.concatenate([self.point_IK[rows].ravel(), point])
        score = np.concatenate([self.score_IK[rows].ravel(), score])
        order = np.lexsort((np.where(point < 0, np.iinfo(np.int64).max, point), -score, row))
        begins = np.searchsorted(row[order], rows)
        best = order[begins[:, None] + np.arange(per_item)]
        self.point_IK[rows], self.score_IK[rows] = point[best], score[best]

    def pairs(self, rows: slice = ALL) -> tuple[Pairs, Int64]:
        """The pairs of some items, by item, best first, and the rank of each within its item, from 1."""
        row, k = np.nonzero(self.point_IK[rows] >= 0)
        return Pairs(self.item_I[rows][row], self.point_IK[rows][row, k], self.score_IK[rows][row, k]), k + 1

    def write(self, file: Path) -> None:
        """Write the state, all or nothing."""
        with atomic_write(file) as part, part.open("wb") as stream:
            np.savez(stream, done=np.array(self.done), point=self.point_IK, score=self.score_IK)

    def read(self, file: Path) -> None:
        """Continue from a state that `write` wrote for the same items. Raises InvalidConfig."""
        try:
            with np.load(file, allow_pickle=False) as state:
                done, point, score = int(state["done"]), state["point"], state["score"]
        except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise InvalidConfig("--resume", str(file), f"a readable state ({error}); leave out --resume to start anew") from error
        self.done, self.point_IK, self.score_IK = done, point, score
