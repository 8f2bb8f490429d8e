"""Figures of single rows: recall by group, ratios to peers, and what is held out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from benchmarks.papers.product_search import xrlinear_peers
from benchmarks.papers.product_search.cold_texts import Texts, row_of
from benchmarks.papers.xreg.labelwise import figures
from benchmarks.papers.xreg.labelwise_sets import held_out
from espalier.relevance import Relevance
from espalier.search import NO_ITEM
from training.data.csr import as_rows
from training.data.xmc import LabelledPoints


def test_recall_of_a_cold_start_is_counted_by_group() -> None:
    data = Texts(["a"] * 4, np.array([True, False, False, False]), [], [("x", [0, 1]), ("y", [2, 3])])
    row = row_of("some", data, np.array([[0, NO_ITEM], [2, 1]]), 0.0)
    assert (row["hidden@10"], row["old@10"], row["all@10"]) == (100, 25, 50)
    assert row["shown@10"] == 33.3


def test_a_fifth_of_the_points_is_held_out_and_none_is_in_both_parts() -> None:
    points = LabelledPoints(csr_array(np.diag(np.arange(1, 51)).astype(np.float32)), csr_array(np.ones((50, 1), np.float32)))
    train, test = (part.points.data for part in held_out(points))
    assert (len(train), len(test)) == (40, 10)
    assert sorted([*train, *test]) == list(range(1, 51))


def test_labelwise_figures_of_perfect_and_of_no_predictions() -> None:
    true = Relevance.of_rows(as_rows(csr_array(np.array([[1, 0.5, 0], [0, 0, 0.25]], np.float32))))
    perfect = figures(true, true)
    assert (perfect["wp1"], perfect["wp5"], perfect["xmad1"], perfect["pairs"]) == (100, 100, 0, 3)
    nothing = figures(true, Relevance(np.zeros(3, np.int64), np.zeros(0, np.int64), np.zeros(0), 3))
    assert (nothing["wp1"], nothing["xmad1"]) == (0, pytest.approx((1 + 0.25) / 2))


def test_our_trees_stand_beside_the_fastest_peer_with_as_many() -> None:
    def row(system: str, trees: int, beam: int | None, ms: float) -> dict[str, Any]:
        return {"system": system, "trees": trees, "beam_size": beam, "ms_p50": ms}

    rows = [row("espalier", 1, 10, 2.0), row("forest", 3, 10, 6.0), row("pecos", 1, 10, 4.0), row("omikuji", 1, 10, 5.0),
            row("omikuji-3", 3, 10, 8.0), row("omikuji-3", 3, 50, 1.0), row("ova", 1, None, 1.0)]  # fmt: skip
    for one in rows:
        xrlinear_peers._beside_the_fastest(one, rows)
    assert [one.get("of_fastest_peer") for one in rows] == [0.5, 0.75, None, None, None, None, None]
