"""XR-Linear on a synthetic log of a million labels and a million features: training time and memory, then milliseconds per query.

    python -m benchmarks.xrlinear_scale [--labels 1048576] [--threads 1] [--peer-python peers/bin/python] --json F

Labels come in groups of 64. A label has 6 features of its own and 6 of its group's 48. A query has 12 features drawn with replacement from
its label's 12, and 8 common ones by Zipf's law. Training has one query per label, measuring has new ones. Everything is seeded. With
--peer-python, an interpreter with libpecos (see xrlinear_peers), PECOS searches the same tree with the same weights in the same run.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import scipy.sparse
from scipy.sparse import csr_array
from tqdm import tqdm

from benchmarks.report_file import command_line, write_report
from espalier.bundle import Bundle
from espalier.bundle_writer import LinearContent, write_bundle
from espalier.checks.golden import GOLDEN_COLUMNS
from espalier.chunks import Chunks
from espalier.engines import open_engine
from espalier.items import ItemTable
from espalier.manifest import ManifestDraft, SearchDefaults
from espalier.queries import FeaturesKind, QueryBatch
from espalier.search import SearchParams
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree
from training.data.csr import as_rows, normalised
from training.data.xmc import LabelledPoints
from training.linear.fit import fit_linear
from training.linear.label_features import pifa
from training.linear.prepare import written_features
from training.specification.linear import LinearOptions
from training.trees.hierarchical_kmeans import hierarchical_kmeans

GROUP, OWN, SHARED, GROUP_FEATURES, DRAWN, COMMON = 64, 6, 6, 48, 12, 8
TEST = 2000
OPTIONS = LinearOptions(gamma=1)
"""γ = 1 as in PECOS, so that both find the same labels."""
BEAMS = (10, 50, 200)


def make(labels: int, queries: int, seed: int) -> LabelledPoints:
    """Queries for random labels (all of them once, where there are as many), rows of length 1."""
    world = np.random.default_rng(0)  # the same for training and test
    features = labels
    own_features = world.integers(0, features, (labels, OWN))
    groups = world.integers(0, features, (-(-labels // GROUP), GROUP_FEATURES))
    shared = groups[np.arange(labels)[:, None] // GROUP, world.integers(0, GROUP_FEATURES, (labels, SHARED))]
    common = world.permutation(features)
    rng = np.random.default_rng(seed)
    label = rng.permutation(labels) if queries == labels else rng.integers(0, labels, queries)
    label_features = np.concatenate([own_features, shared], 1)[label[:, None], rng.integers(0, OWN + SHARED, (queries, DRAWN))]
    noise = common[np.minimum(rng.zipf(1.3, (queries, COMMON)) - 1, features - 1)]
    indices = np.concatenate([label_features, noise], 1)
    points = csr_array((np.ones(indices.size, np.float32), indices.ravel(), np.arange(0, indices.size + 1, indices.shape[1])),
                       shape=(queries, features))  # fmt: skip
    points.sum_duplicates()
    labelled = csr_array((np.ones(queries, np.float32), label.astype(np.int32), np.arange(queries + 1)), shape=(queries, labels))
    return LabelledPoints(normalised(points), labelled)


def train(labels: int, threads: int) -> tuple[Tree, Chunks, dict[str, Any]]:
    data = make(labels, labels, seed=1)
    begin, before = time.perf_counter(), time.process_time()
    tree = hierarchical_kmeans(pifa(data), 128, 32, 0, threads)
    tree_s = time.perf_counter() - begin
    print(f"tree of {tree.node_count} nodes over {tree.height} levels in {tree_s:.0f} s", flush=True)
    with tqdm(total=tree.leaf_offset, desc="nodes", mininterval=10) as bar:
        chunks = fit_linear(data, tree, OPTIONS, threads, 0, bar.update)
    report = {
        "tree_s": round(tree_s, 1),
        "train_s": round(time.perf_counter() - begin, 1),
        "train_cpu_s": round(time.process_time() - before, 1),
        "train_peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
        "weights": len(chunks.entry_weight),
        "model_mb": round(chunks.nbytes / 1e6),
    }
    print(report, flush=True)
    return tree, chunks, report


def search(bundle: Bundle, test: LabelledPoints) -> list[dict[str, Any]]:
    begin = time.perf_counter()
    engine = open_engine(bundle, "cpu")
    engine.warm_up()
    print(f"opened in {time.perf_counter() - begin:.1f} s", flush=True)
    queries = QueryBatch(bundle.manifest.query, as_rows(test.points))
    rows = []
    for beam in BEAMS:
        found_BM = engine.search(queries, SearchParams.uniform(len(queries), beam, 10)).item_rows_BM
        single_params = SearchParams.uniform(1, beam, 10)
        times = []
        for b in range(len(queries)):
            query = queries.take(np.array([b]))
            begin = time.perf_counter()
            engine.search(query, single_params)
            times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        engine.search(queries, SearchParams.uniform(len(queries), beam, 10))
        rate = len(queries) / (time.perf_counter() - begin)
        recall = float((found_BM == test.labels.indices[:, None]).any(1).mean())
        rows.append(_row("espalier", beam, recall, times, rate))
    return rows


def peer(folder: Path, test: LabelledPoints, tree: Tree, chunks: Chunks, python: str) -> list[dict[str, Any]]:
    """PECOS's search over the same weights."""
    scipy.sparse.save_npz(folder / "test.npz", scipy.sparse.csr_matrix(test.points))
    write_pecos(folder / "pecos", tree, chunks)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    beams = ",".join(map(str, BEAMS))
    completed = subprocess.run([python, "-c", PEER, str(folder), beams], env=environment, capture_output=True, text=True, check=False)
    if completed.returncode:
        print(f"pecos is left out: {(completed.stderr.strip().splitlines() or ['no message'])[-1]}", flush=True)
        return []
    rows = []
    for answer in json.loads(completed.stdout.splitlines()[-1]):
        labels = tree.leaf_item[np.array(answer["found"])]
        recall = float((labels == test.labels.indices[:, None]).any(1).mean())
        rows.append(_row("pecos", answer["beam"], recall, answer["times"], answer["rate"]))
    return rows


PEER = """
import json, sys, time
import numpy as np, scipy.sparse
from pathlib import Path
from pecos.xmc.xlinear.model import XLinearModel
folder, beams = Path(sys.argv[1]), [int(beam) for beam in sys.argv[2].split(",")]
model = XLinearModel.load(str(folder / "pecos"), is_predict_only=True)
points = scipy.sparse.load_npz(folder / "test.npz").astype(np.float32)
answers = []
for beam in beams:
    options = dict(beam_size=beam, only_topk=10, threads=1)
    found = model.predict(points, **options)
    singles = [points[b] for b in range(points.shape[0])]
    times = []
    for single in singles:
        begin = time.perf_counter()
        model.predict(single, **options)
        times.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    model.predict(points, **options)
    rate = points.shape[0] / (time.perf_counter() - begin)
    rows = [found.indices[a:b][np.argsort(-found.data[a:b], kind="stable")][:10] for a, b in zip(found.indptr[:-1], found.indptr[1:])]
    answers.append({"beam": beam, "times": times, "rate": rate, "found": [np.resize(row, 10).tolist() for row in rows]})
print(json.dumps(answers))
"""


def write_pecos(folder: Path, tree: Tree, chunks: Chunks) -> None:
    """The weights as PECOS saves them; its labels are the leaves in their order."""
    ranker = folder / "ranker"
    ranker.mkdir(parents=True)
    (folder / "param.json").write_text(json.dumps({"model": "XLinearModel"}))
    shape = {"nr_features": chunks.width, "nr_codes": tree.level_size(tree.height - 1), "nr_labels": tree.leaf_count}
    (ranker / "param.json").write_text(json.dumps({"model": "HierarchicalMLModel", "depth": tree.height} | shape))
    for depth in range(tree.height):
        level, parents = tree.level(depth + 1), tree.level(depth)
        rows = slice(chunks.chunk_row[parents.start], chunks.chunk_row[parents.stop])
        entries = slice(chunks.row_entry[rows.start], chunks.row_entry[rows.stop])
        counts = np.diff(chunks.row_entry[rows.start : rows.stop + 1])
        rows_of_parent = np.diff(chunks.chunk_row[parents.start : parents.stop + 1])
        parent = np.repeat(np.repeat(np.arange(parents.start, parents.stop), rows_of_parent), counts)
        column = tree.first_child[parent] + chunks.entry_child[entries] - level.start
        feature = np.repeat(chunks.row_feature[rows], counts)
        size = len(level)
        weights = scipy.sparse.coo_matrix(
            (
                np.concatenate([chunks.entry_weight[entries], chunks.bias[level.start : level.stop]]),
                (np.concatenate([feature, np.full(size, chunks.width)]), np.concatenate([column, np.arange(size)])),
            ),
            shape=(chunks.width + 1, size),
            dtype=np.float32,
        ).tocsc()
        of_parent = tree.parent[level.start : level.stop] - parents.start
        codes = scipy.sparse.csc_matrix((np.ones(size, np.float32), (np.arange(size), of_parent)), shape=(size, len(parents)))
        model_folder = ranker / f"{depth}.model"
        model_folder.mkdir()
        scipy.sparse.save_npz(model_folder / "W.npz", weights, compressed=False)
        scipy.sparse.save_npz(model_folder / "C.npz", codes, compressed=False)
        arguments = {"only_topk": 10, "post_processor": "l3-hinge"}
        limits = {"nr_labels": size, "nr_features": chunks.width, "nr_codes": len(parents), "bias": 1.0, "pred_kwargs": arguments}
        (model_folder / "param.json").write_text(json.dumps({"model": "MLModel"} | limits))


def _row(system: str, beam: int, recall: float, times: list[float], rate: float) -> dict[str, Any]:
    row = {
        "system": system, "beam_size": beam, "recall10": round(recall, 4), "ms_p50": round(1e3 * float(np.median(times)), 4),
        "ms_p99": round(1e3 * float(np.quantile(times, 0.99)), 4), "queries_per_s": round(rate),
    }  # fmt: skip
    print(row, flush=True)
    return row


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


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--labels", type=int, default=1 << 20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peer-python")
    args = parser.parse_args()
    if args.labels < 4096:
        parser.error(f"--labels: got {args.labels}, expected at least 4096")
    tree, chunks, report = train(args.labels, args.threads)
    test = make(args.labels, TEST, seed=2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = bundle_of(folder, tree, chunks, OPTIONS)
        rows = search(bundle, test)
        if args.peer_python:
            rows += peer(folder, test, tree, chunks, args.peer_python)
    sizes = {"labels": args.labels, "features": args.labels, "training_queries": args.labels, "threads": args.threads}
    write_report(args.json, sizes | report | {"rows": rows})


if __name__ == "__main__":
    main()
