"""The sets of `benchmarks.cold_start`: texts and what is right for them, with items that training must not see.

Knows files and how they are divided. Does not know models.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks.text.sets import dependencies, judgements
from espalier.errors import InvalidData

Pair = tuple[str, list[int]]
"""A text and the items that are right, by their numbers."""

SETS = {
    "debian-depends": "xmc-debian-bookworm/packages.tsv.gz",
    "psearch": "psearch-crowdflower/crowdflower_train.csv.gz",
}
HIDDEN_SHARE = 0.1
FOLDS = 5


@dataclass(frozen=True, eq=False)
class Task:
    """A set with its hidden items.

    texts   each item's own text, empty where it has none · hidden: bool[I]
    folds   training pairs and test pairs; own: items' texts are training queries too
    """

    name: str
    texts: list[str]
    hidden: NDArray[np.bool_]
    folds: list[tuple[list[Pair], list[Pair]]]
    own: bool


def read_set(folder: Path, name: str, choosing: bool = False) -> Task:
    """A named set; `choosing`: one made of its training data alone. Raises InvalidData where its file is missing."""
    file = folder / SETS[name]
    if not file.is_file():
        raise InvalidData("--data", str(folder), f"a folder that holds {SETS[name]}, the file of the set {name}")
    with gzip.open(file, "rb") as stream:
        content = io.BytesIO(stream.read())
    if name == "psearch":
        return psearch(pl.read_csv(content, infer_schema=False), choosing)
    return depends(pl.read_csv(content, separator="\t", quote_char=None, infer_schema=False), choosing)


def depends(frame: pl.DataFrame, choosing: bool = False) -> Task:
    """A description → what the package depends on."""
    items, pairs = dependencies(frame)
    described = dict(frame.select("package", pl.col("description").fill_null("")).iter_rows())
    order = np.random.default_rng(0).permutation(len(pairs))
    test, training = (np.sort(part).tolist() for part in np.split(order, [len(pairs) // 10]))
    fold = _fold([pairs[b] for b in training], [pairs[b] for b in test])
    task = Task("debian-depends", texts := [described.get(name, "") for name in items], _hidden(texts, 1), [fold], own=False)
    return _of_training(task, 10) if choosing else task


def psearch(frame: pl.DataFrame, choosing: bool = False) -> Task:
    """A shop's query → the products that people judged to be right."""
    titles, right = judgements(frame)
    pairs = list(right.items())
    folds = [_fold([pair for k, pair in enumerate(pairs) if k % FOLDS != fold], pairs[fold::FOLDS]) for fold in range(FOLDS)]
    task = Task("psearch", titles, _hidden(titles, 1), folds, own=True)
    return _of_training(task, 4) if choosing else task


def _fold(train: list[Pair], test: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Without the test texts that are training texts."""
    known = {text for text, _ in train}
    return train, [(text, rows) for text, rows in dict(test).items() if text not in known]


def _hidden(texts: Sequence[str], seed: int) -> NDArray[np.bool_]:
    able = np.flatnonzero([bool(text) for text in texts])
    hidden = np.zeros(len(texts), np.bool_)
    hidden[np.random.default_rng(seed).permutation(able)[: round(HIDDEN_SHARE * len(able))]] = True
    return hidden


def _of_training(task: Task, part: int) -> Task:
    """A set of the training pairs of the first fold: one of `part` is a test query, and some of the other items are hidden."""
    kept = np.flatnonzero(~task.hidden)
    place = np.full(len(task.texts), -1)
    place[kept] = np.arange(len(kept))
    pairs = [(text, [int(place[row]) for row in rows if place[row] >= 0]) for text, rows in task.folds[0][0]]
    pairs = [pairs[b] for b in np.random.default_rng(0).permutation(len(pairs)) if pairs[b][1]]
    texts = [task.texts[row] for row in kept.tolist()]
    count = len(pairs) // part
    return Task(task.name, texts, _hidden(texts, 2), [_fold(pairs[count:], pairs[:count])], task.own)
