"""For every label its most relevant points: `assign` of XReg beside searches of every point, transposed, and one-versus-all regressors.

    python -m benchmarks.labelwise --data DIR --json F

DIR/ml-1m: see labelwise_set.py. A row a system, measured over all labels on the test points:

assign           XReg (three trees) and `assign` by the paper's rule · assign-released: by that of the authors' program
pointwise        a search of the same model for every point, its best items; an item's points are those that found it
xr-linear        the same of XR-Linear, which estimates whether a point is relevant at all
one-versus-all   a regressor of each label (the loss of XReg, one node), applied to all points
…-base-rate      the same with `linear.intercept = "base-rate"`
all-zero         no pair

`--per-item` are the points that a label gets (`assign`, one-versus-all), `--m` the items that a point gets (searches), by default as many
as there are; `--beam` is that of searches. WP@k, and XMAD@k by Eq. 1, with relevance divided by its maximum over training labels. XMAD
judges all points: where a label has more relevant points than it gets, those that are left out are errors of y. `pairs` says how many pairs
there are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.xreg.labelwise_set import SET, read_weighted
from benchmarks.papers.xreg.xmc_sets import npz_data, write_npz
from benchmarks.papers.xreg.xmc_systems import linear_config
from benchmarks.report_file import command_line, print_row, write_report
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from training.assign.best_points import BestPoints
from training.assign.command import Assignment, Rule, block_limit, scored_trees
from training.assign.labelwise import Labelwise
from training.data.csr import Csr, as_rows
from training.data.xmc import LabelledPoints
from training.graded_metrics import RankedErrors, wp_at_k
from training.graded_relevance import Relevance
from training.linear.run import fit_and_export

K = 1, 3, 5
Row = dict[str, Any]
MODELS: dict[str, Row] = {
    "xreg": {"kind": "xreg"},
    "base-rate": {"kind": "xreg", "linear": {"intercept": "base-rate"}},
    "xr-linear": {"kind": "xr-linear"},
    "one-versus-all": {"kind": "xreg", "tree": {"count": 1}},
    "one-versus-all-base-rate": {"kind": "xreg", "tree": {"count": 1}, "linear": {"intercept": "base-rate"}},
}
"""Configurations; of one-versus-all the leaves of the only node are all labels."""
SYSTEMS: dict[str, tuple[str, Rule | None]] = {
    "assign": ("xreg", "paper"),
    "assign-released": ("xreg", "released"),
    "pointwise": ("xreg", None),
    "assign-base-rate": ("base-rate", "paper"),
    "pointwise-base-rate": ("base-rate", None),
    "xr-linear": ("xr-linear", None),
    "one-versus-all": ("one-versus-all", "paper"),
    "one-versus-all-base-rate": ("one-versus-all-base-rate", "paper"),
}
"""Each with its model, and the rule of `assign`; None: a search of every point."""


def fitted(model: str, train: LabelledPoints, test: LabelledPoints, folder: Path, threads: int) -> Bundle:
    """A model of the training points, in its own folder. The test points are only for measuring."""
    work = folder / model
    (work / "work").mkdir(parents=True)
    write_npz(work, train, test)
    raw = MODELS[model] | {"name": model, "data": npz_data(work)}
    if model.startswith("one-versus-all"):
        raw["tree"] = raw["tree"] | {"max_leaf": max(2, train.labels.shape[1])}
    return fit_and_export(linear_config(raw), work / "models" / model / "1", work / "work", threads)


def assigned(bundle: Bundle, points: Csr, per_item: int, rule: Rule, threads: int) -> Relevance:
    """[labels, points]: the pairs that `assign` finds."""
    assignment = Assignment(per_item, rule=rule)
    trees = scored_trees(bundle, assignment, points.shape[0])
    best = BestPoints(np.arange(len(bundle.items)), per_item)
    labelwise = Labelwise(trees, bundle.manifest.ranking, np.ones(len(bundle.items), np.bool_), per_item, threads)
    size = min(assignment.block, block_limit(trees))
    for begin in range(0, points.shape[0], size):
        block = as_rows(points[begin : begin + size])
        best.add(labelwise.predict(block), len(block))
    pairs, _ = best.pairs()
    offset = np.concatenate([[0], np.cumsum(np.bincount(pairs.item, minlength=len(bundle.items)))]).astype(np.int64)
    return Relevance(offset, pairs.point, pairs.score.astype(np.float64), points.shape[0])


def transposed_search(bundle: Bundle, points: Csr, beam: int, m: int) -> Relevance:
    """[labels, points]: for each label, the points with the label among their m best."""
    engine = open_engine(bundle, "cpu")
    queries, items = QueryBatch(bundle.manifest.query, as_rows(points)), len(bundle.items)
    result = engine.search(queries, SearchParams.uniform(len(queries), beam, min(m, items)))
    engine.close()
    return Relevance.of_predictions(result.item_rows_BM, result.scores_BM, items).transposed()


def figures(true: Relevance, predicted: Relevance) -> Row:
    """WP@k in %, XMAD@k over all labels, and the number of pairs."""
    errors = RankedErrors.of(true, predicted)
    wp = {f"wp{k}": round(100 * wp_at_k(true, predicted, k), 2) for k in K}
    return wp | {f"xmad{k}": round(float(errors.xmad(k).mean()), 4) for k in K} | {"pairs": len(predicted.column_E)}


def quality(train: LabelledPoints, test: LabelledPoints, per_item: int, beam: int, m: int, threads: int) -> Iterator[Row]:
    """A row a system."""
    scale = float(train.labels.data.max())
    true = Relevance.of_rows(as_rows(test.labels)).times(1 / scale).transposed()
    nothing = Relevance(np.zeros(len(true) + 1, np.int64), np.zeros(0, np.int64), np.zeros(0), len(test))
    yield {"system": "all-zero"} | figures(true, nothing)
    with tempfile.TemporaryDirectory() as name:
        bundles: dict[str, Bundle] = {}
        for system, (model, rule) in SYSTEMS.items():
            if model not in bundles:
                bundles[model] = fitted(model, train, test, Path(name), threads)
            if rule is None:
                predicted = transposed_search(bundles[model], test.points, beam, m)
            else:
                predicted = assigned(bundles[model], test.points, per_item, rule, threads)
            yield {"system": system} | figures(true, predicted)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds ml-1m")
    parser.add_argument("--per-item", type=int, help="points of a label; by default as many as there are")
    parser.add_argument("--m", type=int, help="items of a point; by default as many as there are")
    parser.add_argument("--beam", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    try:
        train, test = read_weighted(args.data)
    except OSError as error:
        parser.error(str(error))
    header: Row = {"set": SET, "train_points": len(train), "test_points": len(test), "labels": train.labels.shape[1]}
    per_item, m = args.per_item or len(test), args.m or train.labels.shape[1]
    header |= {"beam": args.beam, "per_item": per_item, "m": m}
    printed_rows = []
    for row in quality(train, test, per_item, args.beam, m, args.threads):
        print_row(row)
        printed_rows.append(row)
        write_report(args.json, header | {"rows": printed_rows}, f"{args.threads} threads used")


if __name__ == "__main__":
    main()
