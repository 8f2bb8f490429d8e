"""What a test has drawn: the lines of the pictures that it saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

Point = tuple[float, float]


class Pictures:
    """The figures that are saved from now on, by file."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._figures: dict[Path, Figure] = {}
        save = Figure.savefig

        def remembered(figure: Figure, file: Path, **options: Any) -> None:
            save(figure, file, **options)
            self._figures[Path(file)] = figure

        patch.setattr(Figure, "savefig", remembered)

    def lines(self, file: Path) -> dict[str, list[Point]]:
        """Label → points of every line and error bar, those of the same label in all panels together. The file must hold an image."""
        start = file.read_bytes()[:5]
        assert start.startswith((b"\x89PNG", b"<?xml")), f"{file}: {start!r}"
        found: dict[str, list[Point]] = {}
        for axes in self._figures[file].axes:
            bars = {bar.lines[0]: str(bar.get_label()) for bar in axes.containers if isinstance(bar, ErrorbarContainer)}
            caps = {cap for bar in axes.containers if isinstance(bar, ErrorbarContainer) for cap in bar.lines[1]}
            for line in (line for line in axes.lines if line not in caps):
                points = [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]
                found.setdefault(bars.get(line, str(line.get_label())), []).extend(points)
        return found
