"""Which queries an engine of graphs takes: those of the bundle's items, or any whose states come with the parameters.

Histories of a shard have the item rows of the whole bundle, so they come with states, unless they hold no item.

Legend: B queries, L levels, S state.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.errors import InvalidQuery
from espalier.manifest import GraphScorer
from espalier.queries import PADDING, HistoryKind, QueryBatch
from espalier.search import SearchParams


def states_shape(bundle: Bundle, batch: int) -> tuple[int, int, int]:
    """B, L, S of the states that come with queries."""
    scorer = bundle.graph_scorer
    return batch, bundle.manifest.tree.levels if scorer.state_levels > 1 else 1, scorer.state_dim


def blank_states(bundle: Bundle, batch: int) -> NDArray[np.float32] | None:
    """States for warming up a shard of graphs, as all of its queries bring theirs; None for other bundles."""
    if bundle.manifest.shard is None or not isinstance(bundle.manifest.scorer, GraphScorer):
        return None
    return np.zeros(states_shape(bundle, batch), np.float32)


def check_queries(bundle: Bundle, queries: QueryBatch, params: SearchParams, rows: int | None) -> None:
    """Raise InvalidQuery where queries, or the states that come with them, are not for this bundle.

    rows  what item rows of histories must be below where states come with them; None: nobody reads them
    """
    states_BLS = params.states_BLS
    if states_BLS is None:
        if bundle.manifest.shard is not None and isinstance(queries.kind, HistoryKind):
            _check_no_items(bundle, queries)
        queries.check(bundle.tree.item_count)
        return
    scorer = bundle.manifest.scorer
    if not isinstance(scorer, GraphScorer):
        raise InvalidQuery("states_BLS", "states", f"None, as {scorer.kind} scorers have none")
    shape = states_shape(bundle, len(queries))
    if states_BLS.shape != shape or states_BLS.dtype != np.float32:
        raise InvalidQuery("states_BLS", f"{states_BLS.dtype}{list(states_BLS.shape)}", f"float32{list(shape)}")
    if rows is not None:
        queries.check(rows)


def _check_no_items(bundle: Bundle, queries: QueryBatch) -> None:
    """Raise InvalidQuery where a history that a shard is to encode has items: it lacks the rows of those on other shards."""
    shard = bundle.manifest.shard
    if shard is not None and np.any(queries.array != PADDING):
        expected = f"the queries' states: shard {shard.index} of {shard.count} of {shard.of} has not the rows of all items"
        raise InvalidQuery("states_BLS", None, expected)
