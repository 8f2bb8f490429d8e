"""Golden queries of a new bundle: the reference engine's answers, and each query's smallest margin at a cut.

Legend: B queries, K beam, C candidates.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from espalier.bundle import Bundle
from espalier.checks.golden import CANDIDATE_RANKS, CANDIDATE_ROWS, columns_of_golden
from espalier.engines.reference import ReferenceEngine, ScoredItems
from espalier.queries import QueryBatch
from espalier.search import SearchParams


def golden_answers(bundle: Bundle, queries: QueryBatch, query_column: pa.Array, params: SearchParams) -> pa.Table:
    """The golden table of some queries. `query_column` has the queries as clients write them. The table has `keys` if the bundle has a
    memory, and candidates if it has stacking.
    """
    reference, stacking = ReferenceEngine(bundle), bundle.manifest.stacking
    rows, ranks, keys, margins, candidates = [], [], [], [], []
    for b in range(len(queries)):
        result, m = reference.scored_items(queries, params, b), int(params.m_B[b])
        if stacking is not None and (before := result.before_stacking) is not None:
            candidates.append((before.item_rows[: max(m, stacking.candidates)], before.ranks[: max(m, stacking.candidates)]))
        rows.append(result.item_rows[:m])
        ranks.append(result.ranks[:m])
        keys.append(result.keys[:m])
        margins.append(_margin(result, m))
    values = {"beam_size": params.beam_size_B, "m": params.m_B, "item_rows": rows, "ranks": ranks, "keys": keys, "margin": margins}
    values |= {CANDIDATE_ROWS: [result for result, _ in candidates], CANDIDATE_RANKS: [result for _, result in candidates]}
    columns = {name: pa.array(values[name], kind) for name, kind in columns_of_golden(bundle.manifest.memory, stacking).items()}
    return pa.table({bundle.manifest.query.kind: query_column} | columns)


def answered_anew(golden: pa.Table, bundle: Bundle, queries: QueryBatch) -> pa.Table:
    """The queries of a golden table, which are `queries` for the bundle's engine, with the bundle's answers."""
    params = SearchParams(np.asarray(golden.column("beam_size"), np.int64), np.asarray(golden.column("m"), np.int64))
    return golden_answers(bundle, queries, golden.column(bundle.manifest.query.kind).combine_chunks(), params)


def _margin(result: ScoredItems, m: int) -> float:
    """The smallest difference in key between a kept and a dropped candidate over all cuts; inf where nothing was dropped.

    The last cuts are over items, by stacking and by m: no tree of a forest cuts its leaves. The log of a mean of scores changes no more
    than the log of one of them.
    """
    smallest = result.gap
    for step in (step for steps in result.steps for step in steps[:-1]):
        is_kept_C = np.isin(step.candidates_C, step.kept_K)
        if not is_kept_C.all():
            smallest = min(smallest, float(step.keys_C[is_kept_C].min() - step.keys_C[~is_kept_C].max()))
    keys = result.keys
    return min(smallest, float(keys[m - 1] - keys[m])) if len(keys) > m else smallest
