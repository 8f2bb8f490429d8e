"""`python -m benchmarks.labelwise` on small sets, and how they are made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy.sparse import csr_array, random_array, save_npz

from benchmarks.papers.xreg.labelwise import assigned, figures, fitted, transposed_search
from benchmarks.papers.xreg.labelwise_sets import held_out, movielens, read_weighted
from espalier.relevance import Relevance
from training.data.csr import as_rows
from training.data.xmc import LabelledPoints

LABELS = 8


def weighted(seed: int, count: int) -> LabelledPoints:
    """Points whose label is told by one of their features, weighted by how large it is."""
    rng = np.random.default_rng(seed)
    label_B, size_B = np.arange(count) % LABELS, rng.uniform(0.2, 1, count)
    points = random_array((count, 30), density=0.1, rng=rng).toarray()
    points[np.arange(count), label_B] = 3 * size_B
    labels = np.zeros((count, LABELS))
    labels[np.arange(count), label_B] = size_B
    return LabelledPoints(csr_array(points.astype(np.float32)), csr_array(labels.astype(np.float32)))


def test_movielens_is_cut_in_the_middle_of_each_list_by_time() -> None:
    rows = [(7, 40, 5, 30), (7, 10, 1, 10), (7, 30, 4, 20), (9, 10, 2, 5), (7, 20, 3, 20), (9, 40, 3, 6), (9, 30, 1, 7)]
    ratings = pl.DataFrame([(u, None, i, None, r, None, t) for u, i, r, t in rows], orient="row")
    points = movielens(ratings)
    labels = np.zeros((2, 4), np.float32)  # movies 10, 20, 30, 40
    labels[0, [1, 3]], labels[1, [2, 3]] = (3, 5), (1, 3)
    np.testing.assert_array_equal(points.labels.toarray(), labels)
    features = np.zeros((2, 4))
    features[0, [0, 2]], features[1, 0] = np.array([1, 4]) / np.sqrt(17), 1
    np.testing.assert_allclose(points.points.toarray(), features, rtol=1e-6)


def test_a_fifth_of_the_points_is_held_out_and_none_is_in_both_parts() -> None:
    points = LabelledPoints(csr_array(np.diag(np.arange(1, 51)).astype(np.float32)), csr_array(np.ones((50, 1), np.float32)))
    train, test = (part.points.data for part in held_out(points))
    assert (len(train), len(test)) == (40, 10)
    assert sorted([*train, *test]) == list(range(1, 51))


def test_plain_sets_get_inverse_propensities_and_weighted_ones_keep_their_weights(tmp_path: Path) -> None:
    for name, values in (("plain", (1, 1, 1)), ("weighted", (0.5, 2, 1))):
        (tmp_path / name).mkdir()
        for part in ("train", "test"):
            save_npz(tmp_path / name / f"{part}_X.npz", csr_array(np.eye(3, dtype=np.float32)))
            save_npz(tmp_path / name / f"{part}_Y.npz", csr_array((np.array(values, np.float32), ([0, 1, 2], [0, 0, 1])), shape=(3, 2)))
    assert read_weighted(tmp_path, "weighted")[1].labels.data.tolist() == [0.5, 2, 1]
    rare, common = (read_weighted(tmp_path, "plain")[1].labels.data[b] for b in (2, 0))
    assert rare > common > 1


def test_figures_of_perfect_and_of_no_predictions() -> None:
    true = Relevance.of_rows(as_rows(csr_array(np.array([[1, 0.5, 0], [0, 0, 0.25]], np.float32))))
    perfect = figures(true, true)
    assert (perfect["wp1"], perfect["wp5"], perfect["xmad1"], perfect["pairs"]) == (100, 100, 0, 3)
    nothing = figures(true, Relevance(np.zeros(3, np.int64), np.zeros(0, np.int64), np.zeros(0), 3))
    assert (nothing["wp1"], nothing["xmad1"]) == (0, pytest.approx((1 + 0.25) / 2))


def test_searches_find_what_assign_finds_if_both_take_everything(tmp_path: Path) -> None:
    train, test = weighted(1, 160), weighted(2, 40)
    bundle = fitted("xreg", train, test, tmp_path, threads=1)
    found = assigned(bundle, test.points, len(test), "paper", threads=1)
    by_search = transposed_search(bundle, test.points, beam=100, m=LABELS)
    assert len(found.column_E) == len(by_search.column_E) == len(test) * LABELS
    np.testing.assert_allclose(found.at(by_search.key_E), by_search.value_E, rtol=1e-4)
