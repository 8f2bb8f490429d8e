"""Points whose labels have degrees of relevance, for `benchmarks.labelwise`, made of MovieLens 1M.

Points are users, of length 1: the features are the ratings of the first half of a user's list, by time (ties by file order), the labels the
movies of the second half, weighted by their ratings. Labels are all movies. A fifth of the points, drawn once, are test points.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
from scipy.sparse import csr_array

from training.data.csr import Csr, normalised
from training.data.xmc import LabelledPoints

SET = "ml-1m"
TEST_SHARE, SEED = 0.2, 1
Parts = tuple[LabelledPoints, LabelledPoints]


def read_weighted(data: Path) -> Parts:
    """Training and test points of the set in the folder `data`. Raises OSError."""
    return held_out(movielens(pl.read_csv(data / SET / "ratings.dat.gz", has_header=False, separator=":")))


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
