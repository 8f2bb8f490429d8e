"""XR-Linear beside its peers on a set of the XMC repository: quality, milliseconds, training time, size.

    python -m benchmarks.xrlinear_peers --data DIR --set eurlex-4k [--peers pecos,omikuji,bonsai,napkinxc,ova] --beam 1,10,50 --json F
    python -m benchmarks.xrlinear_peers --data DIR --set eurlex-4k --choose --json F

What DIR/SET holds: see xmc_sets.py. All systems get points of length 1. Every system runs on one thread, in processes of its own. Quality
is at m = 100. Milliseconds are the median of single queries, queries/s are those of one call with all test points, both at m = 10. They are
medians of three rounds with every system in each, so that other load on the machine affects all systems. CPU seconds of training include
label features, tree and, for Espalier, compiling: once with a cold and once with a warm cache. `batch_mb` is the memory by which the call
with all test points makes a fresh process grow. `ova` is Espalier without a tree: all labels are children of the root. A peer that is not
installed is named and skipped. --peer-python names an interpreter that has the peers, because libpecos needs an older NumPy:

    python -m venv peers && peers/bin/pip install 'numpy<2' scipy libpecos omikuji napkinxc

--choose holds out a fifth of the training points, twice, and prints the figures that the defaults were chosen by.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.sparse import csr_array, csr_matrix, load_npz, save_npz

from benchmarks.papers.xmc_sets import read_set
from benchmarks.papers.xrlinear_peer import growth_mb
from espalier.bundle import Bundle
from espalier.bundle_writer import LinearContent, write_bundle
from espalier.checks.golden import GOLDEN_COLUMNS
from espalier.chunks import Chunks
from espalier.engines import open_engine
from espalier.engines.linear.chunk_search import BeamParams, ChunkSearch
from espalier.errors import EspalierError
from espalier.hardware import hardware
from espalier.items import ItemTable
from espalier.manifest import ManifestDraft, SearchDefaults
from espalier.queries import FeaturesKind, QueryBatch
from espalier.search import SearchParams
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree
from training.data.csr import as_rows
from training.data.xmc import LabelledPoints
from training.linear.fit import fit_linear
from training.linear.label_features import pifa
from training.linear.prepare import written_features
from training.specification.linear import LinearOptions
from training.trees.hierarchical_kmeans import hierarchical_kmeans

PEERS = ("pecos", "omikuji", "bonsai", "napkinxc", "ova")
OURS = ("espalier", "ova")
BATCHED = (*OURS, "pecos")
"""Systems that search many queries in one call."""
ROUNDS = 3
BRANCHING, MAX_LEAF = 128, 32
M = 100
SINGLE = 1000
Row = dict[str, Any]


def train(data: LabelledPoints, options: LinearOptions, branching: int = BRANCHING, max_leaf: int = MAX_LEAF) -> tuple[Tree, Chunks]:
    labels = pifa(data)
    tree = hierarchical_kmeans(labels, branching, max_leaf, 0)
    return tree, fit_linear(data, tree, options, centroids=labels)


# -- quality --------------------------------------------------------------------------------------------------------------


def quality(found_BM: NDArray[np.int64], test: LabelledPoints, training: LabelledPoints) -> dict[str, float]:
    """P@k, nDCG@5, PSP@k (Jain et al. 2016, A = .55, B = 1.5) and R@k in %.

    R@k is the mean over points with labels, the others are over all points, as the repository's own scripts have them.
    """
    counts = np.diff(test.labels.indptr)
    hits_BM = np.zeros(found_BM.shape, np.bool_)
    for b in range(len(test)):
        hits_BM[b] = np.isin(found_BM[b], test.labels_of(b))
    seen = np.bincount(training.labels.indices, minlength=training.labels.shape[1])
    c = (np.log(len(training)) - 1) * (1.5 + 1) ** 0.55
    worth = 1 + c * np.exp(-0.55 * np.log(seen + 1.5))
    gain_BM = np.where(hits_BM, worth[np.maximum(found_BM, 0)], 0)
    best = [np.sort(worth[test.labels_of(b)])[::-1] for b in range(len(test))]
    row: dict[str, float] = {}
    for k in (1, 3, 5):
        row[f"p{k}"] = float(hits_BM[:, :k].mean())
        row[f"psp{k}"] = float(gain_BM[:, :k].sum() / sum(own[:k].sum() for own in best))
    discount = 1 / np.log2(np.arange(2, 7))
    ideal = np.array([discount[: min(5, count)].sum() for count in counts])
    with_labels = counts > 0
    row["ndcg5"] = float(((hits_BM[:, :5] * discount).sum(1)[with_labels] / ideal[with_labels]).sum() / len(test))
    for k in (10, 100):
        row[f"r{k}"] = float((hits_BM[with_labels, :k].sum(1) / counts[with_labels]).mean())
    return {name: round(100 * value, 2) for name, value in row.items()}


# -- ours, in processes of its own ----------------------------------------------------------------------------------------


def ours(system: str, folder: Path, step: str, beams: Sequence[int]) -> dict[Any, Any]:
    """The same steps for Espalier as `xrlinear_peer.py` has for peers."""
    if step == "train":
        return _train(system, folder, beams)
    bundle, test = Bundle.open(folder / system / "peers" / "1"), _loaded(folder, "test")
    engine = open_engine(bundle, "cpu")
    queries = QueryBatch(bundle.manifest.query, as_rows(test.points))
    singles = [queries.take(np.array([b])) for b in range(min(SINGLE, len(test)))]
    report: dict[Any, Any] = {}
    for beam in beams:
        one, all_of_them = SearchParams.uniform(1, beam, 10), SearchParams.uniform(len(queries), beam, 10)
        engine.search(singles[0], one)
        if step == "memory":
            return {"batch_mb": growth_mb(lambda: engine.search(queries, all_of_them))}  # noqa: B023 (called at once)
        times = []
        for query in singles:
            begin = time.perf_counter()
            engine.search(query, one)
            times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        engine.search(queries, all_of_them)
        report[beam] = {"ms_p50": 1e3 * float(np.median(times)), "queries_per_s": len(test) / (time.perf_counter() - begin)}
    return report


def _train(system: str, folder: Path, beams: Sequence[int]) -> dict[str, Any]:
    data, test = _loaded(folder, "train"), _loaded(folder, "test")
    shape = (BRANCHING, MAX_LEAF) if system == "espalier" else (2, data.labels.shape[1])
    seconds = []
    for _ in range(2):
        before = time.process_time()
        tree, chunks = train(data, LinearOptions(), *shape)
        seconds.append(round(time.process_time() - before, 2))
    report = {"train_cpu_s": seconds[0], "train_cpu_s_warm": seconds[1], "model_mb": round(chunks.nbytes / 1e6, 1)}
    report["memory_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
    bundle = bundle_of(folder / system, tree, chunks, LinearOptions())
    report["disk_mb"] = round(sum(file.stat().st_size for file in bundle.path.iterdir()) / 1e6, 1)
    engine = open_engine(bundle, "cpu")
    queries = QueryBatch(bundle.manifest.query, as_rows(test.points))
    for beam in beams:
        np.save(folder / f"{system}-{beam}.npy", engine.search(queries, SearchParams.uniform(len(queries), beam, M)).item_rows_BM)
    return report


def bundle_of(folder: Path, tree: Tree, chunks: Chunks, options: LinearOptions) -> Bundle:
    """What `python -m training fit` writes, without golden and held-out queries."""
    no_queries = written_features(SparseRows(np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0, np.float32), chunks.width))
    draft = ManifestDraft(
        name="peers",
        version=1,
        algorithm="xr-linear",
        created=datetime.now(UTC),
        query=FeaturesKind(width=chunks.width),
        ranking=options.ranking,
        search=SearchDefaults(beam_size=10, m=10, max_beam_size=10_000, max_m=10_000),
    )
    content = LinearContent(
        tree=tree,
        chunks=chunks,
        items=ItemTable.build(pa.table({"id": [str(label) for label in range(tree.item_count)]})),
        golden=pa.table({"features": no_queries} | {name: pa.array([], kind) for name, kind in GOLDEN_COLUMNS.items()}),
        heldout=pa.table({"features": no_queries, "relevant": pa.array([], pa.list_(pa.string()))}),
    )
    return write_bundle(folder / "peers" / "1", draft, content)


def _saved(folder: Path, name: str, data: LabelledPoints) -> None:
    save_npz(folder / f"{name}-points.npz", csr_matrix(data.points), compressed=False)
    save_npz(folder / f"{name}-labels.npz", csr_matrix(data.labels), compressed=False)


def _loaded(folder: Path, name: str) -> LabelledPoints:
    points, labels = (csr_array(load_npz(folder / f"{name}-{part}.npz")) for part in ("points", "labels"))
    return LabelledPoints(points, labels)


def _as_text(data: LabelledPoints, path: Path) -> None:
    points = data.points
    with path.open("w") as file:
        print(*points.shape, data.labels.shape[1], file=file)
        for b in range(len(data)):
            labels = ",".join(map(str, data.labels_of(b)))
            own = slice(points.indptr[b], points.indptr[b + 1])
            pairs = " ".join(f"{f}:{v:.7g}" for f, v in zip(points.indices[own].tolist(), points.data[own].tolist(), strict=True))
            print(labels, pairs, file=file)


def compare(data: LabelledPoints, test: LabelledPoints, peers: Sequence[str], beams: Sequence[int], peer_python: str) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _saved(folder, "train", data)
        _saved(folder, "test", test)
        _as_text(data, folder / "train.txt")
        reports: dict[str, dict[str, Any]] = {}
        for system in ("espalier", *peers):
            found = _step(folder, system, "train", beams, peer_python)
            if found is not None:
                reports[system] = found
        rounds = [{system: _step(folder, system, "time", beams, peer_python) or {} for system in reports} for _ in range(ROUNDS)]
        for system, report in reports.items():
            for beam in _beams(system, beams):
                row: Row = {"system": system, "beam_size": None if system == "ova" else beam}
                row |= quality(np.load(folder / f"{system}-{beam}.npy"), test, data)
                for figure, digits in (("ms_p50", 4), ("queries_per_s", None)):
                    row[figure] = round(float(np.median([times[system][str(beam)][figure] for times in rounds])), digits)
                if system in BATCHED:
                    row |= _step(folder, system, "memory", [beam], peer_python) or {}
                rows.append(row | report)
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return rows


def _beams(system: str, beams: Sequence[int]) -> Sequence[int]:
    """Without a tree there is no beam."""
    return beams[:1] if system == "ova" else beams


def _step(folder: Path, system: str, step: str, beams: Sequence[int], peer_python: str) -> dict[str, Any] | None:
    """The report of a process that runs one step; None where it fails."""
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    beams_text = ",".join(map(str, _beams(system, beams)))
    if system in OURS:
        command = [sys.executable, "-m", "benchmarks.xrlinear_peers", "--run", system, str(folder), step, "--beam", beams_text]
        environment["NUMBA_CACHE_DIR"] = str(folder / f"{system}-compiled")  # cold at first
    else:
        command = [peer_python, str(Path(__file__).with_name("xrlinear_peer.py")), system, str(folder), step, beams_text]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{system} is left out: {(done.stderr.strip().splitlines() or ['no message'])[-1]}", flush=True)
        return None
    print(system, step, done.stdout.strip().splitlines()[-1], flush=True)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


VARIANTS: tuple[tuple[tuple[int, int] | None, dict[str, Any]], ...] = (
    ((BRANCHING, MAX_LEAF), {}),
    ((16, 100), {}),
    ((64, 64), {}),
    ((256, 16), {}),
    (None, {}),
    ((BRANCHING, MAX_LEAF), {"gamma": 1.0}),
    ((BRANCHING, MAX_LEAF), {"gamma": 0.3}),
    ((BRANCHING, MAX_LEAF), {"gamma": 0.3, "beam_size": 20}),
    ((BRANCHING, MAX_LEAF), {"negatives": "teacher"}),
    ((BRANCHING, MAX_LEAF), {"prior": 0.0}),
    ((BRANCHING, MAX_LEAF), {"prior": 4.0}),
    ((BRANCHING, MAX_LEAF), {"threshold": 0.1}),
    ((BRANCHING, MAX_LEAF), {"threshold": 0.15}),
    ((BRANCHING, MAX_LEAF), {"cost": 0.5}),
    ((BRANCHING, MAX_LEAF), {"cost": 2.0}),
    ((BRANCHING, MAX_LEAF), {"loss": "logistic"}),
    ((BRANCHING, MAX_LEAF), {"loss": "logistic", "cost": 10.0}),
    ((BRANCHING, MAX_LEAF), {"loss": "logistic", "cost": 30.0}),
)
"""Trees (none: one-versus-all) and options that are compared."""


def choose(data: LabelledPoints) -> list[Row]:
    """Options trained on four fifths of the training points and measured on the rest: means over two such splits."""
    rows = []
    for shape, changed in VARIANTS:
        found = [_judged(data, split, shape or (2, data.labels.shape[1]), LinearOptions(**changed)) for split in range(2)]
        means = {name: round(float(np.mean([row[name] for row in found])), 3) for name in found[0]}
        rows.append({"branching": shape and shape[0], "max_leaf": shape and shape[1], "changed": changed} | means)
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return rows


def _judged(data: LabelledPoints, split: int, shape: tuple[int, int], options: LinearOptions) -> dict[str, float]:
    order = np.random.default_rng(split).permutation(len(data))
    validation, training = (data.take(np.sort(part)) for part in np.split(order, [len(order) // 5]))
    begin = time.process_time()
    tree, chunks = train(training, options, *shape)
    row = {"train_cpu_s": time.process_time() - begin, "model_mb": chunks.nbytes / 1e6}
    search = ChunkSearch(tree, chunks, options.ranking)
    points = as_rows(validation.points)
    leaves_BM = search.search(points, BeamParams.uniform(len(validation), 10, M)).leaves_BM
    found = np.where(leaves_BM >= 0, tree.leaf_item[leaves_BM - tree.leaf_offset], -1)
    wanted = BeamParams.uniform(len(validation), 10, 10)
    begin = time.process_time()
    search.search(points, wanted)
    row["ms_in_a_batch"] = 1e3 * (time.process_time() - begin) / len(validation)
    return row | quality(found, validation, training)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--set", default="eurlex-4k")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--beam", default="1,10,50")
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    beams = [int(beam) for beam in args.beam.split(",")]
    if args.run:
        system, folder, step = args.run
        print(json.dumps(ours(system, Path(folder), step, beams)))
        return
    if args.data is None:
        parser.error("--data is missing: the folder that holds the set")
    unknown = set(args.peers.split(",")) - set(PEERS) - {""}
    if unknown:
        parser.error(f"--peers: got {', '.join(sorted(unknown))}, expected some of {', '.join(PEERS)}")
    try:
        data, test = read_set(args.data, args.set)
    except EspalierError as error:
        parser.error(str(error))
    peers = [peer for peer in args.peers.split(",") if peer]
    rows = choose(data) if args.choose else compare(data, test, peers, beams, args.peer_python)
    if args.json:
        report = {"set": args.set, "date": datetime.now(UTC).date().isoformat(), "hardware": f"{hardware()}, one thread used", "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
