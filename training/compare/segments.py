"""A method's figure by length of the history and by popularity of the relevant items; its coverage of the catalogue, and the popularity of
the items that it shows.

Knows answers, queries and how often training users touched each item. Does not know methods.

Legend: B queries, M results, I items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from espalier.arrays import Array, Bool, Float64, Int64

from ..compare.figures import standard_error
from ..data.splits import EvaluationPair
from ..retrieval.task import Metric


def segments_of(found_BM: Int64, pairs: Sequence[EvaluationPair], metric: Metric, users_I: Int64) -> dict[str, Any]:
    """The segments of one method's answers, for a report.

        users       segments {"of", "queries", "mean", "se"}: thirds of the queries by length of the history; none if all are as long, as
                    for vectors
        items       segments: thirds of the relevant items by number of training users; each is measured on the queries for which it is
                    relevant
        coverage    share of the catalogue that is in some answer's first m
        popularity  mean training users of shown items ÷ mean training users of relevant items

    users_I  int64[I]: how many training users touched each item, or to how many training vectors it is relevant
    """
    shown_items = found_BM[:, : metric.m]
    shown_items = shown_items[shown_items >= 0]
    relevant = np.concatenate([pair.relevant for pair in pairs])
    relevant_popularity = float(users_I[relevant].mean())
    return {
        "metric": str(metric),
        "users": _by_length(found_BM, pairs, metric),
        "items": _by_popularity(found_BM, pairs, metric, users_I),
        "coverage": len(np.unique(shown_items)) / len(users_I),
        "popularity": float(users_I[shown_items].mean()) / relevant_popularity if len(shown_items) and relevant_popularity else None,
    }


def _by_length(found_BM: Int64, pairs: Sequence[EvaluationPair], metric: Metric) -> list[dict[str, Any]]:
    length_B = np.array([len(pair.history) for pair in pairs])
    segments = []
    for low, high, inside_B in _thirds(length_B):
        third = [pair for pair, inside in zip(pairs, inside_B, strict=True) if inside]
        segments.append(_segment(f"a history of {_span(low, high)}", metric.of(found_BM[inside_B], third)))
    return segments if len(segments) > 1 else []


def _by_popularity(found_BM: Int64, pairs: Sequence[EvaluationPair], metric: Metric, users_I: Int64) -> list[dict[str, Any]]:
    source = "user" if any(len(pair.history) for pair in pairs) else "vector"
    segments = []
    relevant_users = np.concatenate([users_I[pair.relevant] for pair in pairs])
    for low, high, _ in _thirds(relevant_users):
        relevant_parts = [pair.relevant[(users_I[pair.relevant] >= low) & (users_I[pair.relevant] <= high)] for pair in pairs]
        has_B = np.array([len(part) > 0 for part in relevant_parts])
        third = [replace(pair, relevant=part) for pair, part in zip(pairs, relevant_parts, strict=True) if len(part)]
        name = f"items of {_span(low, high)} training {source}{'' if high == 1 else 's'}"
        segments.append(_segment(name, metric.of(found_BM[has_B], third)))
    return segments if len(segments) > 1 else []


def _thirds(values: Array) -> list[tuple[int, int, Bool]]:
    """Smallest and largest value of each third, and a mask of its values. Equal values stay together, so there may be fewer than three."""
    cuts = np.quantile(values, [1 / 3, 2 / 3], method="higher")
    third_of = np.searchsorted(cuts, values, side="right")
    thirds = [(third_of == third) for third in np.unique(third_of)]
    return [(int(values[third].min()), int(values[third].max()), third) for third in thirds]


def _segment(name: str, values_B: Float64) -> dict[str, Any]:
    return {"of": name, "queries": len(values_B), "mean": float(values_B.mean()), "se": standard_error(values_B)}


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
