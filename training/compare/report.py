"""Reports: figures of fitted methods on test queries, in files. Every write is atomic, so a later run can continue a killed one.

Knows entries, queries, figures and files, and which rows a verdict is about. Does not know how methods are fitted.

The JSON is for readers and stays small. Figures of single queries are in a file of arrays beside it (`F.json` → `F.queries.npz`). A later
run compares its methods with earlier ones by them.
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

from espalier.arrays import Int64
from espalier.durable import atomic_write
from espalier.errors import InvalidConfig, InvalidData
from espalier.hardware import hardware

from ..compare.contest import FUSION, RECIPE, Entry, fused_methods
from ..compare.figures import Difference, Figures, answered, figures_of, ms_per_query, paired
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
    """A report without methods. The caller adds `log`, a description of the data."""
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
    """Measure a method at its beams and return its answers at the chosen one. Its rows are added to the report in one step, so an interrupt
    leaves whole methods.

    metric  the metric that makes all choices; answers are timed at its m
    """
    queries, rows, figures_of_method = [pair.query for pair in pairs], [], {}
    answers = answers_at_beams(entry, pairs, metrics, exclude_seen)
    for beam, found_BM in answers.items():
        figures_at_beam = figures_of_method[entry.name, seed, beam] = figures_of(found_BM, pairs, metrics)
        ms = ms_per_query(entry.by_beam[beam].rank, queries, metric.m, exclude_seen)
        rows.append(row_of(entry, beam, seed, figures_at_beam) | {"ms_per_query": ms})
        at = "" if beam is None else f", beam {beam}"
        log.info("%s%s: %s %.4f, %.3g ms a query", entry.name, at, metric, figures_at_beam.mean(metric), ms)
    figures.update(figures_of_method)
    report["rows"] += rows
    report["fits"].append(fit_of(entry, seed))
    return answers[entry.beam_size]


def continued(report: Report, file: Path, equal_keys: Sequence[str], kept_keys: Sequence[str]) -> Report:
    """The report with entries of an earlier run's file.

    equal_keys      keys whose values must be equal in both: rows of different runs do not belong in one table
    kept_keys       keys that are taken from the file, if it has them

    Raises InvalidConfig if the file is no report, or one of another run.
    """
    if not file.exists():
        return report
    try:
        earlier = json.loads(file.read_text())
    except ValueError as error:  # no JSON, or no text
        raise InvalidConfig("--json", str(file), f"a report of an earlier run, or no file; {error}") from error
    current = json.loads(json.dumps(report))
    list_keys = [key for key in kept_keys if isinstance(current[key], list)]
    if not isinstance(earlier, dict) or not all(isinstance(earlier.get(key, []), list) for key in list_keys):
        raise InvalidConfig("--json", str(file), "a report of an earlier run, or no file; this is JSON of another shape")
    for key in equal_keys:
        if earlier.get(key) != current[key]:
            raise InvalidConfig("--json", str(file), f"rows of the same run; its {key} is {earlier.get(key)!r}, not {current[key]!r}")
    return report | {key: earlier[key] for key in kept_keys if key in earlier}


def save(report: Report, figures: Mapping[Key, Figures], file: Path | None) -> None:
    """Replace the file of the figures of each query, and then that of the report, each in one step, so that a killed run leaves whole
    files. None: nothing is written."""
    if file is None:
        return
    save_figures(figures, queries_file(file))
    with atomic_write(file) as part:
        part.write_text(json.dumps(report, indent=1) + "\n")


def queries_file(file: Path) -> Path:
    return file.with_name(f"{file.name.removesuffix('.json')}.queries.npz")


def save_figures(figures: Mapping[Key, Figures], file: Path) -> None:
    """Write the figures of each query in one step, as float32."""
    arrays: dict[str, Any] = {}
    for (method, seed, beam), measured in figures.items():
        key_text = f"{method}|{seed}|{'' if beam is None else beam}"
        arrays[f"{key_text}|user"] = measured.user_B
        arrays |= {f"{key_text}|{metric}": values.astype(np.float32) for metric, values in measured.values.items()}
    with atomic_write(file) as part, part.open("wb") as stream:
        np.savez_compressed(stream, **arrays)


def read_figures(file: Path) -> dict[Key, Figures]:
    """The figures that `save_figures` wrote; none if there is no file. Raises InvalidConfig if the file is damaged."""
    if not file.exists():
        return {}
    try:
        return _read_figures(file)
    except (ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        raise InvalidConfig("--json", str(file), f"what each query was worth, as an earlier run wrote it, or no file; {error}") from error


def _read_figures(file: Path) -> dict[Key, Figures]:
    figures: dict[Key, Figures] = {}
    with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
        for name in arrays.files:
            method, seed, beam, metric = name.rsplit("|", 3)
            key = method, int(seed), int(beam) if beam else None
            if metric == "user":  # the first of a method's arrays
                figures[key] = Figures(arrays[name], {})
            else:
                figures[key].values[Metric.named("--json", metric)] = arrays[name].astype(np.float64)
    return figures


def queries_of(pairs: Sequence[EvaluationPair], exclude_seen: bool, most: int | None = None) -> list[EvaluationPair]:
    """At most `most` test queries, evenly spread. Raises InvalidData if there is none."""
    queries = without_seen(pairs) if exclude_seen else list(pairs)
    if not queries:
        raise InvalidData("test queries", 0, "at least one with something relevant; data.split says how they are held out")
    return queries if most is None else queries[:: max(1, -(-len(queries) // most))]


def answers_at_beams(entry: Entry, pairs: Sequence[Question], metrics: Sequence[Metric], exclude_seen: bool) -> dict[int | None, Int64]:
    """Serving beam → int64[B, M] answers, M the largest m of the metrics. A method without a beam has one entry, None."""
    m = max(metric.m for metric in metrics)
    return {beam: answered(fitted.rank, pairs, m, exclude_seen) for beam, fitted in entry.by_beam.items()}


def row_of(entry: Entry, beam: int | None, seed: int, measured: Figures) -> dict[str, Any]:
    """Means and standard errors at a serving beam. `chosen`: whether validation chose this beam."""
    return {
        "method": entry.name,
        "seed": seed,
        "beam_size": beam,
        "chosen": beam == entry.beam_size,
        "validation": entry.validation[beam],
        "figures": {str(metric): {"mean": measured.mean(metric), "se": measured.standard_error(metric)} for metric in measured.values},
    }


def fit_of(entry: Entry, seed: int) -> dict[str, Any]:
    """How a method was fitted: its cost, the chosen options, and all trials."""
    fitted = entry.fitted
    about = {"method": entry.name, "seed": seed, "seconds": round(fitted.seconds, 2), "bytes": int(fitted.bytes), "ended": fitted.ended}
    return about | {"options": fitted.options, "trials": [asdict(trial) for trial in fitted.trials]}


def differences(rows: Sequence[dict[str, Any]], figures: Mapping[Key, Figures], metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """{"first", "second", "metric", "mean", "low", "high", "queries"} of every two methods at their chosen beams, in every metric.

    Differences are over the seeds that both have. Methods without figures of single queries have none.
    """
    chosen: dict[str, dict[int, Figures]] = {}
    for row in rows:
        key = row["method"], row["seed"], row["beam_size"]
        if row["chosen"] and key in figures:
            chosen.setdefault(row["method"], {})[row["seed"]] = figures[key]
    entries = []
    for position, first in enumerate(chosen):
        for second in list(chosen)[position + 1 :]:
            seeds = sorted(chosen[first].keys() & chosen[second].keys())
            for metric in metrics if seeds else ():
                difference = paired([chosen[first][seed] for seed in seeds], [chosen[second][seed] for seed in seeds], metric)
                entries.append({"first": first, "second": second, "metric": str(metric)} | asdict(difference))
    return entries


def fields_of(report: Report, strong: str) -> tuple[Field, list[Field]]:
    """The contestants of a report, each at its chosen beam: in the metric that made the choices, and in each other one.

    strong  as in Field
    """
    names = list(dict.fromkeys(entry["metric"] for entry in report["differences"]))
    return _field_of(report, strong, report["metric"]), [_field_of(report, strong, name) for name in names if name != report["metric"]]


def _field_of(report: Report, strong: str, metric: str) -> Field:
    fits = {fit["method"]: fit for fit in report["fits"]}
    contestants = {}
    for row in report["rows"]:
        if row["chosen"]:
            name, fit = row["method"], fits[row["method"]]
            contestants[name] = Contestant(
                name,
                row["figures"][metric]["mean"],
                row["validation"],
                fit["seconds"],
                fit["bytes"],
                row["ms_per_query"],
                fit["ended"],
                fused_methods(name) if name.split(":")[0] == FUSION else (),
            )
    by_pair = {(entry["first"], entry["second"]): entry for entry in report["differences"] if entry["metric"] == metric}

    def difference_of(first: str, second: str) -> Difference:
        entry, sign = (by_pair[first, second], 1) if (first, second) in by_pair else (by_pair[second, first], -1)
        mean, *ends = (sign * entry[name] + 0.0 for name in ("mean", "low", "high"))  # no −0
        low, high = sorted(ends)
        return Difference(mean, low, high, entry["queries"])

    kind, m = metric.split("@")
    items = report.get("log", {}).get("items")
    return Field(
        metric=metric,
        tree=contestants.get(RECIPE),
        others=[contestant for name, contestant in contestants.items() if name != RECIPE],
        not_judged={refused["method"]: refused["reason"] for refused in report["not_judged"]},
        paired=difference_of,
        strong=strong,
        minutes=report.get("minutes_needed"),
        all_items=items if kind == "recall" and items is not None and int(m) >= items else None,
    )
