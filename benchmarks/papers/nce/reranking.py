"""The second stage end to end: the gain of re-ranking a model's candidates, by loss, compared to LambdaMART on the same features.

    python -m benchmarks.reranking --model models/NAME/VERSION [--data LOG] --json F [--users training|validation] [--exclude-seen]

Candidates are the best `--depth` (200) that the model retrieves with its default beam; features are all that `fit-ranker` takes by default.
Every system learns from the same candidates of the same queries, stops by the same validation queries, and is measured on test users:

retrieval       the order of the search
elimination     the ranker of `fit-ranker`, its defaults
plackett-luce   the same with the other loss; `linear …` the same with linear functions
lambdamart      LightGBM's, its leaves and rate chosen on validation queries; it is no part of a bundle, so has no ms

Rows: {"system", "ndcg10", "ndcg10_se", "recall10", "train_cpu_s", "ms"}. NDCG's divisor counts relevant items that were not retrieved, its
standard error is over queries. ms is the stage alone, median of single queries on one thread: features, ranker.onnx, order. `p` in the
report: paired t-test over test queries of elimination against each other system.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import ttest_rel

from benchmarks.papers.nce.boosting import BoostedTrees, BoostingConfig, fit_boosted_trees
from benchmarks.report_file import command_line, write_report
from espalier.arrays import Float32, Float64
from espalier.bundle import Bundle
from espalier.bundle_writer import with_ranker
from espalier.engines import open_engine
from espalier.manifest import RankerInfo
from espalier.metrics import ndcg_at_m, precision_recall_f
from espalier.rerank.ranker import Reranker
from espalier.search import SearchParams
from training.rankers.candidates import Candidates
from training.rankers.export import ranker_onnx
from training.rankers.graded_queries import GradedQueries
from training.rankers.log_queries import Users, from_log
from training.rankers.second_stage import StageConfig, collect, features_of, fit
from training.specification.ranker import HighwayConfig, ranker_config

M = 10
TREES = tuple(itertools.product((7, 15, 31, 63), (0.02, 0.05, 0.1)))


def quality(candidates: Candidates, scores_R: Float32 | None) -> tuple[Float64, Float64]:
    """float64[B] each: nDCG@10 and recall@10 of every query with a relevant item."""
    rows_BM = candidates.rows_BM if scores_R is None else candidates.ordered(scores_R)
    judged_queries = [b for b, rows in enumerate(candidates.relevant) if len(rows)]
    relevant = [candidates.relevant[b] for b in judged_queries]
    return ndcg_at_m(rows_BM[judged_queries], relevant, M), precision_recall_f(rows_BM[judged_queries], relevant, M)[1]


def ms_of_stage(reranker: Reranker, bundle: Bundle, graded: GradedQueries, depth: int, most: int = 300) -> float:
    """Median milliseconds of re-ranking one query's candidates."""
    engine, times = open_engine(bundle, "cpu"), []
    for b in range(min(most, len(graded))):
        query = graded.queries.take(np.array([b]))
        result = engine.search(query, SearchParams.uniform(1, bundle.manifest.search.beam_size, depth))
        begin = time.perf_counter()
        reranker.rerank(query, result, depth)
        times.append(time.perf_counter() - begin)
    return float(np.median(times[10:]) * 1e3)


def row_of(system: str, qualities: tuple[Float64, Float64], cpu_s: float, ms: float | None) -> dict[str, Any]:
    ndcg_B, recall_B = qualities
    return {
        "system": system,
        "ndcg10": round(100 * float(ndcg_B.mean()), 2),
        "ndcg10_se": round(100 * float(ndcg_B.std(ddof=1) / np.sqrt(len(ndcg_B))), 2),
        "recall10": round(100 * float(recall_B.mean()), 2),
        "train_cpu_s": round(cpu_s, 1),
        "ms": None if ms is None else round(ms, 4),
    }


def best_lambdamart(train: Candidates, valid: Candidates) -> tuple[BoostedTrees, str, float]:
    """LambdaMART with the leaves and rate that are best on validation queries; and the CPU seconds of that one training."""
    trials = []
    for leaves, rate in TREES:
        config = BoostingConfig(
            loss="lambdarank", trees=300, learning_rate=rate, leaves=leaves, row_share=0.8, feature_share=0.8, random_splits=False
        )
        begin = time.process_time()
        trees = fit_boosted_trees(train.ranking, valid.ranking, config)
        cpu_s = time.process_time() - begin
        print(
            f"  lambdamart {leaves} leaves, rate {rate}: validation {trees.validation:.4f}, {trees.trees} trees, {cpu_s:.0f} s", flush=True
        )
        trials.append((trees.validation or 0.0, trees, f"{leaves} leaves, rate {rate}, {trees.trees} trees", cpu_s))
    _, trees, description, cpu_s = max(trials, key=lambda entry: entry[0])
    return trees, description, cpu_s


def measured(bundle: Bundle, data: Path | None, users: Users, exclude_seen: bool, depth: int, queries: int) -> dict[str, Any]:
    query_sets = from_log(bundle, data, users, exclude_seen)
    engine = open_engine(bundle, "cpu")
    stage = StageConfig(depth, (), queries, HighwayConfig())
    features = features_of(bundle, (), query_sets)
    train, valid, test = collect(bundle, engine, features, query_sets, stage)
    if test is None:
        raise SystemExit(f"{bundle.path}: no test queries")
    qualities = {"retrieval": quality(test, None)}
    rows = [row_of("retrieval", qualities["retrieval"], 0, None)]
    print(rows[-1], flush=True)
    for function in ("highway", "linear"):
        for loss in ("elimination", "plackett-luce"):
            config = ranker_config(kind=function, loss=loss)
            begin = time.process_time()
            ranker = fit(train, valid, config)
            cpu_s = time.process_time() - begin
            system = loss if function == "highway" else f"{function}, {loss}"
            qualities[system] = quality(test, ranker.scores(test.ranking.features_RF))
            ms = None
            if system == "elimination":
                with tempfile.TemporaryDirectory() as folder:
                    info = RankerInfo(features=ranker.feature_names, depth=depth, max_depth=depth)
                    path = Path(folder) / bundle.manifest.name / "1"
                    added = with_ranker(bundle, path, info, ranker_onnx(ranker), features.texts)
                    ms = ms_of_stage(Reranker(added), added, query_sets.test, depth)
            rows.append(row_of(system, qualities[system], cpu_s, ms))
            print(rows[-1], flush=True)
    trees, description, cpu_s = best_lambdamart(train, valid)
    qualities["lambdamart"] = quality(test, trees.scores(test.ranking.features_RF))
    rows.append(row_of("lambdamart", qualities["lambdamart"], cpu_s, None) | {"chosen": description})
    print(rows[-1], flush=True)
    ours = qualities["elimination"][0]
    p = {name: float(ttest_rel(ours, other[0]).pvalue) for name, other in qualities.items() if name != "elimination"}
    counts = {"train": len(train.relevant), "validation": len(valid.relevant), "test": len(ours)}
    return {"queries": counts, "features": list(train.ranking.feature_names), "rows": rows, "p": p}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="the log, where it is no longer at the configured place")
    parser.add_argument("--users", choices=("training", "validation"), default="training")
    parser.add_argument("--exclude-seen", action="store_true")
    parser.add_argument("--depth", type=int, default=200)
    parser.add_argument("--queries", type=int, default=20_000)
    options = parser.parse_args()
    bundle = Bundle.open(options.model)
    report = measured(bundle, options.data, options.users, options.exclude_seen, options.depth, options.queries)
    header = {"model": bundle.manifest.name, "users": options.users, "exclude_seen": options.exclude_seen, "depth": options.depth}
    write_report(options.json, header | report)


if __name__ == "__main__":
    main()
