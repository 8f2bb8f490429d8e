"""The best points of each item so far, as blocks of points come in; kept on disk, so that a killed run can go on.

Legend: I items that are wanted, K points of an item.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidConfig

from ..assign.labelwise import Pairs

MAX_PAIRS = 1 << 26
"""Most items times points times trees. A kept pair takes 12 bytes; while a block is predicted, each tree takes some 100 a pair."""
MERGED_PAIRS = 1 << 18
"""Kept pairs that are merged with a block's at once: memory, and sorting few is faster."""
ALL = slice(None)


class BestPoints:
    """For each wanted item the K points with the highest scores: ties go to the point that came first.

    item_I    int64[I], ascending item rows
    point_IK  int64[I, K], −1 where there is none · score_IK: float32[I, K], descending, −inf there
    """

    def __init__(self, item_I: NDArray[np.int64], per_item: int, trees: int = 1) -> None:
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
        """Take the pairs of the next block, by item, of so many points, whose positions count from the block's first one."""
        row = np.searchsorted(self.item_I, pairs.item)
        better = pairs.score > self.score_IK[row, -1]
        row, point, score = row[better], pairs.point[better] + self.done, pairs.score[better]
        changed = np.unique(row)
        at_once = max(1, MERGED_PAIRS // self.point_IK.shape[1])
        for begin in range(0, len(changed), at_once):
            some = changed[begin : begin + at_once]
            own = slice(*np.searchsorted(row, [some[0], some[-1] + 1]))
            self._merge(some, row[own], point[own], score[own])
        self.done += points

    def _merge(self, changed: NDArray[np.int64], row: NDArray[np.int64], point: NDArray[np.int64], score: NDArray[np.float32]) -> None:
        """Take new points of some rows, which all have one; `row` is ascending."""
        per_item = self.point_IK.shape[1]
        row = np.concatenate([np.repeat(changed, per_item), row])
        point = np.concatenate([self.point_IK[changed].ravel(), point])
        score = np.concatenate([self.score_IK[changed].ravel(), score])
        order = np.lexsort((np.where(point < 0, np.iinfo(np.int64).max, point), -score, row))
        begins = np.searchsorted(row[order], changed)
        best = order[begins[:, None] + np.arange(per_item)]
        self.point_IK[changed], self.score_IK[changed] = point[best], score[best]

    def pairs(self, rows: slice = ALL) -> tuple[Pairs, NDArray[np.int64]]:
        """The pairs of some wanted items, by item, best first, and the place of each, from 1."""
        row, place = np.nonzero(self.point_IK[rows] >= 0)
        return Pairs(self.item_I[rows][row], self.point_IK[rows][row, place], self.score_IK[rows][row, place]), place + 1

    def write(self, file: Path) -> None:
        """Keep the state, all or nothing."""
        unfinished = file.with_suffix(".part")
        try:
            with unfinished.open("wb") as stream:
                np.savez(stream, done=np.array(self.done), point=self.point_IK, score=self.score_IK)
                stream.flush()
                os.fsync(stream.fileno())
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)

    def read(self, file: Path) -> None:
        """Go on from a state that `write` kept for the same items. Raises InvalidConfig."""
        try:
            with np.load(file, allow_pickle=False) as kept:
                done, point, score = int(kept["done"]), kept["point"], kept["score"]
        except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise InvalidConfig("--resume", str(file), f"a readable state ({error}); leave out --resume to start anew") from error
        self.done, self.point_IK, self.score_IK = done, point, score
