"""Queries that are dense vectors: a tree, a two-tower of the same network, and nearest item means, on one set and one split.

    python -m benchmarks.dense_queries --data DIR --set eurlex-4k --json F

Vectors: tf-idf of a point's features (idf of the training points), of length 1, on the main axes of the training points (truncated SVD,
`--width` of them). Items are labels. The set's own test points are measured; everything is chosen by recall@50 of a tenth of the training
points. The tree and the two-tower have the same network, first weights, batches and optimiser: the two-tower is the tree with the leaves
alone, so its loss is the softmax over all items, and it is searched exactly.

Rows: {"method", "beam_size", "recall10", "recall50", "ndcg10", their standard errors "…_se", "ms_per_query", "train_seconds"}, and
"difference": recall@50 of the tree at `--beam` minus that of each other method with its 95 % interval. Times are of single queries on one
thread; the two-tower's, which is searched in torch, is not measured.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfTransformer

from espalier.errors import InvalidConfig
from espalier.hardware import hardware
from training.baselines.fusion import fuse
from training.baselines.methods import FOR_VECTORS, METHODS
from training.compare.clock import ms_per_query
from training.compare.contest import RECIPE, Contest
from training.compare.figures import Figures, figures_of, paired
from training.compare.outcome import measured_at_beams
from training.data.splits import EvaluationPair
from training.data.xmc import LabelledPoints, read_xmc
from training.deep.fit import fit
from training.deep.prepare import Prepared, prepare
from training.deep.topology import Topology
from training.deep.validation import ranked_by, search_pairs
from training.retrieval.task import Metric
from training.specification.deep import DeepConfig
from training.specification.models import deep_config
from training.trees.balanced import balanced_tree

SETS = {"eurlex-4k": ("eurlex_train.txt.gz", "eurlex_test.txt.gz")}
"""Name → the files of training and test points inside DIR/NAME."""
METRICS = {"recall10": Metric("recall", 10), "recall50": Metric("recall", 50), "ndcg10": Metric("ndcg", 10)}
CHOSEN_BY = METRICS["recall50"]
Row = dict[str, Any]


def write_vectors(train: LabelledPoints, test: LabelledPoints, width: int, seed: int, folder: Path) -> tuple[Path, Path]:
    """The two files of vectors with the labels of each point."""
    weights = TfidfTransformer(sublinear_tf=False).fit(train.points)
    axes = TruncatedSVD(width, random_state=seed).fit(weights.transform(train.points))
    files = folder / "train.parquet", folder / "test.parquet"
    for file, points in zip(files, (train, test), strict=True):
        vectors = axes.transform(weights.transform(points.points)).astype(np.float32)
        labels = [points.labels_of(b).astype(str).tolist() for b in range(len(points))]
        pq.write_table(pa.table({"vector": pa.array(list(vectors), pa.list_(pa.float32())), "items": labels}), file)
    return files


def configuration(name: str, train: Path, test: Path, options: argparse.Namespace) -> DeepConfig:
    """The default recipe for these files."""
    raw: dict[str, Any] = {
        "kind": "otm-robust",
        "name": name,
        "seed": options.seed,
        "data": {"log": str(train), "format": {"format": "vectors"}, "split": {"kind": "file", "test": str(test)}},
        "instances": {"targets": 16},
        "optimiser": {"steps": options.steps},
        "search": {"m": 50},
    }
    for text in options.option:
        key, _, value = text.partition("=")
        section, _, name = key.partition(".")
        raw.setdefault(section, {})[name] = json.loads(value)
    return deep_config(raw)


def two_tower(config: DeepConfig, prepared: Prepared, work: Path, test: Sequence[EvaluationPair]) -> tuple[NDArray[np.int64], float]:
    """int64[B, M] answers to the test queries, and the seconds of training."""
    items = prepared.interactions.item_count
    flat, begin = balanced_tree(np.arange(items), items), time.perf_counter()
    work.mkdir()
    model = fit(config, prepared, flat, torch.device("cpu"), work, resume=False).eval()
    seconds = time.perf_counter() - begin
    own, _ = ranked_by(config)
    return search_pairs(config, Topology(flat, torch.device("cpu")), model, test, 0.0, own, items, config.search.m)[0], seconds


def row_of(method: str, beam: int | None, measured: Figures, **costs: float) -> Row:
    figures = {name: measured.mean(metric) for name, metric in METRICS.items()}
    errors = {f"{name}_se": measured.standard_error(metric) for name, metric in METRICS.items()}
    print(f"{method} {beam or ''}: " + ", ".join(f"{name} {100 * value:.2f}" for name, value in (figures).items()), costs, flush=True)
    return {"method": method, "beam_size": beam} | figures | errors | costs


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    if options.set not in SETS:
        raise InvalidConfig("--set", options.set, f"one of {', '.join(SETS)}")
    points = [read_xmc(options.data / options.set / name) for name in SETS[options.set]]
    rows, figures = [], {}
    with tempfile.TemporaryDirectory() as folder:
        files = write_vectors(points[0], points[1], options.width, options.seed, Path(folder))
        config = configuration(options.set, *files, options)
        prepared = prepare(config, None, Path(folder) / "log")
        test = list(prepared.split.test)
        answers, seconds = two_tower(config, prepared, Path(folder) / "flat", test)
        figures["two-tower"] = figures_of(answers, test, list(METRICS.values()))
        rows.append(row_of("two-tower", None, figures["two-tower"], train_seconds=seconds))
        beams = [*options.beams, prepared.interactions.item_count]
        contest = Contest(config, prepared, Path(folder), beams, METHODS, fuse)
        for name in (*FOR_VECTORS, RECIPE):
            entry = contest.entry(name, False)
            for beam, measured in measured_at_beams(entry, test, list(METRICS.values()), False).items():
                fitted = entry.by_beam[beam]
                ms = ms_per_query(fitted.rank, [pair.query for pair in test], CHOSEN_BY.m, False)
                key = name if beam is None else f"{name} {beam}"
                figures[key] = measured
                rows.append(row_of(name, beam, measured, ms_per_query=ms, train_seconds=fitted.seconds))
    tree = figures[f"{RECIPE} {options.beam}"]
    differences = {name: asdict(paired([tree], [other], CHOSEN_BY)) for name, other in figures.items() if other is not tree}
    about = {"set": options.set, "width": options.width, "date": datetime.now(UTC).date().isoformat(), "hardware": hardware()}
    return about | {
        "config": config.model_dump(mode="json", exclude={"data"}),
        "queries": len(test),
        "rows": rows,
        "difference": differences,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR", required=True, help="folder in which DIR/NAME holds a set")
    parser.add_argument("--set", metavar="NAME", default="eurlex-4k", help=", ".join(SETS))
    parser.add_argument("--width", type=int, default=256, help="numbers of a vector")
    parser.add_argument("--beam", type=int, default=200, help="the tree's beam in the differences")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2000, help="most training steps")
    parser.add_argument("--option", action="append", default=[], metavar="SECTION.KEY=JSON", help="another value of the configuration")
    parser.add_argument("--json", type=Path, metavar="F")
    options = parser.parse_args()
    options.beams = sorted({50, options.beam})
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    report = benchmark(options)
    for name, difference in report["difference"].items():
        print(f"tree at beam {options.beam} − {name}: {difference['mean']:+.4f} [{difference['low']:+.4f}, {difference['high']:+.4f}]")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
