"""Table 1 and Figure 3 of NCE on public sets: rank functions and losses beside each other, and LambdaMART.

    python -m benchmarks.nce_tables --data DIR --set l2r-mq2007-agg --json F
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

from benchmarks.papers.nce.boosting import BoostingConfig, fit_boosted_trees
from benchmarks.papers.nce.nce_summary import FIGURES, METHODS, Row, average_precision, expected_reciprocal_rank, markdown, summary
from benchmarks.papers.nce.rank_svm import fit_rank_svm
from benchmarks.report_file import command_line
from espalier.arrays import Float32
from espalier.errors import InvalidData
from espalier.hardware import hardware
from espalier.metrics import ndcg
from training.data.letor import read_letor, read_svmlight
from training.data.ranking_set import RankingSet
from training.rankers.fit import Descent, fit_ranker
from training.specification.ranker import HighwayConfig, LinearRankerConfig, RankerConfig, Ties

SETS = ("l2r-mq2007-agg", "l2r-lightgbm-example", "l2r-mq2008-partial")
Scores = Callable[[Float32], Float32]


@dataclass(frozen=True)
class Fold:
    """Queries for training, for choosing options, and for measuring."""

    name: int
    train: RankingSet
    valid: RankingSet
    test: RankingSet
    max_grade: float


def concatenated(sets: Sequence[RankingSet]) -> RankingSet:
    """The queries of several sets with ids and the same features, in order."""
    sizes = np.concatenate([np.diff(part.query_offset) for part in sets])
    return RankingSet(
        np.concatenate([part.features_RF for part in sets]),
        np.concatenate([part.grades_R for part in sets]),
        np.append(0, np.cumsum(sizes)),
        sets[0].feature_names,
        tuple(name for part in sets for name in part.query_ids or ()),
    )


def read_folds(folder: Path, name: str, seed: int) -> list[Fold]:
    """The folds of a set; of a set without folds the one that a seed makes."""
    if name == "l2r-mq2007-agg":
        fifths = [read_letor(folder / f"S{part}.txt.gz") for part in range(1, 6)]
        return [
            Fold(k + 1, concatenated([fifths[(k + i) % 5] for i in range(3)]), fifths[(k + 3) % 5], fifths[(k + 4) % 5], 2.0)
            for k in range(5)
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
NETWORK = HighwayConfig(hidden=64, dropout=0.3, learning_rate=0.003, max_epochs=200, patience=15)
LINE = LinearRankerConfig(learning_rate=0.02, max_epochs=200, patience=15)
DESCENT = Descent(max_norm=None, average=4.0)
LAMBDAMART = BoostingConfig(loss="lambdarank", trees=500, row_share=0.8, feature_share=0.5, random_splits=False)


def candidates(function: str, loss: Any, seed: int) -> list[RankerConfig | BoostingConfig | dict[str, Any]]:
    if function == "rank-svm":
        return [{"cost": cost} for cost in (0.01, 0.1, 1.0, 10.0)]
    if function in ("linear", "highway"):
        network = LINE if function == "linear" else NETWORK
        return [network.model_copy(update={"loss": loss, "seed": seed, "ties": ties}) for ties in get_args(Ties)]
    if function == "boosting":
        return [BoostingConfig(loss=loss, seed=seed, leaves=leaves) for leaves in (31, 512)]
    return [
        replace(LAMBDAMART, seed=seed, leaves=leaves, learning_rate=rate) for leaves, rate in itertools.product((7, 15, 31), (0.03, 0.1))
    ]


def written(candidate: RankerConfig | BoostingConfig) -> dict[str, Any]:
    """A candidate as it is written to the report."""
    return asdict(candidate) if isinstance(candidate, BoostingConfig) else candidate.model_dump() | asdict(DESCENT)


def fit(candidate: RankerConfig | BoostingConfig | dict[str, Any], fold: Fold) -> tuple[Scores, float]:
    """Scores of a trained candidate, and its NDCG on the validation queries."""
    if isinstance(candidate, RankerConfig):
        scores: Scores = fit_ranker(fold.train, fold.valid, candidate, descent=DESCENT).scores
    elif isinstance(candidate, BoostingConfig):
        scores = fit_boosted_trees(fold.train, fold.valid, candidate).scores
    else:
        scores = fit_rank_svm(fold.train, **candidate).scores
    valid = fold.valid
    return scores, float(ndcg(scores(valid.features_RF), valid.grades_R, valid.query_offset, 10).mean())


# -- rows -----------------------------------------------------------------------------------------------------------------


def run(function: str, loss: str, fold: Fold, seed: int) -> Row:
    best: tuple[float, float, Scores, dict[str, Any]] | None = None
    trials = []
    for candidate in candidates(function, loss, seed):
        began_s = time.process_time()
        scores, value = fit(candidate, fold)
        seconds = time.process_time() - began_s
        options = candidate if isinstance(candidate, dict) else written(candidate)
        trials.append((round(value, 4), options))
        if best is None or value > best[0]:
            best = value, seconds, scores, options
    if best is None:
        raise InvalidData("--functions", function, "one with candidates")
    value, seconds, scores, options = best
    test = fold.test
    ranked = (scores(test.features_RF), test.grades_R, test.query_offset)
    per_query = {
        "err": expected_reciprocal_rank(*ranked, fold.max_grade),
        "ndcg1": ndcg(*ranked, 1),
        "ndcg5": ndcg(*ranked, 5),
        "map": average_precision(*ranked),
    }
    differing = {name for name in options if len({json.dumps(other[name]) for _, other in trials}) > 1}
    return {
        "function": function,
        "loss": loss,
        "fold": fold.name,
        "seed": seed,
        **{name: round(float(values.mean()), 4) for name, values in per_query.items()},
        "train_cpu_s": round(seconds, 2),
        "validation": round(value, 4),
        "chosen": {name: options[name] for name in sorted(differing)},
        "tried": [{"validation": score, **{name: other[name] for name in sorted(differing)}} for score, other in trials],
        "per_query": {name: [round(float(number), 4) for number in values] for name, values in per_query.items()},
    }


def measure(name: str, folder: Path, functions: Sequence[str], seeds: int, file: Path | None) -> dict[str, Any]:
    """All rows, with those of an earlier run's file."""
    report: dict[str, Any] = {"set": name, "hardware": hardware(), "rows": []}
    if file is not None and file.exists():
        report = json.loads(file.read_text())
        if report["set"] != name:
            raise InvalidData("--json", str(file), f"a file of the set {name}")
    report["date"] = datetime.now(UTC).date().isoformat()
    completed_runs = {(row["function"], row["loss"], row["fold"], row["seed"]) for row in report["rows"]}
    for seed in range(1, seeds + 1):
        for fold in read_folds(folder, name, seed):
            for function, loss in METHODS:
                if function not in functions or (function, loss, fold.name, seed) in completed_runs:
                    continue
                row = run(function, loss, fold, seed)
                report["rows"].append(row)
                cells = {key: row[key] for key in ("function", "loss", "fold", "seed", *FIGURES, "train_cpu_s", "validation", "chosen")}
                print(json.dumps(cells), flush=True)
                if file is not None:
                    file.write_text(json.dumps(report) + "\n")
    report["summary"] = summary(report["rows"])
    if file is not None:
        file.write_text(json.dumps(report) + "\n")
    return report


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--set", required=True, choices=SETS)
    parser.add_argument("--functions", default=",".join(dict.fromkeys(function for function, _ in METHODS)))
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = measure(options.set, options.data / options.set, options.functions.split(","), options.seeds, options.json)
    print(markdown(report))


if __name__ == "__main__":
    main()
