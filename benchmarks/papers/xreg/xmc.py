"""Systems on a set of points with labels: quality, milliseconds, training time, size.

    python -m benchmarks.xmc --data DIR --set eurlex-4k --systems espalier,ova,parabel,all-zero --beam 10,50 --json F

DIR/SET: see xmc_sets.py. Systems: see xmc_systems.py and xmc_baselines.py; `all-zero` predicts no label. A system of the former is trained
as `python -m training fit` trains it and searched with the engine that would serve it. Each system has a process and a thread of its own.
Quality is at m = 100: P@k over all test points, PSP@k with the propensities of Jain et al. (A = .55, B = 1.5), R@k over points with labels,
XMAD@5 by Eq. 1 of XReg, where relevance is inverse propensity over its maximum and a score is what the system says; Tau@5 and AUPRC of the
same come last. `ms_p50` is the median of single queries at m = 10, the median of three rounds. `train_cpu_s` are the CPU seconds of the
whole fit: data, choices, trees, scorers, checks. `model_mb` is the bundle on disk, or a baseline's arrays.

Rows that F already holds, of the same set and beams, are kept, so a run that was stopped goes on after its last system.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.xreg.xmc_baselines import BASELINES, BASELINES_OF_RELEVANCE
from benchmarks.papers.xreg.xmc_figures import Predictions, figures_of
from benchmarks.papers.xreg.xmc_sets import npz_data, read_set, write_npz
from benchmarks.papers.xreg.xmc_systems import MODELS, OF_RELEVANCE, ONE_THREAD, configuration, linear_config, name_of
from benchmarks.report_file import command_line, print_row, write_report
from espalier.arrays import Float32, Int64
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import EspalierError
from espalier.queries import QueryBatch
from espalier.search import NO_ITEM, SearchParams
from espalier.stacking import Stacking
from training.data.csr import as_rows
from training.data.xmc import LabelledPoints
from training.linear.prepare import prepare, read_points
from training.linear.run import fit_and_export
from training.specification.linear import NpzData

M, SINGLE, ROUNDS = 100, 1000, 3
ALL_ZERO, ZERO = "all-zero", "xreg-zero"
Row = dict[str, Any]


def rows_of(system: str, train: LabelledPoints, test: LabelledPoints, beams: Sequence[int]) -> list[Row]:
    """A row for each beam; one row, with the beam None, if the system has no beam."""
    if system == ALL_ZERO:
        nothing = Predictions(np.full((len(test), M), NO_ITEM), np.zeros((len(test), M), np.float32))
        return [_row(system, None, nothing, train, test, {})]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_npz(folder, train, test)
        report = _in_process(system, folder, train.labels.shape[1], beams)
        rows, name = [], name_of(system)
        is_of_relevance = name in (*OF_RELEVANCE, *BASELINES_OF_RELEVANCE)
        for beam in [None] if system in BASELINES else beams:
            with np.load(folder / f"{beam}.npz") as arrays:
                predictions = Predictions(arrays["rows"], arrays["scores"], is_of_relevance, name == ZERO)
            costs = {"ms_p50": report["ms_p50"][str(beam)]} | report["fit"]
            rows.append(_row(system, beam, predictions, train, test, costs))
    return rows


def _row(system: str, beam: int | None, predictions: Predictions, train: LabelledPoints, test: LabelledPoints, costs: Row) -> Row:
    """The figures of every row, the costs, then Tau@5 and AUPRC."""
    figures = figures_of(predictions, train, test)
    last_figures = {name: figures.pop(name) for name in ("tau5", "auprc")}
    return {"system": system, "beam_size": beam} | figures | costs | (last_figures if costs else {})


def _in_process(system: str, folder: Path, labels: int, beams: Sequence[int]) -> Row:
    """The report of `run` in a process with one thread."""
    beams_text = ",".join(map(str, beams))
    command = [sys.executable, "-m", "benchmarks.xmc", "--run", system, str(folder), str(labels), "--beam", beams_text]
    completed = subprocess.run(command, env=os.environ | ONE_THREAD, stdout=subprocess.PIPE, text=True, check=True)
    report: Row = json.loads(completed.stdout.splitlines()[-1])
    return report


def run(system: str, folder: Path, labels: int, beams: Sequence[int]) -> Row:
    """Train a system on the files of a folder, write its results for the test points to BEAM.npz, and time it."""
    if system in BASELINES:
        return _run_baseline(system, folder)
    config = linear_config(configuration(system, npz_data(folder), labels))
    (folder / "work").mkdir()
    begin = time.process_time()
    bundle = fit_and_export(config, folder / "models" / "xmc" / "1", folder / "work", threads=1)
    fit = {"train_cpu_s": round(time.process_time() - begin, 2)}
    fit["model_mb"] = round(sum(file.stat().st_size for file in bundle.path.iterdir()) / 1e6, 1)
    choice = bundle.manifest.metrics.get("validation")
    chosen = {} if choice is None else {"chosen": {name: choice[name] for name in ("cost", "gamma")}}
    if bundle.manifest.stacking is not None:
        chosen |= {"stacking": bundle.manifest.stacking.training}
    queries = QueryBatch(bundle.manifest.query, as_rows(prepare(config).test.points))
    return {"ms_p50": _searched(bundle, queries, folder, beams), "fit": fit | chosen}


def _run_baseline(system: str, folder: Path) -> Row:
    """As `run`, for a method without a beam; writes None.npz."""
    data = NpzData.model_validate(npz_data(folder))
    begin = time.process_time()
    predictor = BASELINES[system](read_points(data))
    fit = {"train_cpu_s": round(time.process_time() - begin, 2)}
    fit["model_mb"] = round(sum(array.nbytes for array in predictor.arrays().values()) / 1e6, 1)
    test = read_points(data, test=True).points
    rows_BM, scores_BM = predictor.best(test, M)
    np.savez(folder / "None.npz", rows=rows_BM, scores=scores_BM)
    singles = [test[[b]] for b in range(min(SINGLE, test.shape[0]))]
    times = [_median_ms([partial(predictor.best, single, 10) for single in singles]) for _ in range(ROUNDS)]
    return {"ms_p50": {"None": round(float(np.median(times)), 4)}, "fit": fit}


def _median_ms(calls: Sequence[Callable[[], object]]) -> float:
    times_s = []
    for call in calls:
        begin = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - begin)
    return 1e3 * float(np.median(times_s))


def relevance_of(stacking: Stacking, rows: Int64, scores: Float32) -> Float32:
    """float32, same shape: estimates of relevance, p · w, of items (−1: none) with scores p · w^power."""
    is_item = rows >= 0
    log_weight = np.where(is_item, stacking.tables.log_weight[np.where(is_item, rows, 0)], np.float32(0))
    return np.asarray(scores * np.exp((1 - stacking.info.power) * log_weight), np.float32)


def _searched(bundle: Bundle, queries: QueryBatch, folder: Path, beams: Sequence[int]) -> dict[int, float]:
    """Milliseconds by beam."""
    engine = open_engine(bundle, "cpu")
    singles = [queries.take(np.array([b])) for b in range(min(SINGLE, len(queries)))]
    times: dict[int, list[float]] = {beam: [] for beam in beams}
    for beam in beams:
        result = engine.search(queries, SearchParams.uniform(len(queries), beam, M))
        scores_BM = result.scores_BM
        if bundle.stacking is not None:
            scores_BM = relevance_of(bundle.stacking, result.item_rows_BM, scores_BM)
        np.savez(folder / f"{beam}.npz", rows=result.item_rows_BM, scores=scores_BM)
    for _ in range(ROUNDS):
        for beam in beams:
            single_params = SearchParams.uniform(1, beam, 10)
            times[beam].append(_median_ms([partial(engine.search, query, single_params) for query in singles]))
    engine.close()
    return {beam: round(float(np.median(beam_times)), 4) for beam, beam_times in times.items()}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, help="the folder that holds the set")
    parser.add_argument("--set", default="eurlex-4k")
    parser.add_argument("--systems", default="espalier,ova,parabel,all-zero")
    parser.add_argument("--beam", default="10,50")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    beams = [int(beam) for beam in args.beam.split(",")]
    if args.run:
        system, folder, labels = args.run
        print(json.dumps(run(system, Path(folder), int(labels), beams)))
        return
    if args.data is None:
        parser.error("--data is missing: the folder that holds the set")
    systems, known_systems = args.systems.split(","), [*MODELS, *BASELINES, ALL_ZERO]
    if unknown := [system for system in systems if system not in known_systems and name_of(system) not in MODELS]:
        parser.error(f"--systems: got {', '.join(unknown)}, expected some of {', '.join(known_systems)}")
    try:
        train, test = read_set(args.data, args.set, unit=False)
    except EspalierError as error:
        parser.error(str(error))
    rows = _earlier_rows(args.json, args.set, beams)
    for system in systems:
        if system not in {row["system"] for row in rows}:
            rows += rows_of(system, train, test, beams)
            write_report(args.json, {"set": args.set, "beams": beams, "rows": rows}, "one thread used")
        for row in rows:
            if row["system"] == system:
                print_row(row)


def _earlier_rows(file: Path | None, name: str, beams: list[int]) -> list[Row]:
    """The rows of an earlier run with the same set and beams."""
    if file is None or not file.is_file():
        return []
    report = json.loads(file.read_text())
    rows: list[Row] = report["rows"] if (report["set"], report["beams"]) == (name, beams) else []
    return rows


if __name__ == "__main__":
    main()
