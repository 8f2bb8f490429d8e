"""What a fitted method is worth on test queries, and the parts of a report that say so.

Knows entries, queries and figures. Does not know files or times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from espalier.errors import InvalidData
from training.compare.contest import Entry
from training.compare.figures import Figures, answered, figures_of, paired
from training.compare.report import Key
from training.data.splits import EvaluationPair, without_seen
from training.retrieval.task import Metric


def queries_of(pairs: Sequence[EvaluationPair], exclude_seen: bool, most: int | None = None) -> list[EvaluationPair]:
    """At most so many test queries, evenly spread. Raises InvalidData where there is none."""
    found = without_seen(pairs) if exclude_seen else list(pairs)
    if not found:
        raise InvalidData("test queries", 0, "at least one with something relevant; data.split says how they are held out")
    return found if most is None else found[:: max(1, -(-len(found) // most))]


def measured_at_beams(
    entry: Entry, pairs: Sequence[EvaluationPair], metrics: Sequence[Metric], exclude_seen: bool
) -> dict[int | None, Figures]:
    """Serving beam → figures; one entry, None, for a method without a beam."""
    m = max(metric.m for metric in metrics)
    return {beam: figures_of(answered(fitted.rank, pairs, m, exclude_seen), pairs, metrics) for beam, fitted in entry.by_beam.items()}


def row_of(entry: Entry, beam: int | None, seed: int, measured: Figures) -> dict[str, Any]:
    """Means and standard errors at a serving beam. `chosen`: whether it is the one that validation chose."""
    return {
        "method": entry.name,
        "seed": seed,
        "beam_size": beam,
        "chosen": beam == entry.beam_size,
        "validation": entry.validation[beam],
        "figures": {str(metric): {"mean": measured.mean(metric), "se": measured.standard_error(metric)} for metric in measured.values},
    }


def fit_of(entry: Entry, seed: int) -> dict[str, Any]:
    """How a method was fitted: what it cost, what it chose, and all that it tried."""
    fitted = entry.fitted
    about = {"method": entry.name, "seed": seed, "seconds": round(fitted.seconds, 2), "bytes": int(fitted.bytes), "ended": fitted.ended}
    return about | {"options": fitted.options, "trials": [asdict(trial) for trial in fitted.trials]}


def differences(rows: Sequence[dict[str, Any]], figures: Mapping[Key, Figures], metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Of every two methods at their chosen beams, in every metric: {"first", "second", "metric", "mean", "low", "high", "queries"}.

    Over the seeds that both have. Methods whose figures of each query are not there have no differences.
    """
    chosen: dict[str, dict[int, Figures]] = {}
    for row in rows:
        key = row["method"], row["seed"], row["beam_size"]
        if row["chosen"] and key in figures:
            chosen.setdefault(row["method"], {})[row["seed"]] = figures[key]
    found = []
    for place, first in enumerate(chosen):
        for second in list(chosen)[place + 1 :]:
            seeds = sorted(chosen[first].keys() & chosen[second].keys())
            for metric in metrics if seeds else ():
                difference = paired([chosen[first][seed] for seed in seeds], [chosen[second][seed] for seed in seeds], metric)
                found.append({"first": first, "second": second, "metric": str(metric)} | asdict(difference))
    return found
