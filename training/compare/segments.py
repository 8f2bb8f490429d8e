"""Whom a method serves, and with what: its figure by how long a list is and by how popular the items are that are relevant; how much of the
catalogue it shows, and how popular that is.

Knows answers, queries and how often training users touched each item. Does not know methods.

Legend: B queries, M results, I items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..compare.figures import standard_error
from ..data.splits import EvaluationPair
from ..retrieval.task import Metric

Int64 = NDArray[np.int64]


def segments_of(found_BM: Int64, pairs: Sequence[EvaluationPair], metric: Metric, users_I: Int64) -> dict[str, Any]:
    """What a report says of one method's answers.

        users, items  segments {"of", "queries", "mean", "se"}: thirds of the queries by the length of their history, none where all are as
                      long, as vectors are; and thirds of all that is relevant by how many training users touched it, of each the queries
                      that it is relevant for
        coverage      the share of the catalogue that is among somebody's first m
        popularity    training users of an item that is shown ÷ those of an item that is relevant, means over both

    users_I  int64[I]: how many of the users who are learned from touched each item
    """
    shown = found_BM[:, : metric.m]
    shown = shown[shown >= 0]
    relevant = np.concatenate([pair.relevant for pair in pairs])
    popular = float(users_I[relevant].mean())
    return {
        "metric": str(metric),
        "users": _by_length(found_BM, pairs, metric),
        "items": _by_popularity(found_BM, pairs, metric, users_I),
        "coverage": len(np.unique(shown)) / len(users_I),
        "popularity": float(users_I[shown].mean()) / popular if len(shown) and popular else None,
    }


def _by_length(found_BM: Int64, pairs: Sequence[EvaluationPair], metric: Metric) -> list[dict[str, Any]]:
    length_B = np.array([len(pair.history) for pair in pairs])
    found = []
    for low, high, inside_B in _thirds(length_B):
        of = [pair for pair, inside in zip(pairs, inside_B, strict=True) if inside]
        found.append(_segment(f"a history of {_span(low, high)}", metric.of(found_BM[inside_B], of)))
    return found if len(found) > 1 else []


def _by_popularity(found_BM: Int64, pairs: Sequence[EvaluationPair], metric: Metric, users_I: Int64) -> list[dict[str, Any]]:
    found = []
    relevant_users = np.concatenate([users_I[pair.relevant] for pair in pairs])
    for low, high, _ in _thirds(relevant_users):
        parts = [pair.relevant[(users_I[pair.relevant] >= low) & (users_I[pair.relevant] <= high)] for pair in pairs]
        has_B = np.array([len(part) > 0 for part in parts])
        of = [replace(pair, relevant=part) for pair, part in zip(pairs, parts, strict=True) if len(part)]
        found.append(_segment(f"items of {_span(low, high)} training user{'' if high == 1 else 's'}", metric.of(found_BM[has_B], of)))
    return found if len(found) > 1 else []


def _thirds(values: NDArray[Any]) -> list[tuple[int, int, NDArray[np.bool_]]]:
    """The least and the largest value of each third, and which values are in it. Equal values are never parted, so there may be fewer."""
    cuts = np.quantile(values, [1 / 3, 2 / 3], method="higher")
    place = np.searchsorted(cuts, values, side="right")
    parts = [(place == part) for part in np.unique(place)]
    return [(int(values[part].min()), int(values[part].max()), part) for part in parts]


def _segment(of: str, values_B: NDArray[np.float64]) -> dict[str, Any]:
    return {"of": of, "queries": len(values_B), "mean": float(values_B.mean()), "se": standard_error(values_B)}


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
