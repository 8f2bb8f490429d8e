"""The recall-versus-latency frontier of a sweep as a picture: recall@m against p99, a line per m and loop, a point per beam size.

Knows points and proposals. Does not know how they were measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .proposal import Point, Proposal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe and Ito's, which colour-blind people tell apart."""
MARKERS = "os^Dv<"
WIDE = 8.0
"""From this ratio of the largest p99 to the smallest, the axis is logarithmic."""
OFFSETS = tuple(
    (radius * math.cos(math.radians(angle)), radius * math.sin(math.radians(angle)))
    for radius in (11, 15, 20)
    for angle in (90, 270, 45, 135, 315, 225, 0, 180)
)
"""Where a label may sit, in points from its point, best first."""


def plot_frontier(points: Sequence[Point], proposals: Sequence[Proposal], title: str, files: Sequence[Path]) -> None:
    """Draw once, save to every file (PNG or SVG by its suffix).

    Where no point has a recall, the beam size takes its place. The beams that budgets buy are those of the open loop where there is one.
    """
    import matplotlib
    from matplotlib.figure import Figure

    shown = [point for point in points if point.p99_ms > 0]
    by_recall = [point for point in shown if point.recall is not None]
    with matplotlib.rc_context({"svg.hashsalt": "frontier", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 6.5), layout="constrained")
        axes = figure.subplots()
        _draw(figure, axes, by_recall or shown, bool(by_recall), proposals, title)
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)


def _draw(figure: Figure, axes: Axes, points: Sequence[Point], by_recall: bool, proposals: Sequence[Proposal], title: str) -> None:
    ms = sorted({point.m for point in points})
    colour = {m: COLOURS[i % len(COLOURS)] for i, m in enumerate(ms)}
    for i, m in reversed(list(enumerate(ms))):  # as the lines lie, from above
        for loop in ("open", "closed"):
            line = sorted((point for point in points if (point.m, point.loop) == (m, loop)), key=lambda point: point.beam_size)
            opened = loop == "open"
            axes.plot(
                [point.p99_ms for point in line],
                [_height(point, by_recall) for point in line],
                linestyle="-" if opened else "--",
                linewidth=1.6 if opened else 1.0,
                markersize=5.5,
                color=colour[m],
                marker=MARKERS[i % len(MARKERS)],
                markerfacecolor=colour[m] if opened else "white",
                label=f"{f'recall@{m}' if by_recall else f'm {m}'}, {'under load' if opened else 'one client'}",
            )
    budgets_ms = sorted({proposal.budget_ms for proposal in proposals})
    _axes(axes, points, budgets_ms, by_recall)
    for budget_ms in budgets_ms:
        axes.axvline(budget_ms, color="0.45", linewidth=1.0, linestyle=":", zorder=1)
    counted = "open" if any(proposal.loop == "open" for proposal in proposals) else "closed"
    best = [proposal for proposal in proposals if proposal.loop == counted]
    for proposal in best:
        if proposal.best is not None:
            at = (proposal.best.p99_ms, _height(proposal.best, by_recall))
            axes.plot(*at, "o", markersize=12, markerfacecolor="none", markeredgecolor=colour[proposal.m], zorder=4)
    if points:
        if {proposal.loop for proposal in proposals} == {"open", "closed"}:
            title += "\nbeams that a p99 budget buys: under load / with one client"
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12)
    figure.draw_without_rendering()  # texts can only be kept apart where they will be
    _above(figure, axes, budgets_ms, proposals, colour)
    figure.draw_without_rendering()
    _label(figure, axes, points, by_recall, {proposal.best for proposal in best}, colour)


def _height(point: Point, by_recall: bool) -> float:
    return point.recall if by_recall and point.recall is not None else float(point.beam_size)


def _axes(axes: Axes, points: Sequence[Point], budgets_ms: Sequence[float], by_recall: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    latencies = [*(point.p99_ms for point in points), *budgets_ms]
    if points and max(latencies) / min(latencies) >= WIDE:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
    axes.margins(x=0.06, y=0.09)
    axes.set_xlabel("p99 of a request's wall time, ms (numbers at the points: beam size)")
    axes.set_ylabel("recall@m" if by_recall else "beam size (no query has relevant items)")
    axes.grid(which="major", alpha=0.25)


def _above(figure: Figure, axes: Axes, budgets_ms: Sequence[float], proposals: Sequence[Proposal], colour: dict[int, str]) -> None:
    """Above each budget's line: the budget, and the beams that it buys at each m, in the m's colour: under load / with one client.

    Neighbours without room go higher.
    """
    height = 11.0 * (len(colour) + 1) + 4
    ends: list[float] = []  # in points, of each tier of texts
    for budget_ms in budgets_ms:
        rows: list[tuple[str, str]] = []
        for m in sorted(colour):
            bought = {
                p.loop: "none" if p.best is None else str(p.best.beam_size) for p in proposals if (p.budget_ms, p.m) == (budget_ms, m)
            }
            if bought:
                rows.append((f"@{m}: {' / '.join(bought[loop] for loop in ('open', 'closed') if loop in bought)}", colour[m]))
        rows.append((f"p99 ≤ {budget_ms:g} ms", "0.2"))
        half = 2.9 * max(len(text) for text, _ in rows) + 3
        x = axes.transData.transform((budget_ms, 1))[0] * 72 / figure.dpi
        tier = next((i for i, end in enumerate(ends) if end < x - half), len(ends))
        ends[tier : tier + 1] = [x + half]
        for i, (text, shade) in enumerate(rows):
            axes.annotate(
                text,
                (budget_ms, 1),
                xycoords=axes.get_xaxis_transform(),
                xytext=(0, 5 + 11 * i + height * tier),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
                color=shade,
                fontweight="bold" if i == len(rows) - 1 else "normal",
            )


def _label(figure: Figure, axes: Axes, points: Sequence[Point], by_recall: bool, ringed: set[Point | None], colour: dict[int, str]) -> None:
    """The beam size beside each point: where it covers nothing, else not at all. Points under load come first."""
    import numpy as np
    from matplotlib.transforms import Bbox

    scale = figure.dpi / 72
    at = [axes.transData.transform((point.p99_ms, _height(point, by_recall))) for point in points]
    radii = [(7 if point in ringed else 4) * scale for point in points]
    taken = [Bbox.from_bounds(x - radius, y - radius, 2 * radius, 2 * radius) for (x, y), radius in zip(at, radii, strict=True)]
    lines = [line.get_transform().transform(np.column_stack(line.get_data())) for line in axes.lines]
    inside = axes.get_window_extent()
    for point, (x, y) in sorted(zip(points, at, strict=True), key=lambda pair: (pair[0].loop != "open", -pair[0].beam_size)):
        width, height = (5.2 * len(str(point.beam_size)) + 2) * scale, 9 * scale
        for dx, dy in OFFSETS:
            box = Bbox.from_bounds(x + dx * scale - width / 2, y + dy * scale - height / 2, width, height)
            if any(box.overlaps(other) for other in taken) or any(_crosses(box, line) for line in lines):
                continue
            if not (inside.x0 < box.x0 and box.x1 < inside.x1 and inside.y0 < box.y0 and box.y1 < inside.y1):
                continue
            taken.append(box)
            axes.annotate(
                str(point.beam_size),
                (point.p99_ms, _height(point, by_recall)),
                xytext=(dx, dy),
                textcoords="offset points",
                ha="center",
                va="center",
                fontsize=8,
                color=colour[point.m],
            )
            break


def _crosses(box: Any, line: Any) -> bool:
    """Whether a polyline (pixels, [P, 2]) runs through a box."""
    from matplotlib.path import Path as Line

    return len(line) > 1 and bool(Line(line).intersects_bbox(box, filled=False))
