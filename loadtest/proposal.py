"""Which beam a latency budget buys.

Knows measured points. Does not know how they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_FAILED_SHARE = 0.01
"""A point of which more requests failed than this is not proposed: its percentiles are those of the answered ones alone."""


@dataclass(frozen=True)
class Point:
    """One row of a sweep: a beam size at one m under one loop. recall is None where no query has relevant items."""

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
    """What a budget buys at one m under one loop: the best point within it, or None and the fastest of all (None where none answered)."""

    budget_ms: float
    m: int
    loop: str
    best: Point | None
    fastest: Point | None


def propose(points: Sequence[Point], budget_ms: float) -> list[Proposal]:
    """For every m and loop, the point of the largest recall with p99 ≤ budget; by m, the open loop first.

    Of equal recalls the faster one; without any recall the largest beam, since recall is what beams are for.
    """
    proposals = []
    for m, loop in sorted({(point.m, point.loop) for point in points}, key=lambda pair: (pair[0], pair[1] != "open")):
        usable = [point for point in points if (point.m, point.loop) == (m, loop) and point.p99_ms >= 0]  # false for NaN
        usable = [point for point in usable if point.failed_share <= MAX_FAILED_SHARE]
        measured = [point for point in usable if point.recall is not None] or usable
        within = [point for point in measured if point.p99_ms <= budget_ms]
        proposals.append(
            Proposal(
                budget_ms, m, loop, max(within, key=_preference, default=None), min(usable, key=lambda point: point.p99_ms, default=None)
            )
        )
    return proposals


def _preference(point: Point) -> tuple[float, float]:
    return (float(point.beam_size), 0.0) if point.recall is None else (point.recall, -point.p99_ms)
