"""Methods on one log, seed after seed: the code that `benchmarks.next_item`, `fixed_split`, `sessions` and `otm_real` share.

Rows are printed and written at once; methods that are in the JSON are not run again. Besides the rows, the JSON has how each method was
fitted (`fits`: options, trials, seconds, bytes), why a method was left out, and paired differences at the chosen serving beams.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.report_file import print_row
from espalier.errors import EspalierError, InvalidConfig
from espalier.hardware import hardware
from training.baselines.methods import METHODS
from training.compare.contest import RECIPE, Contest, attempted, checked_names, in_order
from training.compare.figures import Figures, figures_of
from training.compare.report import (
    Key,
    Report,
    answers_at_beams,
    continued,
    differences,
    fit_of,
    queries_file,
    queries_of,
    read_figures,
    row_of,
    save,
)
from training.data.splits import EvaluationPair
from training.deep.prepare import Prepared, prepare
from training.retrieval.task import Method, Metric
from training.specification.deep import DeepConfig
from training.specification.splits import FileSplit

Row = dict[str, Any]
LIST_KEYS = ("rows", "fits", "left_out", "differences")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", default="recipe,neighbours,sasrec", help=f"some of {RECIPE}, {', '.join(METHODS)}, fusion, fusion:A:B")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 1 … N")
    parser.add_argument("--beams", default="50,200,800", help="serving beams of the recipe, comma-separated")
    parser.add_argument("--steps", type=int, help="at most so many steps of the recipe, for a quick look")
    parser.add_argument("--minutes", type=float, help="at most so many for choosing and training each method")


def without_folders(config: DeepConfig) -> Row:
    """The configuration with file names without folders, so that a report can be published and continued on another machine."""
    raw = config.model_dump(mode="json")
    raw["data"]["log"] = config.data.log.name
    if isinstance(config.data.split, FileSplit):
        raw["data"]["split"]["test"] = config.data.split.test.name
    return raw


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers of at least 1, ascending. Raises InvalidConfig."""
    if not all(number.strip().isdecimal() and int(number) >= 1 for number in text.split(",")):
        raise InvalidConfig(option, text, "whole numbers of at least 1, comma-separated")
    return sorted({int(number) for number in text.split(",")})


def begun(options: argparse.Namespace, **conditions: Any) -> tuple[Report, dict[Key, Figures]]:
    """A report, with what an earlier run wrote to --json, and the figures of each of its queries.

    conditions  of the run, which must be those of the earlier one
    """
    header = {"date": datetime.now(UTC).date().isoformat(), "hardware": hardware(), "threads": options.threads}
    report: Report = header | conditions | {key: [] for key in LIST_KEYS}
    if options.json is None:
        return report, {}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    return continued(report, options.json, list(conditions), LIST_KEYS), read_figures(queries_file(options.json))


def missing_methods(report: Report, methods: Sequence[str], seeds: int) -> Iterator[tuple[int, list[str]]]:
    """Each seed with the methods that have no rows of it, if there are any. They are no longer in `left_out`."""
    completed_runs = {(row["method"], row["seed"]) for row in report["rows"]}
    for seed in range(1, seeds + 1):
        missing = [method for method in methods if (method, seed) not in completed_runs]
        report["left_out"] = [entry for entry in report["left_out"] if entry["seed"] != seed or entry["method"] not in missing]
        if missing:
            yield seed, missing


@dataclass(frozen=True)
class Protocol:
    """What is measured on a log.

    metrics       name in the rows → metric
    test          gives the test queries; None: those of the configured split
    more_methods  besides METHODS
    """

    metrics: Mapping[str, Metric]
    test: Callable[[Prepared], Sequence[EvaluationPair]] | None = None
    more_methods: Mapping[str, Method] = field(default_factory=dict)

    @property
    def baselines(self) -> Mapping[str, Method]:
        return {**METHODS, **self.more_methods}


def run(options: argparse.Namespace, name: str, config: DeepConfig, log: Path, protocol: Protocol) -> Report:
    """The report; its rows are {"method", "seed", "beam_size", "train_seconds", "bytes", …}, with "NAME" and "NAME_se" of each metric."""
    beams, methods = numbers("--beams", options.beams), checked_names(options.methods, [RECIPE, *protocol.baselines])
    if options.steps is not None:
        optimiser = config.optimiser.model_copy(update={"steps": min(options.steps, config.optimiser.steps)})
        config = config.model_copy(update={"optimiser": optimiser})
    conditions = {"steps": options.steps, "beams": options.beams, "minutes": options.minutes, "config": without_folders(config)}
    report, figures = begun(options, set=name, **conditions)
    for seed, missing in missing_methods(report, methods, options.seeds):
        _run_seed(options, config.model_copy(update={"seed": seed}), log, missing, beams, protocol, report, figures)
    for difference in report["differences"]:
        print_row(difference)
    return report


def _run_seed(
    options: argparse.Namespace,
    config: DeepConfig,
    log: Path,
    methods: Sequence[str],
    beams: Sequence[int],
    protocol: Protocol,
    report: Report,
    figures: dict[Key, Figures],
) -> None:
    seed, exclude_seen, metrics = config.seed, config.search.exclude_seen, protocol.metrics
    with tempfile.TemporaryDirectory() as folder:
        contest = Contest(config, prepare(config, log, Path(folder) / "log"), Path(folder), beams, protocol.baselines)
        test = contest.prepared.split.test if protocol.test is None else protocol.test(contest.prepared)
        pairs = queries_of(test, exclude_seen)
        for method in in_order(methods):
            entry = attempted(contest, method, exclude_seen, None if options.minutes is None else 60 * options.minutes)
            if isinstance(entry, str):
                report["left_out"].append({"method": method, "seed": seed, "reason": entry})
            else:
                fit = fit_of(entry, seed)
                report["fits"].append(fit)
                for beam, found_BM in answers_at_beams(entry, pairs, list(metrics.values()), exclude_seen).items():
                    beam_figures = figures_of(found_BM, pairs, list(metrics.values()))
                    figures[method, seed, beam] = beam_figures
                    fit_columns = {"train_seconds": fit["seconds"], "bytes": fit["bytes"], "ended": fit["ended"]}
                    row = row_of(entry, beam, seed, beam_figures)
                    del row["figures"]
                    for name, metric in metrics.items():
                        row |= {name: beam_figures.mean(metric), f"{name}_se": beam_figures.standard_error(metric)}
                    report["rows"].append(row | fit_columns | {"queries": len(pairs)})
                    print_row(report["rows"][-1])
            report["differences"] = differences(report["rows"], figures, list(metrics.values()))
            save(report, figures, options.json)


def main_of(benchmark: Any, parser: argparse.ArgumentParser) -> None:
    """Run a benchmark with the options of the command line and --threads. An error ends the program with one line."""
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    logging.basicConfig(format="%(message)s")
    logging.getLogger("training").setLevel(logging.INFO)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        benchmark(options)
    except (EspalierError, FloatingPointError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
