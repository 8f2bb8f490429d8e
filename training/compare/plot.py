"""A picture of a comparison: what every method finds against its time for a query."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation


class Label(NamedTuple):
    """A text at a point of the data; the offset and the size in typographic points."""

    text: str
    point: tuple[float, float]
    offset: tuple[float, float]
    size: float


def plot_rows(rows: Sequence[dict[str, Any]], early: Collection[str], metric: str, title: str, file: Path) -> None:
    """One labelled point a method, with its standard error; the serving beams of the recipe are a line. PNG or SVG by the file's suffix.

    early   methods that ended early, which are marked
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    labels: list[Label] = []
    for name in dict.fromkeys(row["method"] for row in rows):
        line = sorted((row for row in rows if row["method"] == name), key=lambda row: row["beam_size"] or 0)
        ms = [row["ms_per_query"] for row in line]
        found = [row["figures"][metric]["mean"] for row in line]
        errors = [row["figures"][metric]["se"] for row in line]
        axes.errorbar(ms, found, errors, marker="o", capsize=2, linestyle="-" if len(line) > 1 else "none", label=name)
        place = max(range(len(line)), key=lambda at: ms[at])
        labels.append(Label(f"{name} *" if name in early else name, (ms[place], found[place]), (6, 6), 9))
        if len(line) > 1:
            labels += [Label(str(row["beam_size"]), (x, y), (-4, -13), 7) for row, x, y in zip(line, ms, found, strict=True)]
    note = "; *: ended early" if early else ""
    axes.set(xscale="log", xlabel=f"ms per query, one at a time on one thread (numbers: serving beam{note})", ylabel=metric, title=title)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.12)
    axes.set_ylim(0, 1.12 * max(row["figures"][metric]["mean"] for row in rows))
    axes.grid(alpha=0.3, which="both")
    write_labels(figure, axes, labels)
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


def write_labels(figure: Figure, axes: Axes, labels: Sequence[Label]) -> list[Annotation]:
    """Annotate points, each label below those that it would lie on."""
    figure.draw_without_rendering()
    written: list[Annotation] = []
    for label in labels:
        text = axes.annotate(label.text, label.point, textcoords="offset points", xytext=label.offset, fontsize=label.size)
        while any(text.get_window_extent().overlaps(other.get_window_extent()) for other in written):
            text.xyann = (text.xyann[0], text.xyann[1] - 2)
        written.append(text)
    return written
