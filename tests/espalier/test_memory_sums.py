"""Of a trained and a live entry the larger one counts, in sums of all leaves and of live ones alone."""

from __future__ import annotations

import numpy as np
import pytest

from espalier.memory_sums import add_up, of_live_leaves
from espalier.read_only import read_only

LIVE_ROW = 3
"""Of the first handle: items 0 … 2 are trained."""
TRAINED = read_only(np.array([0, 2, 2, 2]), np.array([1, 2], np.int32), np.array([2, 1], np.float32), np.array([1, 0.5], np.float32))
LIVE = read_only(
    np.array([0]), np.array([0]), np.array([0]), np.array([3]), np.array([1, 2, LIVE_ROW], np.int32), np.array([1, 3, 5], np.float32)
)
EXPECTED = {1: 3.0, 2: 4.5, LIVE_ROW: 7.5}  # the history holds item 0 twice, with the weights 1 and .5


def test_of_two_entries_of_a_pair_the_larger_one_counts() -> None:
    (history_T, leaf_of_item), sum_L, sum_R = read_only(np.array([-1, 0, 0]), np.arange(3)), np.zeros(3), np.zeros(1)
    leaves, handles = add_up(history_T, TRAINED, LIVE, leaf_of_item, 0, sum_L, sum_R)
    assert {leaf: sum_L[leaf] for leaf in leaves.tolist()} | {LIVE_ROW + handle: sum_R[handle] for handle in handles.tolist()} == EXPECTED


@pytest.mark.parametrize("more_sources", [0, 4])
def test_live_leaves_have_the_same_sums(more_sources: int) -> None:
    """Those of a shard, too: its memory has the entries of all items of the whole, of which the shard holds some."""
    trained = *read_only(np.pad(TRAINED[0], (0, more_sources), mode="edge")), *TRAINED[1:]
    arrays, sum_R = read_only(np.array([[-1, 0, 0]]), np.array([0, 3]), np.array(list(EXPECTED))), np.zeros(1)
    assert of_live_leaves(*arrays, LIVE_ROW, trained, LIVE, sum_R).tolist() == list(EXPECTED.values())
    assert not sum_R.any()
