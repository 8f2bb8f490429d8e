"""Rows of `benchmarks.otm_real`: precision, recall and F of a method's test users, and how rows are shown.

Knows figures and pictures. Does not know methods.

Legend: B test users, M results of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from espalier.arrays import Float64, Int64
from espalier.metrics import precision_recall_f
from training.compare.figures import standard_error
from training.data.splits import EvaluationPair

MS = (10, 50, 200)
Row = dict[str, Any]


def measured(found_BM: Int64, pairs: Sequence[EvaluationPair], row_columns: Row) -> tuple[list[Row], Float64]:
    """A row for every m, and the users' recall at the largest."""
    rows = []
    for m in MS:
        precision_B, recall_B, f_B = precision_recall_f(found_BM, [pair.relevant for pair in pairs], m)
        values = {"precision": float(precision_B.mean()), "recall": float(recall_B.mean()), "f": float(f_B.mean())}
        rows.append({"m": m} | row_columns | values | {"recall_se": standard_error(recall_B)})
    return rows, np.asarray(recall_B, np.float64)


def recall_change(difference_B: Float64) -> Row:
    """Against the best of the smaller beams, user by user."""
    return {"recall_change": float(difference_B.mean()), "recall_change_se": standard_error(difference_B)}


def print_rows(rows: Sequence[Row]) -> None:
    for row in rows:
        if row["m"] == MS[0]:
            keys = ("method", "seed", "gamma", "beam_size", "exclude_seen")
            method_rows = [other for other in rows if all(other[key] == row[key] for key in keys)]
            figures = "  ".join(f"R@{other['m']} {100 * other['recall']:6.2f}" for other in method_rows)
            settings = [("γ", row["gamma"]), ("beam", row["beam_size"])]  # a fusion has the tree's beam and no γ
            knobs = " ".join(f"{name} {value:g}" for name, value in settings if value is not None)
            print(
                f"{row['method']:20s} {row['seed']}  {knobs:18s} {'seen excluded' if row['exclude_seen'] else 'raw':13s} {figures}",
                flush=True,
            )


def markdown(rows: Sequence[Row]) -> str:
    """A table of all rows in %: precision / recall / F, means over seeds, with the sample standard deviation of recall over seeds."""
    lines = [
        "| method | γ | beam | seen items | seeds |" + "".join(f" P / R / F @{m} |" for m in MS) + " change |",
        "|---" * (6 + len(MS)) + "|",
    ]
    key = ("method", "gamma", "beam_size", "exclude_seen")
    for table_key in dict.fromkeys(tuple(row[name] for name in key) for row in rows):
        method, gamma, beam, exclude_seen = table_key
        cells = []
        for m in MS:
            rows_of_m = [row for row in rows if row["m"] == m and tuple(row[name] for name in key) == table_key]
            precision, recall, f = (100 * np.array([row[name] for row in rows_of_m]) for name in ("precision", "recall", "f"))
            spread = f" ± {recall.std(ddof=1):.2f}" if len(recall) > 1 else ""
            cells.append(f"{precision.mean():.2f} / {recall.mean():.2f}{spread} / {f.mean():.2f}")
        change = ""
        if "recall_change" in rows_of_m[0]:
            error = 100 * sum(row["recall_change_se"] ** 2 for row in rows_of_m) ** 0.5 / len(rows_of_m)
            change = f"{100 * np.mean([row['recall_change'] for row in rows_of_m]):+.2f} ± {error:.2f}"
        shown = ["" if value is None else f"{value:g}" for value in (gamma, beam)]
        lines.append("| " + " | ".join([method, *shown, "excluded" if exclude_seen else "raw", str(len(rows_of_m)), *cells, change]) + " |")
    return "\n".join(lines) + "\n"


def plot_curves(rows: Sequence[Row], title: str, file: Path) -> None:
    """Recall@200 (raw) over the serving beam, one line a method and γ, means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    chosen = [row for row in rows if row["m"] == max(MS) and not row["exclude_seen"]]
    for method in dict.fromkeys(row["method"] for row in chosen):
        for gamma in dict.fromkeys(row["gamma"] for row in chosen if row["method"] == method):
            of_line = [row for row in chosen if row["method"] == method and row["gamma"] == gamma]
            beams = sorted({row["beam_size"] for row in of_line if row["beam_size"] is not None})
            recall = {beam: np.mean([row["recall"] for row in of_line if row["beam_size"] == beam]) for beam in beams}
            if beams:
                axes.plot(
                    beams, [recall[beam] for beam in beams], marker="o", label=method if gamma is None else f"{method}, γ = {gamma:g}"
                )
            else:
                recall_at = float(np.mean([row["recall"] for row in of_line]))
                axes.axhline(recall_at, linestyle=":", color=f"C{len(axes.lines) % 10}", label=method)
    axes.set(xlabel="serving beam", ylabel="recall@200", title=title, xscale="log")
    shown = sorted({row["beam_size"] for row in chosen if row["beam_size"] is not None})
    axes.set_xticks(shown, [str(beam) for beam in shown])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
