"""The nearest trained items of new ones: those of the largest cosine."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from espalier.checks.random_bundles import sparse_rows
from espalier.placement.near_items import NO_NEIGHBOUR, NearItems
from espalier.text.sparse_rows import SparseRows


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 6))
def test_nearest_items_are_those_of_the_largest_cosine(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1, 1], 9)  # a sum may be 0 or below
    old, new = (sparse_rows((rng.random((n, 9)) < 0.4) * signs * rng.integers(1, 3, (n, 9))) for n in (int(rng.integers(1, 30)), 7))
    item_nK, cosine_nK = NearItems(old).nearest(new, count)
    every = dense(new) @ dense(old).T
    for i in range(len(new)):
        best = [item for item in np.argsort(-every[i], kind="stable").tolist() if every[i, item] > 0][:count]
        assert item_nK[i].tolist() == best + [NO_NEIGHBOUR] * (count - len(best))
        assert_allclose(cosine_nK[i, : len(best)], every[i, best], rtol=1e-6)
        assert_array_equal(cosine_nK[i, len(best) :], 0)


def dense(rows: SparseRows) -> NDArray[np.float64]:
    full = np.zeros((len(rows), rows.width))
    for i in range(len(rows)):
        own = slice(int(rows.indptr[i]), int(rows.indptr[i + 1]))
        full[i, rows.indices[own]] = rows.values[own]
    return full
