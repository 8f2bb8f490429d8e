"""A picture of a comparison: every method's figure against its time for a query."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any


def plot_rows(rows: Sequence[dict[str, Any]], early: Collection[str], metric: str, title: str, file: Path) -> None:
    """One point a method, with its standard error; the serving beams of the recipe are a line. PNG or SVG by the file's suffix.

    early   methods that ended early; the plot marks them
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name in dict.fromkeys(row["method"] for row in rows):
        line = sorted((row for row in rows if row["method"] == name), key=lambda row: row["beam_size"] or 0)
        ms = [row["ms_per_query"] for row in line]
        means = [row["figures"][metric]["mean"] for row in line]
        errors = [row["figures"][metric]["se"] for row in line]
        label, linestyle = f"{name} *" if name in early else name, "-" if len(line) > 1 else "none"
        axes.errorbar(ms, means, errors, marker="o", capsize=2, linestyle=linestyle, label=label)
        for row, x, y in zip(line, ms, means, strict=True) if len(line) > 1 else ():
            axes.annotate(str(row["beam_size"]), (x, y), textcoords="offset points", xytext=(-4, -13), fontsize=7)
    note = "; *: ended early" if early else ""
    axes.set(xscale="log", xlabel=f"ms per query, one at a time on one thread (numbers: serving beam{note})", ylabel=metric, title=title)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.12)
    axes.set_ylim(0, 1.12 * max(row["figures"][metric]["mean"] for row in rows))
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def plot_frontier(rows: Sequence[dict[str, Any]], title: str, file: Path) -> None:
    """The rows of `evaluate`: recall against milliseconds, a line for each m and a point for each beam."""
    points = [
        {"method": f"recall@{row['m']}", "beam_size": row["beam_size"], "ms_per_query": row["ms_per_query"]}
        | {"figures": {"recall": {"mean": row["recall"], "se": 0.0}}}
        for row in rows
    ]
    plot_rows(points, (), "recall", title, file)
