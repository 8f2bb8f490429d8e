"""Sweeps of the text-search benchmark: XR-Linear searched with several beams, or pruned by several thresholds."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from benchmarks.papers.product_search.text_linear import Recipe, disk_mb, engine_find, fit, xr_linear
from benchmarks.papers.product_search.text_report import Report, Trained, row_of
from benchmarks.papers.product_search.text_sets import Task
from espalier.bundle import Bundle
from espalier.engines import open_engine

BEAMS = (1, 5, 10, 15, 20, 25, 30, 50, 75, 100, 200, 400)
THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.45)


def sweep_beam(task: Task, report: Report, work: Path, recipe: Recipe) -> None:
    """Table 4: one model, several beams."""
    if all(report.has("beam", beam_size=beam) for beam in BEAMS):
        return
    by_fold = []
    for fold in task.folds:
        with tempfile.TemporaryDirectory(dir=work) as folder:
            by_fold.append(xr_linear(recipe, BEAMS, recipe.texts, task, fold, Path(folder)))
    for beam, trained in zip(BEAMS, zip(*by_fold, strict=True), strict=True):
        if not report.has("beam", beam_size=beam):
            row = row_of(list(zip(trained, task.folds, strict=True)), "xr-linear")
            report.add("beam", {"beam_size": beam} | row | {"queries_per_s": round(1e3 / row["ms_p50"])})
    for fold_systems in by_fold:
        fold_systems[0].close()


def sweep_threshold(task: Task, report: Report, work: Path, recipe: Recipe, beam: int = 10) -> None:
    """Table 3: models of the first fold, each trained with a threshold.

    resident_mb is the growth of a fresh process's resident set while the model is opened and asked 1,000 test queries.
    """
    fold = task.folds[0]
    for threshold in THRESHOLDS:
        if report.has("threshold", threshold=threshold):
            continue
        pruned = replace(recipe, options=recipe.options.model_copy(update={"threshold": threshold}))
        with tempfile.TemporaryDirectory(dir=work) as folder:
            fitted = fit(task, fold, pruned, Path(folder))
            bundle = fitted.write(Path(folder))
            engine = open_engine(bundle, "cpu")
            trained = Trained(f"{recipe.texts}, beam {beam}", engine_find(engine, bundle, beam), disk_mb(bundle), fitted.train_cpu_s)
            row = row_of([(trained, fold)], "xr-linear")
            engine.close()
            resident = resident_mb(bundle, beam, fold.texts[:1000])
        report.add(
            "threshold", {"threshold": threshold} | row | {"weights": len(fitted.chunks.entry_weight), "resident_mb": round(resident, 1)}
        )


def resident_mb(bundle: Bundle, beam: int, texts: Sequence[str]) -> float:
    """How much a fresh process grows while it opens the bundle and answers the texts."""
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
        return fresh.submit(resident_growth, bundle.path, beam, list(texts)).result()


def resident_growth(bundle: Path, beam: int, texts: Sequence[str]) -> float:
    """What `resident_mb` has computed in the fresh process."""

    def now() -> float:
        return int(re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1e3

    before = now()
    opened = Bundle.open(bundle)
    find = engine_find(open_engine(opened, "cpu"), opened, beam)
    for text in texts:
        find(text)
    return now() - before
