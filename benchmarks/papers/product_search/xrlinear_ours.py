"""Our models in `benchmarks.xrlinear_peers`, trained as `python -m training fit` does: the steps that `xrlinear_peer.py` has for peers."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array, load_npz

from benchmarks.papers.product_search.xrlinear_peer import SINGLE, M, growth_mb
from benchmarks.papers.xreg.xmc_sets import npz_data
from benchmarks.papers.xreg.xmc_systems import TREES, configuration, linear_config
from espalier.bundle import CHUNKS, FOREST_PARTS, STACKING, TREE, Bundle
from espalier.engines import open_engine
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from training.data.csr import as_rows
from training.data.xmc import LabelledPoints
from training.linear.run import fit_and_export

STACKED = "stacked"
OURS = ("espalier", "forest", "ova", STACKED)
"""Systems of xmc_systems, without stacking, and the default with it."""
SEARCHED = {TREE, CHUNKS, STACKING, *(name for files in FOREST_PARTS for name in files)}
"""The files that a search needs, as a peer's model has them; the others are items, queries for checks and so on."""
Steps = dict[str, Callable[[str, Path, Sequence[int]], dict[Any, Any]]]


def loaded(folder: Path, name: str) -> LabelledPoints:
    points, labels = (csr_array(load_npz(folder / f"{name}-{part}.npz")) for part in ("points", "labels"))
    return LabelledPoints(points, labels)


def train(system: str, folder: Path, beams: Sequence[int]) -> dict[str, Any]:
    """Trains twice where no compiled code is there yet: `train_cpu_s_cold` is the first time."""
    labels = loaded(folder, "train").labels.shape[1]
    raw = configuration("espalier" if system == STACKED else system, npz_data(folder), labels)
    config = linear_config(raw | ({} if system == STACKED else TREES))
    report: dict[str, Any] = {}
    compiled = Path(os.environ["NUMBA_CACHE_DIR"])
    names = ("train_cpu_s",) if compiled.is_dir() and any(compiled.iterdir()) else ("train_cpu_s_cold", "train_cpu_s")
    for version, name in enumerate(names, start=1):
        work = folder / system / f"work-{version}"
        work.mkdir(parents=True)
        before = time.process_time()
        bundle = fit_and_export(config, _model(folder, system) / str(version), work, threads=1)
        report[name] = round(time.process_time() - before, 2)
    sizes = {file.name: file.stat().st_size for file in bundle.path.iterdir()}
    report["model_mb"] = round(sum(size for name, size in sizes.items() if name in SEARCHED) / 1e6, 1)
    report |= {"bundle_mb": round(sum(sizes.values()) / 1e6, 1), "trees": len(bundle.alone)}
    report["memory_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
    choice = bundle.manifest.metrics.get("validation")
    if choice is not None:
        report["chosen"] = {name: choice[name] for name in ("cost", "gamma")}
    engine, queries = open_engine(bundle, "cpu"), _queries(bundle, folder)
    for beam in beams:
        np.save(folder / f"{system}-{beam}.npy", engine.search(queries, SearchParams.uniform(len(queries), beam, M)).item_rows_BM)
    return report


def timed(system: str, folder: Path, beams: Sequence[int]) -> dict[int, Any]:
    bundle = _opened(folder, system)
    engine, queries = open_engine(bundle, "cpu"), _queries(bundle, folder)
    singles = [queries.take(np.array([b])) for b in range(min(SINGLE, len(queries)))]
    report = {}
    for beam in beams:
        single_params, batch_params = SearchParams.uniform(1, beam, 10), SearchParams.uniform(len(queries), beam, 10)
        engine.search(singles[0], single_params)
        times = []
        for query in singles:
            begin = time.perf_counter()
            engine.search(query, single_params)
            times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        engine.search(queries, batch_params)
        report[beam] = {"ms_p50": 1e3 * float(np.median(times)), "queries_per_s": len(queries) / (time.perf_counter() - begin)}
    return report


def memory(system: str, folder: Path, beams: Sequence[int]) -> dict[str, float]:
    bundle = _opened(folder, system)
    engine, queries = open_engine(bundle, "cpu"), _queries(bundle, folder)
    engine.search(queries.take(np.array([0])), SearchParams.uniform(1, beams[0], 10))
    return {"batch_mb": growth_mb(lambda: engine.search(queries, SearchParams.uniform(len(queries), beams[0], 10)))}


STEPS: Steps = {"train": train, "time": timed, "memory": memory}


def _model(folder: Path, system: str) -> Path:
    return folder / system / "models" / "peers"


def _opened(folder: Path, system: str) -> Bundle:
    return Bundle.open(max(_model(folder, system).iterdir(), key=lambda version: int(version.name)))


def _queries(bundle: Bundle, folder: Path) -> QueryBatch:
    return QueryBatch(bundle.manifest.query, as_rows(loaded(folder, "test").points))
