"""Held-out queries of a bundle as requests would have them, for people who want to try a model on what it was measured on.

Knows what heldout.parquet holds. Does not know HTTP.
"""

from __future__ import annotations

from typing import Any

import orjson
import pyarrow as pa

from espalier.bundle import Bundle
from espalier.checks.heldout import read_heldout

MAX_BYTES = 8 << 20
"""The list ends with the query that makes its JSON larger than this."""


def heldout_queries(bundle: Bundle, most: int) -> list[bytes]:
    """JSON of at most so many held-out queries, at even distances among all: `{"query", "relevant", "recall"}`.

    recall  m → recall@m of the query when the bundle was made; empty for bundles that do not say
    Raises BundleCorrupt.
    """
    heldout, kind = read_heldout(bundle, most), bundle.manifest.query.kind
    queries = bundle.heldout().column(kind).take(pa.array(heldout.place_B, pa.int64()))
    found, size = list[bytes](), 0
    for b, rows in enumerate(heldout.relevant):
        entry: dict[str, Any] = {
            "query": {kind: queries[b].as_py()},
            "relevant": bundle.items.ids_of(rows),
            "recall": {str(m): float(recall_B[b]) for m, recall_B in sorted(heldout.recall_by_m.items())},
        }
        found.append(orjson.dumps(entry))
        size += len(found[-1])
        if size > MAX_BYTES:
            break
    return found
