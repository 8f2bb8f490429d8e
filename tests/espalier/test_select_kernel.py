"""The best of a query's candidates on a GPU, in Triton's interpreter: as many as are wanted, and nothing beside the query's own row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="there are no wheels of it outside Linux")

from espalier.engines.triton.kernels.select import select_kernel

pytestmark = pytest.mark.usefixtures("stores_inside")

GUARD = 12345


Way = tuple[int, bool, bool]
WAYS: tuple[Way, ...] = (64, True, True), (64, True, False), (8, False, False)
"""WIDTH, WHOLE and FEW of the kernel."""


@pytest.mark.parametrize("way", WAYS)
def test_rows_past_the_queries_of_a_call_keep_none_of_the_nodes_that_an_earlier_call_left(way: Way) -> None:
    assert_selected(1, [3, 12, 0], 40, 10, way, memory=True)


@pytest.mark.release
@settings(max_examples=60)
@given(
    seed=st.integers(0, 1 << 20),
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    candidates=st.integers(1, 40),
    slots=st.integers(1, 10),
    way=st.sampled_from(WAYS),
    memory=st.booleans(),
)
def test_a_row_gets_its_best_candidates_and_no_other_place_is_written(
    seed: int, sizes: list[int], candidates: int, slots: int, way: Way, memory: bool
) -> None:
    assert_selected(seed, sizes, candidates, slots, way, memory)


def assert_selected(seed: int, sizes: list[int], candidates: int, slots: int, way: Way, memory: bool) -> None:
    rng = np.random.default_rng(seed)
    width, whole, few = way
    batch, stride = len(sizes), slots + int(rng.integers(3))
    nodes_BC = np.where(rng.random((batch, candidates)) < 0.2, -1, np.arange(candidates))
    keys_BC = rng.choice([-np.inf, -1.5, -0.0, 0.0, 1.0, 2.5], (batch, candidates)).astype(np.float32)
    ranks_BC = rng.random((batch, candidates), np.float32)
    given_arrays = [torch.from_numpy(array) for array in (nodes_BC.astype(np.int32), ranks_BC, keys_BC)]
    kept = [torch.full((batch * stride + 64,), GUARD, dtype=dtype) for dtype in (torch.int32, torch.float32, torch.float32)]
    select_kernel[(batch,)](
        *given_arrays, candidates, candidates, torch.tensor(sizes, dtype=torch.int32), *kept, stride, slots,
        width, whole, few, 16, memory, False,
    )  # fmt: skip
    nodes, ranks, keys = (array.numpy() for array in kept)
    for b, size in enumerate(sizes):
        chosen = np.lexsort((nodes_BC[b], -keys_BC[b], nodes_BC[b] < 0))[: min(size, slots)]
        chosen = np.sort(chosen[nodes_BC[b, chosen] >= 0])
        row, rest = slice(b * stride, b * stride + len(chosen)), slice(b * stride + len(chosen), b * stride + slots)
        assert nodes[row].tolist() == nodes_BC[b, chosen].tolist()
        assert keys[row].tolist() == keys_BC[b, chosen].tolist()
        assert set(nodes[rest]) <= {-1}
        assert set(keys[rest]) <= {-np.inf}
        if memory:
            assert ranks[row].tolist() == ranks_BC[b, chosen].tolist()
            assert set(ranks[rest]) <= {-np.inf}
    ends = [*((b * stride + slots, (b + 1) * stride) for b in range(batch)), (batch * stride, batch * stride + 64)]
    for array in (nodes, keys, ranks):
        assert all(set(array[begin:end]) <= {GUARD} for begin, end in ends)
    assert memory or set(ranks) == {GUARD}
