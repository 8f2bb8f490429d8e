"""Which queries an engine of graphs takes: those of the bundle's items, or any whose states come with the parameters.

Legend: B queries, L levels, S state.
"""

from __future__ import annotations

import numpy as np

from espalier.bundle import Bundle
from espalier.errors import InvalidQuery
from espalier.manifest import GraphScorer
from espalier.queries import QueryBatch
from espalier.search import SearchParams


def check_queries(bundle: Bundle, queries: QueryBatch, params: SearchParams, rows: int | None) -> None:
    """Raise InvalidQuery where queries, or the states that come with them, are not for this bundle.

    rows  what item rows of histories must be below where states come with them; None: nobody reads them
    """
    states_BLS = params.states_BLS
    if states_BLS is None:
        queries.check(bundle.tree.item_count)
        return
    scorer = bundle.manifest.scorer
    if not isinstance(scorer, GraphScorer):
        raise InvalidQuery("states_BLS", "states", f"None, as {scorer.kind} scorers have none")
    shape = len(queries), bundle.tree.height + 1 if scorer.state_levels > 1 else 1, scorer.state_dim
    if states_BLS.shape != shape or states_BLS.dtype != np.float32:
        raise InvalidQuery("states_BLS", f"{states_BLS.dtype}{list(states_BLS.shape)}", f"float32{list(shape)}")
    if rows is not None:
        queries.check(rows)
