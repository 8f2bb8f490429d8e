"""Table 1 and Figure 3 of NCE on public sets: rank functions and losses beside each other, and LambdaMART.

    python -m benchmarks.nce_tables --data DIR --set l2r-mq2007-agg --json F --plot F.png
    python -m benchmarks.nce_tables --data DIR --set l2r-lightgbm-example --seeds 5 --functions linear,highway --json F

Sets: `l2r-mq2007-agg` (LETOR 4.0, S1.txt.gz … S5.txt.gz; fold k trains on three parts, chooses on the fourth, is measured on the fifth),
`l2r-mq2008-partial` (train.txt.gz, test.txt.gz) and `l2r-lightgbm-example` (rank.train.gz, rank.test.gz, and their .query.gz), of which a
fifth of the training queries, drawn by the seed, chooses. Of every function and loss all candidates below are trained; the one with the
best NDCG@10 on the validation queries, which also say when each of them ends, is measured on the test queries. CPU seconds are those of
the chosen candidate.

Queries without a relevant item count 0. Figures are means over queries (and seeds), ± their standard error; losses are compared by the
differences on the same queries (two-sided t test and Wilcoxon's signed-rank test). Rows that the JSON file has already are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from espalier.errors import InvalidData
from espalier.metrics import average_precision, expected_reciprocal_rank, ndcg
from loadtest.hardware import hardware
from training.baselines.boosting import BoostingConfig, fit_boosted_trees
from training.baselines.rank_svm import fit_rank_svm
from training.data.letor import read_letor, read_svmlight
from training.data.ranking_set import RankingSet, concatenated
from training.rankers.config import RankerConfig, Scaling, Ties
from training.rankers.fit import fit_ranker

SETS = ("l2r-mq2007-agg", "l2r-lightgbm-example", "l2r-mq2008-partial")
METHODS = (
    ("rank-svm", "hinge"),
    ("linear", "plackett-luce"),
    ("linear", "elimination"),
    ("boosting", "plackett-luce"),
    ("boosting", "elimination"),
    ("highway", "plackett-luce"),
    ("highway", "elimination"),
    ("lambdamart", "lambdarank"),
)
FIGURES = ("err", "ndcg1", "ndcg5", "map")
PAPER = {
    ("rank-svm", "hinge"): (0.488, 0.681, 0.666),
    ("linear", "plackett-luce"): (0.495, 0.699, 0.671),
    ("linear", "elimination"): (0.503, 0.709, 0.680),
    ("boosting", "plackett-luce"): (0.497, 0.697, 0.673),
    ("boosting", "elimination"): (0.506, 0.705, 0.681),
    ("highway", "plackett-luce"): (0.501, 0.705, 0.688),
    ("highway", "elimination"): (0.509, 0.719, 0.697),
}
"""ERR, NDCG@1 and NDCG@5 on the large Yahoo set, which is not public."""
Row = dict[str, Any]
Scores = Callable[[NDArray[np.float32]], NDArray[np.float32]]


@dataclass(frozen=True)
class Fold:
    """What is learned from, chosen by and measured on."""

    name: int
    train: RankingSet
    valid: RankingSet
    test: RankingSet
    max_grade: float


def read_folds(folder: Path, name: str, seed: int) -> list[Fold]:
    """The folds of a set; of a set without folds the one that a seed makes."""
    if name == "l2r-mq2007-agg":
        parts = [read_letor(folder / f"S{part}.txt.gz") for part in range(1, 6)]
        return [
            Fold(k + 1, concatenated([parts[(k + i) % 5] for i in range(3)]), parts[(k + 3) % 5], parts[(k + 4) % 5], 2.0) for k in range(5)
        ]
    if name == "l2r-lightgbm-example":
        train, test = (
            read_svmlight(folder / f"rank.{part}.gz", folder / f"rank.{part}.query.gz", features=300) for part in ("train", "test")
        )
        max_grade = 4.0
    elif name == "l2r-mq2008-partial":
        train, test = (read_letor(folder / f"{part}.txt.gz") for part in ("train", "test"))
        max_grade = 2.0
    else:
        raise InvalidData("--set", name, " or ".join(SETS))
    return [Fold(1, *train.split(0.2, seed), test, max_grade)]


# -- candidates -----------------------------------------------------------------------------------------------------------

# The lists were made with validation figures; both losses have the same.
NETWORK = RankerConfig(
    hidden=64,
    optimizer="adam",
    learning_rate=0.003,
    batch_queries=16,
    missing=True,
    max_norm=None,
    max_epochs=200,
    patience=15,
    average=4.0,
)
LAMBDAMART = BoostingConfig(loss="lambdarank", trees=500, row_share=0.8, feature_share=0.5, random_splits=False)


def candidates(function: str, loss: Any, seed: int) -> list[RankerConfig | BoostingConfig | dict[str, Any]]:
    """What is tried for a function and a loss."""
    pairs = itertools.product
    if function == "rank-svm":
        return [
            {"cost": cost, "scaling": scaling, "missing": True} for cost, scaling in pairs((0.01, 0.1, 1.0, 10.0), ("z-score", "quantile"))
        ]
    if function in ("linear", "highway"):
        network = replace(NETWORK, function="linear", learning_rate=0.02) if function == "linear" else NETWORK
        return [
            replace(network, loss=loss, seed=seed, scaling=scaling, ties=ties) for scaling, ties in pairs(get_args(Scaling), get_args(Ties))
        ]
    if function == "boosting":
        return [BoostingConfig(loss=loss, seed=seed, leaves=leaves) for leaves in (31, 512)]
    return [replace(LAMBDAMART, seed=seed, leaves=leaves, learning_rate=rate) for leaves, rate in pairs((7, 15, 31), (0.03, 0.1))]


def fit(candidate: RankerConfig | BoostingConfig | dict[str, Any], fold: Fold) -> tuple[Scores, float]:
    """Scores of a trained candidate, and its NDCG on the validation queries."""
    if isinstance(candidate, RankerConfig):
        scores: Scores = fit_ranker(fold.train, fold.valid, candidate).scores
    elif isinstance(candidate, BoostingConfig):
        scores = fit_boosted_trees(fold.train, fold.valid, candidate).scores
    else:
        scores = fit_rank_svm(fold.train, **candidate).scores
    valid = fold.valid
    return scores, float(ndcg(scores(valid.features_RF), valid.grades_R, valid.query_offset, 10).mean())


# -- rows -----------------------------------------------------------------------------------------------------------------


def run(function: str, loss: str, fold: Fold, seed: int) -> Row:
    """Choose among the candidates and measure."""
    best: tuple[float, float, Scores, dict[str, Any]] | None = None
    tried = []
    for candidate in candidates(function, loss, seed):
        before = time.process_time()
        scores, value = fit(candidate, fold)
        seconds = time.process_time() - before
        options = candidate if isinstance(candidate, dict) else asdict(candidate)
        tried.append((round(value, 4), options))
        if best is None or value > best[0]:
            best = value, seconds, scores, options
    if best is None:
        raise InvalidData("--functions", function, "one with candidates")
    value, seconds, scores, options = best
    test = fold.test
    asked = (scores(test.features_RF), test.grades_R, test.query_offset)
    per_query = {
        "err": expected_reciprocal_rank(*asked, fold.max_grade),
        "ndcg1": ndcg(*asked, 1),
        "ndcg5": ndcg(*asked, 5),
        "map": average_precision(*asked),
    }
    differing = {name for name in options if len({json.dumps(other[name]) for _, other in tried}) > 1}
    return {
        "function": function,
        "loss": loss,
        "fold": fold.name,
        "seed": seed,
        **{name: round(float(values.mean()), 4) for name, values in per_query.items()},
        "train_cpu_s": round(seconds, 2),
        "validation": round(value, 4),
        "chosen": {name: options[name] for name in sorted(differing)},
        "tried": [{"validation": found, **{name: other[name] for name in sorted(differing)}} for found, other in tried],
        "per_query": {name: [round(float(number), 4) for number in values] for name, values in per_query.items()},
    }


def measure(name: str, folder: Path, functions: Sequence[str], seeds: int, file: Path | None) -> dict[str, Any]:
    """All rows, those of an earlier run's file among them."""
    report: dict[str, Any] = {"set": name, "hardware": hardware(), "rows": []}
    if file is not None and file.exists():
        report = json.loads(file.read_text())
        if report["set"] != name:
            raise InvalidData("--json", str(file), f"a file of the set {name}")
    report["date"] = datetime.now(UTC).date().isoformat()
    done = {(row["function"], row["loss"], row["fold"], row["seed"]) for row in report["rows"]}
    for seed in range(1, seeds + 1):
        for fold in read_folds(folder, name, seed):
            for function, loss in METHODS:
                if function not in functions or (function, loss, fold.name, seed) in done:
                    continue
                row = run(function, loss, fold, seed)
                report["rows"].append(row)
                shown = {key: row[key] for key in ("function", "loss", "fold", "seed", *FIGURES, "train_cpu_s", "validation", "chosen")}
                print(json.dumps(shown), flush=True)
                if file is not None:
                    file.write_text(json.dumps(report) + "\n")
    report["summary"] = summary(report["rows"])
    if file is not None:
        file.write_text(json.dumps(report) + "\n")
    return report


# -- summary --------------------------------------------------------------------------------------------------------------


def per_query(rows: Sequence[Row], function: str, loss: str, figure: str) -> NDArray[np.float64]:
    """One value for each test query, the mean over seeds, in the order of the folds."""
    own = [row for row in rows if (row["function"], row["loss"]) == (function, loss)]
    folds = sorted({row["fold"] for row in own})
    return np.concatenate([np.mean([row["per_query"][figure] for row in own if row["fold"] == fold], axis=0) for fold in folds])


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Means with standard errors over queries, and paired differences with p values."""
    methods = [method for method in METHODS if any((row["function"], row["loss"]) == method for row in rows)]
    means: dict[str, Any] = {}
    for function, loss in methods:
        values = {figure: per_query(rows, function, loss, figure) for figure in FIGURES}
        seconds = [row["train_cpu_s"] for row in rows if (row["function"], row["loss"]) == (function, loss)]
        means[f"{function}, {loss}"] = {name: [round(float(v.mean()), 4), round(float(stats.sem(v)), 4)] for name, v in values.items()} | {
            "train_cpu_s": round(float(np.mean(seconds)), 2)
        }
    functions = ("linear", "boosting", "highway")
    pairs = [((function, "elimination"), (function, "plackett-luce")) for function in functions]
    pairs += [((function, "elimination"), ("lambdamart", "lambdarank")) for function in ("boosting", "highway")]
    pairs += [(("highway", "elimination"), ("boosting", "elimination")), (("linear", "elimination"), ("rank-svm", "hinge"))]
    differences: dict[str, Any] = {}
    for first, second in pairs:
        if first in methods and second in methods:
            name = f"{', '.join(first)} − {', '.join(second)}"
            differences[name] = {figure: paired(per_query(rows, *first, figure), per_query(rows, *second, figure)) for figure in FIGURES}
    return {"means": means, "differences": differences}


def paired(first_Q: NDArray[np.float64], second_Q: NDArray[np.float64]) -> dict[str, float]:
    """The mean difference over the same queries, its standard error, and p values of a t test and of Wilcoxon's signed-rank test."""
    difference_Q = first_Q - second_Q
    mean = round(float(difference_Q.mean()), 4)
    if not difference_Q.any():
        return {"mean": mean, "standard_error": 0.0, "p_t": 1.0, "p_wilcoxon": 1.0}
    return {
        "mean": mean,
        "standard_error": round(float(stats.sem(difference_Q)), 4),
        "p_t": round(float(stats.ttest_rel(first_Q, second_Q).pvalue), 4),
        "p_wilcoxon": round(float(stats.wilcoxon(difference_Q).pvalue), 4),
    }


def plot(report: dict[str, Any], file: Path) -> None:
    """ERR and NDCG@5 of every method with standard errors, the two losses in two colours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    means = report["summary"]["means"]
    functions = list(dict.fromkeys(name.split(", ")[0] for name in means))
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, (key, title) in zip(panels, (("err", "ERR"), ("ndcg5", "NDCG@5")), strict=True):
        for name, values in means.items():
            function, loss = name.split(", ")
            shift = {"plackett-luce": -0.12, "elimination": 0.12}.get(loss, 0.0)
            colour = {"plackett-luce": "tab:blue", "elimination": "tab:orange"}.get(loss, "tab:gray")
            mean, error = values[key]
            label = {"plackett-luce": "Plackett–Luce", "elimination": "elimination"}.get(loss)
            axes.errorbar(functions.index(function) + shift, mean, error, fmt="o", capsize=3, color=colour, label=label)
        axes.set_xticks(range(len(functions)), functions, rotation=15)
        axes.set(title=title)
        axes.grid(alpha=0.3)
    handles = {label: handle for handle, label in zip(*panels[0].get_legend_handles_labels(), strict=True)}
    if handles:
        panels[0].legend(handles.values(), handles.keys())
    figure.suptitle(f"{report['set']}: means over test queries ± standard error")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def markdown(report: dict[str, Any]) -> str:
    """The summary as tables."""
    lines = ["| function | loss | ERR | NDCG@1 | NDCG@5 | MAP | training, CPU s | paper: ERR, NDCG@1, NDCG@5 |", "|---" * 8 + "|"]
    for name, values in report["summary"]["means"].items():
        function, loss = name.split(", ")
        cells = " | ".join(f"{values[figure][0]:.4f} ± {values[figure][1]:.4f}" for figure in FIGURES)
        paper = ", ".join(f"{value:.3f}" for value in PAPER.get((function, loss), ()))
        lines.append(f"| {function} | {loss} | {cells} | {values['train_cpu_s']:.1f} | {paper or '—'} |")
    lines += ["", "| difference | ERR | NDCG@5 | MAP | p of ERR (t, Wilcoxon) | p of NDCG@5 |", "|---" * 6 + "|"]
    for name, found in report["summary"]["differences"].items():
        cells = " | ".join(f"{found[key]['mean']:+.4f} ± {found[key]['standard_error']:.4f}" for key in ("err", "ndcg5", "map"))
        chance = " | ".join(", ".join(_p(found[key][test]) for test in ("p_t", "p_wilcoxon")) for key in ("err", "ndcg5"))
        lines.append(f"| {name} | {cells} | {chance} |")
    return "\n".join(lines)


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--set", required=True, choices=SETS)
    parser.add_argument("--functions", default=",".join(dict.fromkeys(function for function, _ in METHODS)))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = measure(options.set, options.data / options.set, options.functions.split(","), options.seeds, options.json)
    print(markdown(report))
    if options.plot is not None:
        plot(report, options.plot)


if __name__ == "__main__":
    main()
