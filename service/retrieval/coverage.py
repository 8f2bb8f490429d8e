"""Which shards an answer is of, as JSON, and whether they are enough for the request. Where nothing is cut into shards, all is covered."""

from __future__ import annotations

from typing import Any

import numpy as np

from espalier.search import Coverage
from service.errors import Uncovered


def check_coverage(coverage: Coverage | None, least: float | None) -> None:
    """Raise Uncovered where shards with less than `least` of the items answered a query, or none did. least: None: any share will do."""
    if coverage is None:
        return
    described = as_json(coverage)
    if not described["answered"] or described["items"] < (least or 0.0):
        missing = ", ".join(map(str, described["missing"]))
        raise Uncovered(
            f"coverage: got {described['items']:.4g}, the share of the items on shards that answered, expected at least {least or 0.0:g}, "
            f"above 0; of {described['shards']} shards, these did not answer in time: {missing}."
        )


def as_json(coverage: Coverage) -> dict[str, Any]:
    """The coverage of a request: a shard counts where it answered all of its queries."""
    if coverage.answered_BS.all():
        shards = coverage.answered_BS.shape[1]
        return {"items": 1.0, "shards": shards, "answered": shards, "missing": []}
    answered_S = np.logical_and.reduce(coverage.answered_BS)
    items = int(coverage.items_S[answered_S].sum()) / int(coverage.items_S.sum())
    missing = np.flatnonzero(~answered_S).tolist()
    return {"items": round(items, 6), "shards": len(answered_S), "answered": int(answered_S.sum()), "missing": missing}
