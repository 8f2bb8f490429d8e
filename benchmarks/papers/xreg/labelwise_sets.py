"""Sets of points whose labels have degrees of relevance, for `benchmarks.labelwise`.

ml-1m            points are users of MovieLens 1M: the features are the ratings of the first half of a user's list, by time (ties by file
                 order), the labels the movies of the second half, weighted by their ratings; labels are all movies
debian-bookworm  points are kinds of packages, labels what they depend on, weighted by smoothed rates (debian_kinds.py); the
                 folder is the project's own data/
any other        as `benchmarks.xmc` reads it: labels as weighted as the files have them, else by inverse propensities

A fifth of the points of the first two, drawn once, are test points. Points have length 1.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import polars as pl
from scipy.sparse import csr_array

from benchmarks.papers.xreg import debian_kinds
from benchmarks.papers.xreg.xmc_sets import read_set
from benchmarks.papers.xreg.xmc_systems import linear_config
from training.data.csr import Csr, normalised
from training.data.relevance import LabelRelevance, is_graded
from training.data.xmc import LabelledPoints
from training.linear.prepare import prepare
from training.specification.linear import RELEVANCE_OPTIONS

TEST_SHARE, SEED = 0.2, 1
Parts = tuple[LabelledPoints, LabelledPoints]


def read_weighted(data: Path, name: str) -> Parts:
    """Training and test points of a set. Raises InvalidData."""
    if name == "ml-1m":
        return held_out(movielens(pl.read_csv(data / name / "ratings.dat.gz", has_header=False, separator=":")))
    if name == "debian-bookworm":
        return _debian(data / name)
    train, test = read_set(data, name)
    if is_graded(train.labels):
        return train, test
    options = RELEVANCE_OPTIONS.checked({"source": "inverse-propensity"})
    relevance = LabelRelevance.of_training(options, train.labels)
    return LabelledPoints(train.points, relevance.of(train.labels)), LabelledPoints(test.points, relevance.of(test.labels))


def movielens(ratings: pl.DataFrame) -> LabelledPoints:
    """Users with their first and second halves. The file's columns are user, movie, rating and time, with empty ones between them."""
    frame = ratings[:, ::2]
    frame.columns = ["user", "movie", "rating", "time"]
    user, movie = (np.unique(frame[name].to_numpy(), return_inverse=True)[1] for name in ("user", "movie"))
    order = np.lexsort((frame["time"].to_numpy(), user))
    user, movie, rating = user[order], movie[order], frame["rating"].to_numpy()[order].astype(np.float32)
    begin = np.searchsorted(user, np.arange(user.max() + 1))
    position, count = np.arange(len(user)) - begin[user], np.bincount(user)
    first = position < count[user] // 2
    shape = int(user.max()) + 1, int(movie.max()) + 1

    def half(chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Csr:
        return csr_array((rating[chosen], (user[chosen], movie[chosen])), shape=shape)

    return LabelledPoints(normalised(half(first)), half(~first))


def held_out(points: LabelledPoints) -> Parts:
    """Points to learn from, and those to measure on."""
    order = np.random.default_rng(SEED).permutation(len(points))
    test_count = round(TEST_SHARE * len(points))
    return points.take(np.sort(order[test_count:])), points.take(np.sort(order[:test_count]))


def _debian(sample: Path) -> Parts:
    with tempfile.TemporaryDirectory() as name:
        debian_kinds.write(sample, Path(name))
        columns = {"query": "kind", "item": "item", "views": "views", "clicks": "clicks", "test_share": TEST_SHARE}
        data = {"format": "log", "train": f"{name}/log.csv", "items": f"{name}/items.parquet", **columns}
        prepared = prepare(linear_config({"kind": "xreg", "name": "kinds", "data": data}))
    return prepared.train, prepared.test
