"""Why not ANN: recall against ms/query of a tree, of a product-DNN with exact and approximate search, and of scoring every item.

    python -m benchmarks.why_not_ann --model models/NAME/1 --data DIR --set NAME --work DIR --json F --plot F.png [--exclude-seen]

The log is the one that the model was trained on; the model says how it is read, so that `--log FILE` needs no configuration here.
The tree is searched by the serving engine at several beams, and with a beam of all leaves (`exhaustive`: its own scorer on every item).
Where its scorer is an inner product, its leaf rows are also scanned and searched by HNSW with its leaf-level states ("same encoder").
The product-DNN is trained here, once, on the training users of the model's own split, and kept in DIR; its items are found by a full scan,
by HNSW at several efSearch and by IVF at several nprobe (benchmarks/papers/product_search/ann.py; without faiss HNSW and IVF are left out).
Recall is over all test users of that split, or `--queries` of them.

Milliseconds are those of one query at a time on one thread of a CPU, from the item rows of a history to the item rows of the answer: the
user vector is computed and padding is done within them. All systems take turns in every round; a figure is the mean over queries
of each one's median over rounds, so that what else the machine did in between hardly counts. `encode_ms` is what it takes to make the
query's state, on the levels that the search scores or on the leaf level; `search_ms` is the rest. Both are null where an engine does the
two at once.

Rows: {"system", "knob", "m", "recall", "ms_per_query", "encode_ms", "search_ms"}. Milliseconds are those of a search for the largest m.

Legend: B queries, M results.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from benchmarks import real_logs
from benchmarks.papers.product_search.ann import Kind
from benchmarks.quality.ann_systems import M, System, product_dnn_systems, same_encoder_systems, timed, tree_system
from benchmarks.quality.leaderboard import numbers
from benchmarks.report_file import write_report
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import EspalierError, InvalidConfig, InvalidData
from espalier.metrics import precision_recall_f
from espalier.search import NO_ITEM
from training.baselines.product_dnn import ProductDnnConfig, fit_product_dnn
from training.baselines.product_dnn_model import ProductDnn, load_product_dnn
from training.compare.plot import plot_rows
from training.data.interactions import read_interactions
from training.data.splits import EvaluationPair, Split, split_log, without_seen
from training.specification.deep import DeepConfig
from training.specification.models import deep_config

MS = (10, 50, M)
BEAMS = "10,25,50,100,200,400,800"
EF_SEARCH = "200,400,800,1600"
NPROBE = "1,2,4,8,16,32,64"

Int64 = NDArray[np.int64]
Row = dict[str, Any]


def measure(systems: Sequence[System], pairs: Sequence[EvaluationPair], timed_queries: int, rounds: int) -> list[Row]:
    """Recall over all pairs, and ms/query over the first `timed_queries` of them."""
    relevant = [pair.relevant for pair in pairs]
    recalls: list[dict[int, float]] = []
    for system in tqdm(systems, desc="recall", unit="system", disable=None):
        found_BM = np.full((len(pairs), M), NO_ITEM, np.int64)
        for row, pair in zip(found_BM, pairs, strict=True):
            found = system.find(pair.history)
            row[: found.shape[1]] = found[0]
        recalls.append({m: float(precision_recall_f(found_BM, relevant, m)[1].mean()) for m in MS})
    costs = timed(systems, [pair.history for pair in pairs[:timed_queries]], rounds)
    return [
        {"system": system.name, "knob": system.knob, "m": m, "recall": recall[m], **cost}
        for system, recall, cost in zip(systems, recalls, costs, strict=True)
        for m in MS
    ]


def trained_product_dnn(split: Split, config: ProductDnnConfig, seed: int, work: Path) -> ProductDnn:
    """From `work`, if it was trained there before with this configuration, seed and log."""
    key = hashlib.sha256(repr((config, seed, split.lists.fingerprint)).encode()).hexdigest()[:16]
    file = work / f"product-dnn-{key}.safetensors"
    if not file.exists():
        work.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".part")
        fit_product_dnn(split, config, seed=seed).save(partial)
        partial.replace(file)
    return load_product_dnn(file)


def read_split(bundle: Bundle, config: DeepConfig, log: Path, folder: Path) -> Split:
    """Of the log that the model was trained on.

    Raises InvalidConfig for another log, whose item rows would be other items.
    """
    interactions = read_interactions(log, config.data.format, folder)
    if interactions.vectors_UF is not None:
        raise InvalidConfig("--model", str(bundle.path), "a model of histories")
    if interactions.fingerprint != bundle.manifest.data.get("sha256"):
        raise InvalidConfig("log", str(log), f"the log that {bundle.path} was trained on")
    return split_log(interactions, config.data.split, config.data.format, folder, seed=config.seed)


def print_rows(rows: Sequence[Row]) -> None:
    print(f"{'system':24s} {'knob':>7} {'ms/query':>9} {'encode':>7} {'search':>7}  {'  '.join(f'R@{m:<4d}' for m in MS)}")
    for first in rows[:: len(MS)]:
        recalls = [row["recall"] for row in rows if (row["system"], row["knob"]) == (first["system"], first["knob"])]
        knob = "" if first["knob"] is None else first["knob"]
        parts = " ".join(f"{'':7s}" if first[part] is None else f"{first[part]:7.3f}" for part in ("encode_ms", "search_ms"))
        found = "  ".join(f"{100 * recall:6.2f}" for recall in recalls)
        print(f"{first['system']:24s} {knob:>7} {first['ms_per_query']:9.3f} {parts}  {found}")


def plotted(rows: Sequence[Row], title: str, file: Path) -> None:
    """Recall@M against ms/query (log scale), one line per system, its knobs beside the points."""
    metric = f"recall@{M}"
    points = [
        {"method": row["system"], "beam_size": row["knob"], "ms_per_query": row["ms_per_query"]}
        | {"figures": {metric: {"mean": row["recall"], "se": 0}}}
        for row in rows
        if row["m"] == M
    ]
    plot_rows(points, (), metric, title, file, "beam, efSearch, nprobe")


def run(options: argparse.Namespace) -> None:
    real = real_logs.load(options)
    bundle = Bundle.open(options.model)
    config = deep_config(bundle.manifest.training)
    exclude_seen: bool = options.exclude_seen
    loss: Literal["full", "sampled"] = options.loss
    # The same queries, its own targets.
    instances = config.windowed_instances.model_copy(update={"targets": ProductDnnConfig().instances.targets})
    settings = ProductDnnConfig(instances, loss=loss, max_steps=options.steps, exclude_seen=exclude_seen)
    with tempfile.TemporaryDirectory() as folder:
        split = read_split(bundle, config, real.log, Path(folder))
        model = trained_product_dnn(split, settings, config.seed, options.work)
        pairs = list(split.test)
    pairs = (without_seen(pairs) if exclude_seen else pairs)[: options.queries]
    if not pairs:
        raise InvalidData("test users", 0, "at least one with something relevant")
    engine = open_engine(bundle, "cpu")
    leaves = bundle.tree.leaf_count
    systems = [tree_system(engine, "tree", beam, M, exclude_seen) for beam in numbers("--beam", options.beam) if beam < leaves]
    systems.append(tree_system(engine, "tree exhaustive", leaves, M, exclude_seen))
    efforts: dict[Kind, list[int]] = {
        "hnsw": numbers("--ef-search", options.ef_search),
        "ivf": numbers("--nprobe", options.nprobe),
    }
    with threadpool_limits(1):
        systems += same_encoder_systems(bundle, efforts["hnsw"], exclude_seen)
        systems += product_dnn_systems(model, efforts, exclude_seen)
        rows = measure(systems, pairs, options.timed, options.rounds)
    name = f"{bundle.manifest.name} version {bundle.manifest.version}"
    title = f"{name}, {leaves} leaves, {len(pairs)} test users{', seen items excluded' if exclude_seen else ''}"
    print(title)
    print_rows(rows)
    if options.json:
        product_dnn = asdict(settings) | {"instances": settings.instances.model_dump(mode="json"), "curve": model.curve}
        sizes = {"items": bundle.tree.item_count, "queries": len(pairs), "exclude_seen": exclude_seen, "rounds": options.rounds}
        about = {"model": bundle.manifest.name, "version": bundle.manifest.version, "log": real.name if options.set else real.log.name}
        write_report(options.json, about | sizes | {"product_dnn": product_dnn, "rows": rows}, "one thread used")
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        plotted(rows, title, options.plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="models/NAME/VERSION")
    real_logs.add_arguments(parser)
    parser.add_argument("--work", type=Path, required=True, help="where the trained product-DNN is kept")
    parser.add_argument("--beam", default=BEAMS, help="beams of the tree, comma-separated")
    parser.add_argument("--ef-search", default=EF_SEARCH, help=f"knobs of HNSW; below {M} they are {M}")
    parser.add_argument("--nprobe", default=NPROBE, help="knobs of IVF")
    parser.add_argument("--loss", choices=("full", "sampled"), default="sampled", help="of the product-DNN")
    parser.add_argument("--steps", type=int, default=ProductDnnConfig().max_steps, help="at most so many steps of the product-DNN")
    parser.add_argument("--exclude-seen", action="store_true", help="leave out the items of the history, for all systems")
    parser.add_argument("--queries", type=int, help="so many test users instead of all")
    parser.add_argument("--timed", type=int, default=300, help="queries of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="for training the product-DNN")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="PNG or SVG")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("training").setLevel(logging.INFO)
    torch.set_num_threads(options.threads)
    try:
        run(options)
    except EspalierError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
