"""Systems of the text-search benchmark, their measurement, and the file of rows, from which a second run goes on.

Recall is the mean over test queries. ms_p50 is the median over single test queries on one thread, from the text to 100 item rows.
train_cpu_s is CPU time of reading texts and training (compiled code from its cache). model_mb is what lies on disk (XR-Linear's bundle,
with item ids and held-out queries) or the arrays that a search reads.

Legend: B queries, M results.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.product_search.text_sets import Fold, Task
from benchmarks.report_file import print_row
from espalier.arrays import Array, Float64, Int64
from espalier.errors import InvalidConfig
from espalier.hardware import hardware
from espalier.metrics import precision_recall_f
from espalier.search import NO_ITEM

Row = dict[str, Any]
Find = Callable[[str], Int64]
"""A text → int64[≤ M] item rows, best first."""

MS = (10, 50, 100)
M = max(MS)


@dataclass(frozen=True, eq=False)
class Trained:
    """One configuration of a trained system."""

    config: str
    find: Find
    model_mb: float
    train_cpu_s: float
    close: Callable[[], object] = lambda: None


def best(scores: Array, m: int = M) -> Int64:
    """The positions of the m largest, largest first; ties by position."""
    if len(scores) > m:
        top_m = np.sort(np.argpartition(-scores, m - 1)[:m])
        return top_m[np.argsort(-scores[top_m], kind="stable")]
    return np.argsort(-scores, kind="stable")


def measure(find: Find, fold: Fold) -> tuple[dict[int, Float64], Float64]:
    """Recall of every test query by m, and its milliseconds."""
    found_BM = np.full((len(fold.texts), M), NO_ITEM, np.int64)
    ms_B = np.zeros(len(fold.texts))
    for text in fold.texts[:20]:
        find(text)
    for b, text in enumerate(fold.texts):
        begin = time.perf_counter()
        found_rows = find(text)
        ms_B[b] = (time.perf_counter() - begin) * 1e3
        found_BM[b, : len(found_rows)] = found_rows
    return {m: precision_recall_f(found_BM, fold.relevant, m)[1] for m in MS}, ms_B


def row_of(trained_folds: Sequence[tuple[Trained, Fold]], system: str) -> Row:
    """The row of one configuration, trained on every fold: recall and milliseconds over all test queries, the rest a mean over folds."""
    measured = [measure(trained.find, fold) for trained, fold in trained_folds]
    row: Row = {"system": system, "config": trained_folds[0][0].config}
    for m in MS:
        row[f"recall{m}"] = round(100 * float(np.concatenate([recall[m] for recall, _ in measured]).mean()), 2)
    apart_B = np.concatenate([fold.apart for _, fold in trained_folds])
    recall_B = np.concatenate([recall[M] for recall, _ in measured])
    row[f"recall{M}_apart"] = round(100 * float(recall_B[apart_B].mean()), 2) if apart_B.any() else None
    row["ms_p50"] = round(float(np.median(np.concatenate([ms_B for _, ms_B in measured]))), 4)
    row["train_cpu_s"] = round(float(np.mean([trained.train_cpu_s for trained, _ in trained_folds])), 2)
    row["model_mb"] = round(float(np.mean([trained.model_mb for trained, _ in trained_folds])), 2)
    return row


class Report:
    """The rows of a set of `text_sets` in a file, written after every one. Raises InvalidConfig if the file is of another set."""

    def __init__(self, file: Path | None, task: Task) -> None:
        self._file, train = file, task.folds[0].train
        self.content: Row = {
            "set": task.name,
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": f"{hardware()}, one thread used",
            "items": len(task.own_texts),
            "training_texts": len(train),
            "training_pairs": train.labels.nnz,
            "test_queries": sum(len(fold.texts) for fold in task.folds),
            "test_queries_apart": sum(int(fold.apart.sum()) for fold in task.folds),
        }
        earlier: Row = json.loads(file.read_text()) if file is not None and file.is_file() else {}
        if earlier.get("set", task.name) != task.name:
            raise InvalidConfig("--json", str(file), f"a file of the set {task.name}, not of {earlier['set']}")
        self.content |= {key: value for key, value in earlier.items() if isinstance(value, list)}
        print_row({key: value for key, value in self.content.items() if not isinstance(value, list)})

    def rows(self, part: str) -> list[Row]:
        rows: list[Row] = self.content.setdefault(part, [])
        return rows

    def has(self, part: str, **wanted: object) -> bool:
        return any(all(row.get(key) == value for key, value in wanted.items()) for row in self.rows(part))

    def add(self, part: str, row: Row) -> None:
        self.rows(part).append(row)
        print_row(row)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            written = self._file.with_suffix(".part")
            written.write_text(json.dumps(self.content, indent=1) + "\n")
            written.replace(self._file)
