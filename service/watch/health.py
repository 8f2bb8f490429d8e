"""The last 24 hours of a model as a document: series, alerts, events, unknown ids. Knows a history. Does not know HTTP.

Legend: T rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

from ..watch.alert_conditions import engine_busy, number, states
from ..watch.history import STEP_S, Columns, History

Float64 = NDArray[np.float64]


def as_json(model: str, version: int | None, history: History, unknown: Sequence[tuple[str, int]]) -> bytes:
    """The body of GET /models/{name}/health.

    version  the default one
    unknown  (id, count), most asked first
    """
    columns = history.columns()
    m = number(columns["recall_m"][-1])
    document = {
        "model": model,
        "version": version,
        "now": int(columns.at_T[-1]),
        "since": int(columns.at_T[0]),
        "step_s": STEP_S,
        "at": columns.at_T.astype(np.int64),
        "recall_m": None if m is None else int(m),
        "series": {name: values(columns).astype(np.float32) for name, values in SERIES.items()},  # NaN is null
        "alerts": states(columns),
        "events": [{"at": int(at), "what": event} for at, event in history.events],
        "unknown_ids": [{"id": item_id, "count": count} for item_id, count in unknown],
    }
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def _now(name: str, factor: float = 1.0) -> Callable[[Columns], Float64]:
    return lambda columns: columns[name] * factor


def _rate(name: str) -> Callable[[Columns], Float64]:
    return lambda columns: columns.rate(name)


SERIES: Mapping[str, Callable[[Columns], Float64]] = {
    "recall": _now("recall"),
    "expected_recall": _now("expected_recall"),
    "drift": _now("drift"),
    "requests_per_s": _rate("requests"),
    "queries_per_s": _rate("queries"),
    "background_per_s": _rate("background"),
    "p50_ms": _now("p50_s", 1e3),
    "p99_ms": _now("p99_s", 1e3),
    "incomplete_per_s": _rate("incomplete"),
    "degraded_per_s": _rate("degraded"),
    "shed_per_s": _rate("shed"),
    "errors_per_s": _rate("errors"),
    "unknown_ids_per_s": _rate("unknown_ids"),
    "engine_busy": engine_busy,
    "queue_depth": _now("queue_depth"),
    "memory": _now("memory"),
    "live_items": _now("live_items"),
    "live_tombstones": _now("live_tombstones"),
    "live_canary_recall": _now("live_canary_recall"),
    "live_displacement": _now("live_displacement"),
}
"""The series of the document, one value a row."""
