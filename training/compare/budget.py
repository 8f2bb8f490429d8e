"""How the wall-clock time of a comparison is divided among methods that are fitted one after another.

Quick methods come first and may take a part of the time together; what is left is divided among the trained ones, and every method leaves
what it did not need to those after it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from training.compare.contest import FUSION, QUICK, RECIPE

QUICK_SHARE = 0.3
"""The most that quick methods take together, where there are others."""
MEASURING_SHARE = 0.15
"""Of a method's time, for answering test queries and for timing."""
WEIGHTS = {"ease": 2.0, RECIPE: 3.0, FUSION: 0.3}
"""Parts of what is left for methods of a sort, where they are not 1. EASE needs the time of one inversion or is left out. A tree that ends
early is judged too low, and the question is about the tree. A fusion tries few weights, but answers by two methods."""
LEAST_S = 1.0


class Budget:
    """Seconds for each method, by what is left when it begins."""

    def __init__(self, seconds: float | None, methods: Sequence[str]) -> None:
        """methods  in the order in which they will be fitted: quick ones first (`in_order`)"""
        begin = time.monotonic()
        self._end_s = None if seconds is None else begin + seconds
        self._quick_end_s = None if seconds is None else begin + seconds * (QUICK_SHARE if any(m not in QUICK for m in methods) else 1)
        self._waiting = list(methods)

    def seconds(self, method: str) -> float | None:
        """For choosing and training this method, which is the next one; None: as long as it takes."""
        waiting = self._waiting[self._waiting.index(method) :]
        self._waiting = waiting[1:]
        if self._end_s is None or self._quick_end_s is None:
            return None
        quick = method in QUICK
        left_s = (self._quick_end_s if quick else self._end_s) - time.monotonic()
        weights = {name: _weight(name) for name in waiting if (name in QUICK) == quick}
        return max(LEAST_S, (1 - MEASURING_SHARE) * left_s * weights[method] / sum(weights.values()))


def _weight(method: str) -> float:
    return WEIGHTS.get(method.split(":")[0], 1.0)
