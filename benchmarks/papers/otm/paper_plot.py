"""A figure that shows our numbers beside a paper's: one panel a condition, one place a cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cell:
    """One number of a table: ours with its error, if there is one, and the paper's, if it prints one."""

    label: str
    ours: float
    error: float | None
    paper: float | None


def plot_beside_paper(panels: Mapping[str, Sequence[Cell]], title: str, cells: str, value: str, file: Path) -> None:
    """Draw a table (title of a panel → its cells) into an image file.

    `cells` says what the cells of a panel differ in, `value` what is measured. All panels share the scale of the values, which starts at 0.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(panels)) if len(panels) != 4 else 2
    rows = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(4 * columns, 3 * rows), sharey=True, squeeze=False, layout="constrained")
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (name, row) in zip(grid.flat, panels.items(), strict=False):
        places = range(len(row))
        axes.errorbar(places, [cell.ours for cell in row], [cell.error or 0 for cell in row], fmt="o", capsize=3, label="ours")
        printed = [(place, cell.paper) for place, cell in enumerate(row) if cell.paper is not None]
        if printed:
            axes.plot(*zip(*printed, strict=True), "x", color="black", markersize=8, label="paper")
        axes.set_xticks(places, [cell.label for cell in row], rotation=20 if max(len(cell.label) for cell in row) > 6 else 0)
        axes.set(title=name, xlabel=cells)
        axes.grid(alpha=0.3)
    for axes in grid[:, 0]:
        axes.set_ylabel(value)
    grid[0, 0].set_ylim(bottom=0)
    grid[0, 0].legend()
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
