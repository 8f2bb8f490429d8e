"""Proposes the best beam within a latency budget.

Knows measured points. Does not know how they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_FAILED_SHARE = 0.01
"""A point with a larger share of failed requests is not proposed: its percentiles cover only the answered requests."""


@dataclass(frozen=True)
class Point:
    """One row of a sweep: a beam size at one m under one loop. recall: None if no query has relevant items."""

    beam_size: int
    m: int
    loop: str
    recall: float | None
    p99_ms: float
    requests_per_s: float
    samples: int
    failed_share: float = 0.0


@dataclass(frozen=True)
class Proposal:
    """The best point within a budget at one m under one loop, or None. fastest: of all usable points; None if there are none."""

    budget_ms: float
    m: int
    loop: str
    best: Point | None
    fastest: Point | None


def propose(points: Sequence[Point], budget_ms: float) -> list[Proposal]:
    """For every m and loop, the point with the largest recall and p99 ≤ budget; sorted by m, the open loop first.

    Equal recalls: the faster point. Without any recall: the largest beam, because a larger beam finds more.
    """
    proposals = []
    for m, loop in sorted({(point.m, point.loop) for point in points}, key=lambda pair: (pair[0], pair[1] != "open")):
        usable = [point for point in points if (point.m, point.loop) == (m, loop) and point.p99_ms >= 0]  # false for NaN
        usable = [point for point in usable if point.failed_share <= MAX_FAILED_SHARE]
        comparable = [point for point in usable if point.recall is not None] or usable
        best = max((point for point in comparable if point.p99_ms <= budget_ms), key=_preference, default=None)
        proposals.append(Proposal(budget_ms, m, loop, best, min(usable, key=lambda point: point.p99_ms, default=None)))
    return proposals


def _preference(point: Point) -> tuple[float, float]:
    return (float(point.beam_size), 0.0) if point.recall is None else (point.recall, -point.p99_ms)
