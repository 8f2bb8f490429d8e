"""The recall-versus-latency frontier of a sweep: a plot of recall@m against p99, and the best beam within a latency budget.

Knows measured points. Does not know how they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""The palette of Okabe and Ito, which colour-blind people can tell apart."""
MARKERS = "os^Dv<"
LOG_RATIO = 8.0
"""If the largest p99 is so many times the smallest, the axis is logarithmic."""

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


def plot_frontier(points: Sequence[Point], proposals: Sequence[Proposal], title: str, files: Sequence[Path]) -> None:
    """Draw once and save to every file (PNG or SVG by its suffix): a line per m and loop, a point per beam size.

    If no point has a recall, the vertical axis shows the beam size. A dotted line is a budget. The best beams within it are ringed, of the
    open loop if there is one.
    """
    import matplotlib
    from matplotlib.figure import Figure

    answered_points = [point for point in points if point.p99_ms > 0]
    recall_points = [point for point in answered_points if point.recall is not None]
    budgets_ms = sorted({proposal.budget_ms for proposal in proposals})
    with matplotlib.rc_context({"svg.hashsalt": "frontier", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 6.5), layout="constrained")
        axes = figure.subplots()
        _draw(axes, recall_points or answered_points, bool(recall_points), proposals)
        _axes(axes, recall_points or answered_points, budgets_ms, bool(recall_points))
        figure.suptitle(title, fontsize=12)
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)


def _draw(axes: Axes, points: Sequence[Point], by_recall: bool, proposals: Sequence[Proposal]) -> None:
    ms = sorted({point.m for point in points})
    colour = {m: COLOURS[i % len(COLOURS)] for i, m in enumerate(ms)}
    for i, m in reversed(list(enumerate(ms))):  # the legend lists the lines from top to bottom
        for loop in ("open", "closed"):
            line = sorted((point for point in points if (point.m, point.loop) == (m, loop)), key=lambda point: point.beam_size)
            is_open = loop == "open"
            axes.plot(
                [point.p99_ms for point in line],
                [_height(point, by_recall) for point in line],
                linestyle="-" if is_open else "--",
                linewidth=1.6 if is_open else 1.0,
                markersize=5.5,
                color=colour[m],
                marker=MARKERS[i % len(MARKERS)],
                markerfacecolor=colour[m] if is_open else "white",
                label=f"{f'recall@{m}' if by_recall else f'm {m}'}, {'under load' if is_open else 'one client'}",
            )
    for point in points:
        xy = (point.p99_ms, _height(point, by_recall))
        axes.annotate(str(point.beam_size), xy, xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8, color=colour[point.m])
    ringed_loop = "open" if any(proposal.loop == "open" for proposal in proposals) else "closed"
    for best in (proposal.best for proposal in proposals if proposal.loop == ringed_loop and proposal.best is not None):
        xy = (best.p99_ms, _height(best, by_recall))
        axes.plot(*xy, "o", markersize=12, markerfacecolor="none", markeredgecolor=colour[best.m], zorder=4)


def _height(point: Point, by_recall: bool) -> float:
    return point.recall if by_recall and point.recall is not None else float(point.beam_size)


def _axes(axes: Axes, points: Sequence[Point], budgets_ms: Sequence[float], by_recall: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    latencies = [*(point.p99_ms for point in points), *budgets_ms]
    if points and max(latencies) / min(latencies) >= LOG_RATIO:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
    for budget_ms in budgets_ms:
        axes.axvline(budget_ms, color="0.45", linewidth=1.0, linestyle=":", zorder=1)
        axes.annotate(f"{budget_ms:g} ms", (budget_ms, 1), xycoords=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=8.5)
    axes.margins(x=0.06, y=0.09)
    axes.set_xlabel("p99 of a request's wall time, ms (numbers at the points: beam size)")
    axes.set_ylabel("recall@m" if by_recall else "beam size (no query has relevant items)")
    axes.grid(which="major", alpha=0.25)
    if points:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
