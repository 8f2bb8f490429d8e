"""`python -m benchmarks.labelwise` on small sets, and how they are made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array, random_array, save_npz

from benchmarks.papers.xreg.labelwise import figures
from benchmarks.papers.xreg.labelwise_sets import held_out, read_weighted
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
