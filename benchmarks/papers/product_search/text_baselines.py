"""Cheap systems in the text-search benchmark: BM25, cosines to centroids, and a vote of the nearest training queries.

Legend: B queries, I items, M results.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.product_search.text_linear import blocks_of
from benchmarks.papers.product_search.text_report import Trained, best
from benchmarks.papers.product_search.text_sets import WORD, Fold, Task, item_rows
from espalier.arrays import Int64
from espalier.errors import InvalidConfig
from espalier.text.vectoriser import Vectoriser, normalise
from training.data.csr import Csr, as_matrix
from training.data.query_logs import LabelledTexts
from training.data.xmc import LabelledPoints
from training.linear.label_features import pifa

NEIGHBOURS = 50


def bm25(task: Task, fold: Fold, folder: Path) -> list[Trained]:
    """Okapi BM25 of an item's training texts, one after the other."""
    if importlib.util.find_spec("bm25s") is None:
        raise InvalidConfig("--systems", "bm25", "the package bm25s (pip install bm25s)")
    library: Any = importlib.import_module("bm25s")
    begin = time.process_time()
    documents: list[list[str]] = [[] for _ in task.own_texts]
    for text, rows in zip(fold.train.texts, item_rows(fold.train), strict=True):
        words = WORD.findall(normalise(text))
        for row in rows.tolist():
            documents[row] += words
    index = library.BM25(k1=1.5, b=0.75)
    index.index(documents, show_progress=False)
    seconds = time.process_time() - begin
    vocabulary = set(index.vocab_dict)

    def find(text: str) -> Int64:
        words = [word for word in WORD.findall(normalise(text)) if word in vocabulary]
        if not words:
            return np.empty(0, np.int64)
        scores = index.get_scores(words)
        rows = np.flatnonzero(scores)
        return rows[best(scores[rows])]

    arrays = sum(value.nbytes for value in index.scores.values() if isinstance(value, np.ndarray))
    return [Trained("k1 1.5, b 0.75", find, arrays / 1e6, seconds)]


def _mb(vectoriser: Vectoriser, *matrices: Csr) -> float:
    arrays = [*vectoriser.arrays().values(), *(array for matrix in matrices for array in (matrix.data, matrix.indices, matrix.indptr))]
    return sum(array.nbytes for array in arrays) / 1e6


def centroid(texts: str, task: Task, fold: Fold, folder: Path) -> list[Trained]:
    """The cosine to the normalised sum of an item's training queries, as an inverted index."""
    begin = time.process_time()
    vectoriser = Vectoriser.fit(fold.train.texts, blocks_of(texts, fold.train))
    centroids = pifa(points_of(vectoriser, fold.train))
    by_feature = centroids.T.tocsr()
    seconds = time.process_time() - begin

    def find(text: str) -> Int64:
        scores = as_matrix(vectoriser.transform([text])) @ by_feature
        rows: Int64 = scores.indices.astype(np.int64)
        return rows[best(scores.data)]

    return [Trained(texts, find, _mb(vectoriser, by_feature), seconds)]


def neighbours(texts: str, task: Task, fold: Fold, folder: Path) -> list[Trained]:
    """The nearest training queries by the cosine vote for their items with it."""
    begin = time.process_time()
    vectoriser = Vectoriser.fit(fold.train.texts, blocks_of(texts, fold.train))
    points = points_of(vectoriser, fold.train)
    by_feature = points.points.T.tocsr()
    seconds = time.process_time() - begin

    def find(text: str) -> Int64:
        scores = as_matrix(vectoriser.transform([text])) @ by_feature
        nearest = best(scores.data, NEIGHBOURS)
        neighbour_rows = scores.indices[nearest]
        if not len(neighbour_rows):
            return np.empty(0, np.int64)
        neighbour_labels = points.labels[neighbour_rows]
        rows, vote_index = np.unique(neighbour_labels.indices, return_inverse=True)
        votes = np.bincount(vote_index, np.repeat(scores.data[nearest], np.diff(neighbour_labels.indptr)))
        return rows[best(votes)].astype(np.int64)

    return [Trained(texts, find, _mb(vectoriser, by_feature, points.labels), seconds)]


def points_of(vectoriser: Vectoriser, texts: LabelledTexts) -> LabelledPoints:
    return LabelledPoints(as_matrix(vectoriser.transform(texts.texts)), texts.labels)
