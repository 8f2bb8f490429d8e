"""What judgements of texts are worth: a ranker on the candidates of a model that has seen only the table of products.

    python -m benchmarks.judged_texts --data DIR --set psearch --json F        # and the sets of `product_sets.py` but `mixed`

The queries of a set are dealt into five parts, three times. Of each part the other four are judgements: an eighth of them chooses the
weights. Candidates are the best 100; `fit-ranker`'s defaults otherwise.

retrieval      the order of the search
without texts  a ranker of position, rank and score
ranker         all features that `fit-ranker` takes by default
lambdamart     LightGBM's on these features, 15 leaves, rate .05, row and feature shares .8

Rows: {"system", "ndcg10", "gain", "gain_se"}, in points; gain over retrieval, its standard error over queries. Products that were not
judged count as 0.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.nce.boosting import BoostingConfig, fit_boosted_trees
from benchmarks.papers.product_search.own_words import fitted
from benchmarks.papers.product_search.product_sets import SETS, Products, products_of
from benchmarks.report_file import command_line, print_row, write_report
from espalier.arrays import Float32, Float64, Int64
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import EspalierError
from espalier.metrics import ndcg
from espalier.queries import TextKind, encode_texts
from espalier.rank_features import RETRIEVAL
from espalier.rerank.features import RankFeatures
from training.rankers.candidates import Candidates, retrieve
from training.rankers.fit import fit_ranker
from training.rankers.graded_queries import GradedQueries, QuerySplit
from training.rankers.second_stage import features_of
from training.specification.ranker import HighwayConfig

DEPTH, M, PARTS, TIMES = 100, 10, 5, 3
TREES = BoostingConfig(loss="lambdarank", trees=300, learning_rate=0.05, leaves=15, row_share=0.8, feature_share=0.8, random_splits=False)


def graded(bundle: Bundle, products: Products) -> GradedQueries:
    kind = bundle.manifest.query
    assert isinstance(kind, TextKind)
    grades = [{row: grade for row, grade in right.items() if grade} for right in products.right.values()]
    return GradedQueries(
        encode_texts(kind, bundle.vectoriser, list(products.right)),
        [np.array([*right], np.int64) for right in grades],
        [np.array([*right.values()], np.float32) for right in grades],
    )


def ndcg_of(found: Candidates, scores_R: Float32 | None) -> Float64:
    """float64[B]: nDCG@10 of each query."""
    rows_BM = found.rows_BM if scores_R is None else found.ordered(scores_R)
    lists = [found.graded_list(b, row_M[:M], M) for b, row_M in enumerate(rows_BM)]
    offset, grades_R = np.concatenate([[0], np.cumsum([*map(len, lists)])]), np.concatenate(lists)
    return ndcg(-np.arange(len(grades_R), dtype=np.float64), grades_R, offset, M)


def measured(products: Products) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        bundle = fitted(products, Path(name))
        queries = graded(bundle, products)
        print(f"{len(bundle.items)} products, {len(queries)} queries", flush=True)
        every = features_of(bundle, (), QuerySplit(queries, queries, queries))
        gained: dict[str, list[Float64]] = {}
        positions: list[Int64] = []
        engine = open_engine(bundle, "cpu")
        for time in range(TIMES):
            parts = np.array_split(np.random.default_rng(time).permutation(len(queries)), PARTS)
            for part in range(PARTS):
                judged = np.concatenate([parts[other] for other in range(PARTS) if other != part])
                valid, train = np.split(judged, [max(2, len(judged) // 8)])
                positions.append(parts[part])
                splits = [queries.take(rows) for rows in (train, valid, parts[part])]
                for system, figures_B in _figures(bundle, engine, every, splits, time).items():
                    gained.setdefault(system, []).append(figures_B)
    return [_row(system, figures, gained["retrieval"], positions) for system, figures in gained.items()]


def _figures(bundle: Bundle, engine: Any, every: RankFeatures, splits: Sequence[GradedQueries], seed: int) -> dict[str, Float64]:
    beam = max(bundle.manifest.search.beam_size, DEPTH)
    sets = {
        "without texts": [retrieve(engine, RankFeatures(bundle, RETRIEVAL), split, DEPTH, beam) for split in splits],
        "ranker": [retrieve(engine, every, split, DEPTH, beam) for split in splits],
    }
    figures = {"retrieval": ndcg_of(sets["ranker"][2], None)}
    for system, (train, valid, test) in sets.items():
        ranker = fit_ranker(train.ranking, valid.ranking, HighwayConfig(seed=seed))
        figures[system] = ndcg_of(test, ranker.scores(test.ranking.features_RF))
    train, valid, test = sets["ranker"]
    trees = fit_boosted_trees(train.ranking, valid.ranking, TREES)
    return figures | {"lambdamart": ndcg_of(test, trees.scores(test.ranking.features_RF))}


def _row(system: str, figures: Sequence[Float64], retrieval: Sequence[Float64], positions: Sequence[Int64]) -> dict[str, Any]:
    where = np.concatenate(positions)
    gain_B = np.bincount(where, np.concatenate(figures) - np.concatenate(retrieval)) / TIMES
    row = {
        "system": system,
        "ndcg10": round(100 * float(np.concatenate(figures).mean()), 2),
        "gain": round(100 * float(gain_B.mean()), 2),
        "gain_se": round(100 * float(gain_B.std(ddof=1)) / len(gain_B) ** 0.5, 2),
    }
    print_row(row)
    return row


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds the sets")
    parser.add_argument("--set", choices=[name for name in SETS if name != "mixed"], required=True)
    options = parser.parse_args()
    try:
        rows = measured(products_of(options.data, options.set, 0))
    except EspalierError as error:
        raise SystemExit(f"error: {error}") from None
    write_report(options.json, {"set": options.set, "rows": rows})


if __name__ == "__main__":
    main()
