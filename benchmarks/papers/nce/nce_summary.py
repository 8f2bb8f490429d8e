"""Figures of `benchmarks.nce_tables`: ERR and average precision of queries; rows as means with standard errors, differences, tables.

A query without a relevant item counts 0. Knows figures of test queries. Does not know how a function is trained.

Legend: Q test queries, R rows (an item of a query).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from espalier.arrays import Float64, Int64
from espalier.errors import InvalidData
from espalier.metrics import ranked_grades

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


def expected_reciprocal_rank(
    scores_R: NDArray[np.floating],
    grades_R: NDArray[np.floating],
    query_offset: Int64,
    max_grade: float,
) -> Float64:
    """ERR of every query: the mean of 1 / the place at which a user who reads down is satisfied (Chapelle et al. 2009; NCE §5.1).

        ERR = Σ_i R_i / i · Π_{j < i} (1 − R_j),   R_i = (2^{r_i} − 1) / 2^{max_grade}

    max_grade  the highest grade that the set's judges could give, 4 in the paper, not the highest in this query

    Arguments, result and errors as `ndcg`. (The paper prints the product over j > i.)
    """
    place_R, query_R, sorted_R = ranked_grades(scores_R, grades_R, query_offset)
    if sorted_R.max(initial=0) > max_grade:
        raise InvalidData("grades_R", float(sorted_R.max()), f"at most max_grade, {max_grade}")
    satisfied_R = (np.exp2(sorted_R) - 1) / np.exp2(max_grade)
    left_R = np.log1p(-satisfied_R)
    before_R = np.cumsum(left_R) - left_R
    reading_R = np.exp(before_R - before_R[query_offset[:-1]][query_R])
    err_Q: Float64 = np.add.reduceat(reading_R * satisfied_R / place_R, query_offset[:-1])
    return err_Q


def average_precision(scores_R: NDArray[np.floating], grades_R: NDArray[np.floating], query_offset: Int64) -> Float64:
    """AP of every query, whose mean is MAP: the mean over relevant items (grade above 0) of the precision at their place.

    Arguments, result and errors as `ndcg`.
    """
    place_R, query_R, sorted_R = ranked_grades(scores_R, grades_R, query_offset)
    hits_R = np.cumsum(sorted_R > 0)
    before_Q: Int64 = hits_R[query_offset[:-1]] - (sorted_R[query_offset[:-1]] > 0)
    precision_R = np.where(sorted_R > 0, (hits_R - before_Q[query_R]) / place_R, 0)
    relevant_Q = np.add.reduceat(sorted_R > 0, query_offset[:-1], dtype=np.int64)
    precision_Q: Float64 = np.bincount(query_R, weights=precision_R) / np.maximum(relevant_Q, 1)
    return precision_Q


def per_query(rows: Sequence[Row], function: str, loss: str, figure: str) -> Float64:
    """One value for each test query, the mean over seeds, in the order of the folds."""
    method_rows = [row for row in rows if (row["function"], row["loss"]) == (function, loss)]
    folds = sorted({row["fold"] for row in method_rows})
    return np.concatenate([np.mean([row["per_query"][figure] for row in method_rows if row["fold"] == fold], axis=0) for fold in folds])


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


def paired(first_Q: Float64, second_Q: Float64) -> dict[str, float]:
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


def markdown(report: dict[str, Any]) -> str:
    lines = ["| function | loss | ERR | NDCG@1 | NDCG@5 | MAP | training, CPU s | paper: ERR, NDCG@1, NDCG@5 |", "|---" * 8 + "|"]
    for name, values in report["summary"]["means"].items():
        function, loss = name.split(", ")
        cells = " | ".join(f"{values[figure][0]:.4f} ± {values[figure][1]:.4f}" for figure in FIGURES)
        paper = ", ".join(f"{value:.3f}" for value in PAPER.get((function, loss), ()))
        lines.append(f"| {function} | {loss} | {cells} | {values['train_cpu_s']:.1f} | {paper or '—'} |")
    lines += ["", "| difference | ERR | NDCG@5 | MAP | p of ERR (t, Wilcoxon) | p of NDCG@5 |", "|---" * 6 + "|"]
    for name, difference in report["summary"]["differences"].items():
        cells = " | ".join(f"{difference[key]['mean']:+.4f} ± {difference[key]['standard_error']:.4f}" for key in ("err", "ndcg5", "map"))
        p_values = " | ".join(", ".join(_p(difference[key][test]) for test in ("p_t", "p_wilcoxon")) for key in ("err", "ndcg5"))
        lines.append(f"| {name} | {cells} | {p_values} |")
    return "\n".join(lines)


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"
