"""What is known of a candidate and of the version that it is compared with: counts since they were loaded, times, and overlap.

Knows series of /metrics. Does not know who is given which version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import inf, isnan, sqrt
from typing import Any

from ..watch.history import quantile
from ..watch.totals import Sample

Z = 1.96
"""Intervals hold 95 %."""
OUTCOMES = ("answered", "refused", "late", "failed")


def figures(samples: Iterable[Sample], model: str, default: int | None, candidate: int) -> dict[str, Any]:
    """`versions`: of both; `shadow`: of the requests that both answered."""
    found = _Of(samples, model)
    versions = [_version(found, version) for version in (default, candidate) if version is not None]
    return {"versions": versions, "shadow": _shadow(found, candidate)}


class _Of:
    """The series of one model with a version."""

    def __init__(self, samples: Iterable[Sample], model: str) -> None:
        self._found: dict[tuple[str, str], list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for name, labels, value in samples:
            if labels.get("model") == model and "version" in labels:
                self._found[name, labels["version"]].append((labels, value))

    def count(self, name: str, version: int, **labels: str) -> int:
        own = self._found.get((name, str(version)), ())
        return int(sum(value for found, value in own if all(found.get(key) == wanted for key, wanted in labels.items())))

    def sum(self, name: str, version: int) -> float:
        return sum(value for _, value in self._found.get((f"{name}_sum", str(version)), ()))

    def buckets(self, name: str, version: int, **labels: str) -> dict[float, float]:
        """Upper bound of a bucket, ascending → how many are not above it."""
        own = self._found.get((f"{name}_bucket", str(version)), ())
        found = {
            inf if one["le"] == "+Inf" else float(one["le"]): value
            for one, value in own
            if all(one.get(key) == wanted for key, wanted in labels.items())
        }
        return dict(sorted(found.items()))


def _version(found: _Of, version: int) -> dict[str, Any]:
    counts = {outcome: found.count("espalier_version_requests_total", version, outcome=outcome) for outcome in OUTCOMES}
    seconds = found.buckets("espalier_version_request_seconds", version)
    return {
        "version": version,
        **counts,
        "failed_ci": _wilson(counts["failed"], sum(counts.values())),
        "p50_ms": _ms(quantile(seconds, 0.5)),
        "p99_ms": _ms(quantile(seconds, 0.99)),
    }


def _shadow(found: _Of, candidate: int) -> dict[str, Any]:
    counts = {
        outcome: found.count("espalier_shadow_requests_total", candidate, outcome=outcome) for outcome in ("compared", "failed", "left_out")
    }
    overlap, interval = _mean(found, "espalier_shadow_overlap", candidate)
    times = {
        f"{of}_p50_ms": _ms(quantile(found.buckets("espalier_shadow_seconds", candidate, of=of), 0.5)) for of in ("default", "candidate")
    }
    return {**counts, "overlap": overlap, "overlap_ci": interval, **times}


def _wilson(count: int, of: int) -> tuple[float, float] | None:
    """The interval of a share (Wilson); None of nothing."""
    if not of:
        return None
    share, spread = count / of, Z * Z / of
    middle, half = share + spread / 2, Z * sqrt(share * (1 - share) / of + spread / (4 * of))
    return max((middle - half) / (1 + spread), 0.0), min((middle + half) / (1 + spread), 1.0)


def _mean(found: _Of, name: str, version: int) -> tuple[float | None, tuple[float, float] | None]:
    """The mean of a histogram of shares, and its interval: within a bucket values are taken to be spread evenly."""
    buckets = found.buckets(name, version)
    total = buckets.get(inf, 0.0)
    if not total:
        return None, None
    mean, square, below, before = found.sum(name, version) / total, 0.0, 0.0, 0.0
    for bound, count in buckets.items():
        if count > before:
            width = max(min(bound, 1.0) - below, 0.0)
            square += ((below + width / 2 - mean) ** 2 + width**2 / 12) * (count - before)
        below, before = min(bound, 1.0), count
    half = Z * sqrt(square) / total
    return mean, (max(mean - half, 0.0), min(mean + half, 1.0))


def _ms(seconds: float) -> float | None:
    return None if isnan(seconds) else round(seconds * 1e3, 4)
