"""Stacking over trees with live items, of which its tables know nothing: no training points, nothing beside them, the weight 1."""

from __future__ import annotations

from espalier.bundle import Bundle
from espalier.engines.live.engine import LiveSearch
from espalier.engines.stacked import StackedEngine
from espalier.live.overlay import Overlay


class LiveStackedEngine(StackedEngine):
    """See the module. trees: opened on `bundle.unstacked`, with live items."""

    def __init__(self, bundle: Bundle, trees: LiveSearch) -> None:
        super().__init__(bundle, trees)
        self._live_trees = trees

    def set_overlay(self, overlay: Overlay | None) -> None:
        """What is live from the next call on; None: nothing. From any thread."""
        self.items = self.bundle.manifest.tree.items + (0 if overlay is None else overlay.handles)
        self._live_trees.set_overlay(overlay)
