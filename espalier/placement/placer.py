"""Where a live item goes and with what row, by its evidence: a search with the item's own evidence, and no training.

    parents  those that the searches of its events and text find, those of the items that it is like, best first
    row      see `graph_rows.py` and `linear_rows.py`

The same evidence gives the same candidates whatever else is live, unless it names live items. What was chosen is stored, so nobody places
an item twice. Knows bundles and a search. Does not know which slots are free.

Legend: B queries, K parents.
"""

from __future__ import annotations

from collections.abc import Sequence

from espalier.bundle import Bundle
from espalier.errors import EspalierError
from espalier.items import Items
from espalier.live.operations import ItemBody
from espalier.live.overlay import Overlay
from espalier.manifest import LinearScorer
from espalier.placement.evidence import Evidence
from espalier.placement.graph_placement import GraphPlacement
from espalier.placement.linear_placement import LinearPlacement
from espalier.placement.parents import Parents, Search

Candidates = Sequence[Parents]
"""For each tree, where an item may go."""


class Placer:
    """Places the items of one version. From any thread, one call at a time where `search` takes one at a time."""

    def __init__(self, bundle: Bundle, text_columns: Sequence[str] | None = None) -> None:
        """text_columns: of the item table, which are an item's own text; None: what the model's configuration says."""
        self.bundle = bundle
        is_linear = isinstance(bundle.manifest.scorer, LinearScorer)
        self._way = LinearPlacement(bundle, text_columns) if is_linear else GraphPlacement(bundle)

    def place(self, items: Sequence[ItemBody], known: Items, overlay: Overlay, search: Search) -> list[Candidates | EspalierError]:
        """For each item where it may go, or why nobody can say.

        known    the catalogue that their evidence speaks of; overlay: what of it is live
        search   the beams above the leaves that queries lead to, in the version
        """
        found = Evidence.of_all(self.bundle, items, known, self._way.takes_fields)
        placed = iter(self._way.place([one for one in found if isinstance(one, Evidence)], known, overlay, search))
        return [next(placed) if isinstance(one, Evidence) else one for one in found]
