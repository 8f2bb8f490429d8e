"""Reports: what fitted methods are worth on test queries, in files that a killed run leaves whole and a later one continues.

Knows entries, queries, figures and files, and which rows a verdict is about. Does not know how methods are fitted.

The JSON is for readers and stays small. What each query was worth, by which later methods are compared with earlier ones on the same
queries, is in a file of arrays beside it (`F.json` → `F.queries.npz`).
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from espalier.errors import InvalidConfig, InvalidData
from espalier.hardware import hardware

from ..compare.contest import FUSION, RECIPE, Entry, parts_of
from ..compare.figures import Difference, Figures, Int64, answered, figures_of, ms_per_query, paired
from ..compare.verdict import Contestant, Field
from ..data.splits import EvaluationPair, without_seen
from ..publish import training_command
from ..retrieval.task import Metric, Question
from ..specification.deep import DeepConfig
from ..specification.linear import LinearConfig

log = logging.getLogger(__name__)

Report = dict[str, Any]
Key = tuple[str, int, int | None]
"""Method, seed, serving beam (None: it has none)."""


def new_report(config: DeepConfig | LinearConfig, metric: Metric, queries: int) -> Report:
    """A report without methods. The caller adds `log`, what the data are."""
    return {
        "name": config.name,
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware(),
        "command": training_command(),
        "config": config.model_dump(mode="json"),
        "metric": str(metric),
        "queries": queries,
        "rows": [],
        "fits": [],
        "not_judged": [],
        "differences": [],
        "verdict": [],
        "interrupted": False,
        "seconds": 0.0,
    }


def measure(
    entry: Entry,
    pairs: Sequence[Question],
    metrics: Sequence[Metric],
    metric: Metric,
    exclude_seen: bool,
    seed: int,
    report: Report,
    figures: dict[Key, Figures],
) -> Int64:
    """Measure a method at its beams and return its answers at the chosen one. Its rows join the report together: an interrupt leaves whole
    methods.

    metric  the one by which everything is chosen; answers are timed at its m
    """
    queries, rows, measured = [pair.query for pair in pairs], [], {}
    answers = answers_at_beams(entry, pairs, metrics, exclude_seen)
    for beam, found_BM in answers.items():
        found = measured[entry.name, seed, beam] = figures_of(found_BM, pairs, metrics)
        ms = ms_per_query(entry.by_beam[beam].rank, queries, metric.m, exclude_seen)
        rows.append(row_of(entry, beam, seed, found) | {"ms_per_query": ms})
        at = "" if beam is None else f", beam {beam}"
        log.info("%s%s: %s %.4f, %.3g ms a query", entry.name, at, metric, found.mean(metric), ms)
    figures.update(measured)
    report["rows"] += rows
    report["fits"].append(fit_of(entry, seed))
    return answers[entry.beam_size]


def continued(report: Report, file: Path, same: Sequence[str], kept: Sequence[str]) -> Report:
    """The report with what `file` has from an earlier run.

    same  what must be equal in both: rows of another run do not belong into one table
    kept  what is taken over, where it is there

    Raises InvalidConfig where the file is no report or one of another run.
    """
    if not file.exists():
        return report
    try:
        earlier = json.loads(file.read_text())
    except ValueError as error:  # no JSON, or no text
        raise InvalidConfig("--json", str(file), f"a report of an earlier run, or no file; {error}") from error
    now = json.loads(json.dumps(report))
    if not isinstance(earlier, dict) or any(isinstance(now[key], list) and not isinstance(earlier.get(key, []), list) for key in kept):
        raise InvalidConfig("--json", str(file), "a report of an earlier run, or no file; this is JSON of another shape")
    for key in same:
        if earlier.get(key) != now[key]:
            raise InvalidConfig("--json", str(file), f"rows of the same run; its {key} is {earlier.get(key)!r}, not {now[key]!r}")
    return report | {key: earlier[key] for key in kept if key in earlier}


def save(report: Report, file: Path) -> None:
    """Replace the file in one step, so that a killed run leaves whole rows."""
    partial = file.with_suffix(".part")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(file)


def queries_file(file: Path) -> Path:
    return file.with_suffix(".queries.npz")


def save_figures(figures: Mapping[Key, Figures], file: Path) -> None:
    """Write what each query was worth, in one step; values as float32."""
    arrays: dict[str, Any] = {}
    for (method, seed, beam), measured in figures.items():
        place = f"{method}|{seed}|{'' if beam is None else beam}"
        arrays[f"{place}|user"] = measured.user_B
        arrays |= {f"{place}|{metric}": values.astype(np.float32) for metric, values in measured.values.items()}
    partial = file.with_suffix(".part.npz")
    np.savez_compressed(partial, **arrays)
    partial.replace(file)


def read_figures(file: Path) -> dict[Key, Figures]:
    """What `save_figures` wrote; nothing where there is no file. Raises InvalidConfig where it is damaged."""
    if not file.exists():
        return {}
    try:
        return _read_figures(file)
    except (ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        raise InvalidConfig("--json", str(file), f"what each query was worth, as an earlier run wrote it, or no file; {error}") from error


def _read_figures(file: Path) -> dict[Key, Figures]:
    found: dict[Key, Figures] = {}
    with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
        for name in arrays.files:
            method, seed, beam, what = name.rsplit("|", 3)
            key = method, int(seed), int(beam) if beam else None
            if what == "user":  # the first of a method's arrays
                found[key] = Figures(arrays[name], {})
            else:
                found[key].values[Metric.named("--json", what)] = arrays[name].astype(np.float64)
    return found


def queries_of(pairs: Sequence[EvaluationPair], exclude_seen: bool, most: int | None = None) -> list[EvaluationPair]:
    """At most so many test queries, evenly spread. Raises InvalidData where there is none."""
    found = without_seen(pairs) if exclude_seen else list(pairs)
    if not found:
        raise InvalidData("test queries", 0, "at least one with something relevant; data.split says how they are held out")
    return found if most is None else found[:: max(1, -(-len(found) // most))]


def answers_at_beams(entry: Entry, pairs: Sequence[Question], metrics: Sequence[Metric], exclude_seen: bool) -> dict[int | None, Int64]:
    """Serving beam → int64[B, M] answers, as many as the metrics look at; one entry, None, for a method without a beam."""
    m = max(metric.m for metric in metrics)
    return {beam: answered(fitted.rank, pairs, m, exclude_seen) for beam, fitted in entry.by_beam.items()}


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


def field_of(report: Report, strong: str) -> Field:
    """The contestants of a report, each at its chosen beam. strong: as in Field."""
    fits = {fit["method"]: fit for fit in report["fits"]}
    contestants = {}
    for row in report["rows"]:
        if row["chosen"]:
            name, fit = row["method"], fits[row["method"]]
            contestants[name] = Contestant(
                name,
                row["figures"][report["metric"]]["mean"],
                row["validation"],
                fit["seconds"],
                fit["bytes"],
                row["ms_per_query"],
                fit["ended"],
                parts_of(name) if name.split(":")[0] == FUSION else (),
            )
    between = {(one["first"], one["second"]): one for one in report["differences"] if one["metric"] == report["metric"]}

    def of(first: str, second: str) -> Difference:
        one, sign = (between[first, second], 1) if (first, second) in between else (between[second, first], -1)
        low, high = sorted((sign * one["low"], sign * one["high"]))
        return Difference(sign * one["mean"], low, high, one["queries"])

    return Field(
        metric=report["metric"],
        tree=contestants.get(RECIPE),
        others=[contestant for name, contestant in contestants.items() if name != RECIPE],
        not_judged={left["method"]: left["reason"] for left in report["not_judged"]},
        paired=of,
        strong=strong,
        minutes=report.get("minutes_needed"),
    )
