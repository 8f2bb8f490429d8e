"""The figures of a trial: counts since the candidate and the default version were loaded, latencies, and overlap of answers.

Knows series of /metrics. Does not know which request gets which version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isnan, sqrt
from typing import Any

from ..watch.history import quantile
from ..watch.totals import Sample, Series

Z = 1.96
"""For intervals of 95 % confidence."""
OUTCOMES = ("answered", "refused", "late", "failed")


def figures(samples: Iterable[Sample], model: str, default: int | None, candidate: int) -> dict[str, Any]:
    """`versions`: the figures of both versions; `shadow`: those of requests that both answered."""
    series = Series(samples)
    versions = [_version(series, model, str(version)) for version in (default, candidate) if version is not None]
    return {"versions": versions, "shadow": _shadow(series, model, str(candidate))}


def _version(series: Series, model: str, version: str) -> dict[str, Any]:
    counts = _counts(series, "espalier_version_requests_total", OUTCOMES, model, version)
    seconds = series.buckets("espalier_version_request_seconds", model, version=version)
    return {
        "version": int(version),
        **counts,
        "failed_ci": _wilson(counts["failed"], sum(counts.values())),
        "p50_ms": _ms(quantile(seconds, 0.5)),
        "p99_ms": _ms(quantile(seconds, 0.99)),
    }


def _shadow(series: Series, model: str, version: str) -> dict[str, Any]:
    counts = _counts(series, "espalier_shadow_requests_total", ("compared", "failed", "left_out"), model, version)
    sum_of_shares = series.sum("espalier_shadow_overlap_sum", model, version=version)
    overlap, interval = _mean(series.buckets("espalier_shadow_overlap", model, version=version), sum_of_shares)
    times = {of: series.buckets("espalier_shadow_seconds", model, version=version, of=of) for of in ("default", "candidate")}
    p50_ms = {f"{of}_p50_ms": _ms(quantile(buckets, 0.5)) for of, buckets in times.items()}
    return {**counts, "overlap": overlap, "overlap_ci": interval, **p50_ms}


def _counts(series: Series, name: str, outcomes: Sequence[str], model: str, version: str) -> dict[str, int]:
    return {outcome: int(series.sum(name, model, version=version, outcome=outcome)) for outcome in outcomes}


def _wilson(count: int, total: int) -> tuple[float, float] | None:
    """The Wilson interval of a share; None if the total is 0."""
    if not total:
        return None
    share, spread = count / total, Z * Z / total
    middle, half = share + spread / 2, Z * sqrt(share * (1 - share) / total + spread / (4 * total))
    return max((middle - half) / (1 + spread), 0.0), min((middle + half) / (1 + spread), 1.0)


def _mean(buckets: Mapping[float, float], sum_of_shares: float) -> tuple[float | None, tuple[float, float] | None]:
    """The mean of a histogram of shares, and its confidence interval. Values are assumed to be uniform within a bucket."""
    total = buckets.get(inf, 0.0)
    if not total:
        return None, None
    mean, square, below, before = sum_of_shares / total, 0.0, 0.0, 0.0
    for bound, count in buckets.items():
        if count > before:
            width = max(min(bound, 1.0) - below, 0.0)
            square += ((below + width / 2 - mean) ** 2 + width**2 / 12) * (count - before)
        below, before = min(bound, 1.0), count
    half = Z * sqrt(square) / total
    return mean, (max(mean - half, 0.0), min(mean + half, 1.0))


def _ms(seconds: float) -> float | None:
    return None if isnan(seconds) else round(seconds * 1e3, 4)
