"""Chooses candidate parents and the row of a live item by its evidence: a search with that evidence, without training.

    parents  those that searches with its events and text find, and those of the items of `like`, best first
    row      see `graph_rows.py` and `linear_rows.py`

The same evidence gives the same candidates whatever else is live, unless it names live items. Placements are stored, so an item is placed
only once. Knows bundles and a search. Does not know which slots are free.

Legend: B queries, K parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from espalier.bundle import Bundle
from espalier.errors import EspalierError
from espalier.items import Items
from espalier.label_counts import LabelCounts
from espalier.live.items import LiveItems
from espalier.live.operations import ItemBody, Operation
from espalier.live.overlay import Overlay
from espalier.manifest import LinearScorer
from espalier.placement.evidence import Evidence, finds_by_words, is_retitled, own_fields
from espalier.placement.graph_placement import GraphPlacement
from espalier.placement.linear_placement import LinearPlacement
from espalier.placement.parents import Parents, Search
from espalier.search import NO_ITEM

Candidates = Sequence[Parents]
"""The candidate parents of an item in each tree."""


class Placer:
    """Places the items of one version. Any thread may call it; calls may overlap if calls of `search` may."""

    def __init__(self, bundle: Bundle, text_columns: Sequence[str] | None = None) -> None:
        """text_columns: of the item table, with an item's own text; None: those of the model's configuration."""
        self.bundle = bundle
        is_linear = isinstance(bundle.manifest.scorer, LinearScorer)
        self._placement = LinearPlacement(bundle, text_columns) if is_linear else GraphPlacement(bundle)

    def place(
        self, items: Sequence[ItemBody], catalogue: Items, overlay: Overlay, search: Search, ids: Sequence[str] = ()
    ) -> list[Candidates | EspalierError]:
        """The candidates of each item, or the error of its evidence.

        ids        of the items; empty: none was trained
        catalogue  resolves the ids of the evidence; overlay: the live items of the catalogue
        search     searches the version
        """
        results = Evidence.of_all(self.bundle, items, catalogue, self._placement.takes_fields, self._placement.content)
        rows = self.bundle.items.rows_of(ids).tolist() if ids else [NO_ITEM] * len(items)
        evidence = [replace(result, trained_row=row) for result, row in zip(results, rows, strict=True) if isinstance(result, Evidence)]
        candidates = iter(self._placement.place(evidence, catalogue, overlay, search))
        return [next(candidates) if isinstance(result, Evidence) else result for result in results]

    def completed(self, item_id: str, body: ItemBody, table: LiveItems) -> ItemBody:
        """A body with the item's present fields and training's count of its events, if it has none itself."""
        entry, row = table.entry(item_id), self.bundle.items.row_of(item_id)
        if body.fields is None and entry is not None and not entry.is_deleted:
            body = replace(body, fields=entry.fields)
        if body.fields is None and body.text is None and row >= 0 and finds_by_words(self.bundle):
            body = replace(body, fields=own_fields(self.bundle, row))
        if body.count is None and row >= 0 and self._counts is not None:
            body = replace(body, count=int(self._counts.counts_I[row]))
        return body

    @cached_property
    def _counts(self) -> LabelCounts | None:
        return self.bundle.label_counts()


def needs_placement(bundle: Bundle, operation: Operation) -> bool:
    """Whether an operation without stored placements needs some in a version.

    That must not depend on earlier operations: a process that follows the journal has applied them, one that replays the last operation of
    each item has not, and both must have the same placements. A trained item keeps its row if the evidence may be older than the version,
    because training knew more.
    """
    row = bundle.items.row_of(operation.id)
    if operation.kind == "delete" or row < 0:
        return operation.kind == "put"
    (sequence, at), live = operation.evidence_from, bundle.manifest.live
    is_newer = at >= bundle.manifest.created.timestamp() if live is None else sequence > live.through
    return (is_newer and operation.body.has_evidence) or is_retitled(bundle, own_fields(bundle, row), operation.body.fields)


def trained_with(bundle: Bundle, operation: Operation) -> bool:
    """Whether an item has a row that training made, perhaps with the item's evidence. A fold has such rows, and rows from placements."""
    (sequence, at), trained = operation.evidence_from, bundle.manifest.trained_items
    may_know = at < trained.created.timestamp() if trained.through is None else sequence <= trained.through
    return may_know and 0 <= bundle.items.row_of(operation.id) < trained.items
