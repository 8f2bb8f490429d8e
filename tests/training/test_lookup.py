"""Rows looked up, and their gradients, against torch's own embedding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor, nn

from training.deep.scorers.lookup import lookup, rows_of

shapes = st.lists(st.sampled_from([(3,), (2, 4), (5, 1, 2)]), min_size=1, max_size=4)


@given(st.integers(0, 2**32 - 1), st.integers(1, 20), shapes)
def test_lookups_and_their_gradients_are_those_of_embedding(seed: int, nodes: int, lookups: list[tuple[int, ...]]) -> None:
    """Repeats inside a lookup, across lookups and across backward passes add up."""
    rng = np.random.default_rng(seed)
    rows = torch.from_numpy(rng.normal(size=(nodes, 3)).astype(np.float32))
    visits = [torch.from_numpy(rng.integers(0, nodes, shape)) for shape in lookups]
    weights = [torch.from_numpy(rng.normal(size=(*shape, 3)).astype(np.float32)) for shape in lookups]

    def gradient(look: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        table = nn.Parameter(rows.clone())
        for _ in range(2):
            found = [look(at, table) for at in visits]
            for one, at in zip(found, visits, strict=True):
                assert torch.equal(one, rows[at])
            torch.stack([(one * weight).sum() for one, weight in zip(found, weights, strict=True)]).sum().backward()
        assert table.grad is not None
        return table.grad

    assert_allclose(gradient(lookup), gradient(nn.functional.embedding), atol=1e-5)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10)), min_size=1, max_size=4))
def test_neighbouring_rows_and_their_gradients_are_those_of_a_slice(spans: list[tuple[int, int]]) -> None:
    """Overlapping ones add up, and with what was looked up, in torch's own way too."""

    def gradient(slices: Callable[[range, Tensor], Tensor]) -> Tensor:
        table = nn.Parameter(torch.arange(30.0).view(10, 3))
        parts = [slices(range(start, min(10, start + length)), table) for start, length in spans]
        total = torch.stack([(part**2).sum() for part in parts]).sum() + lookup(torch.tensor([2, 2]), table).sum()
        total = total + nn.functional.embedding(torch.tensor([2, 5]), table).sum()
        total.backward()
        assert table.grad is not None
        return table.grad

    assert torch.equal(gradient(rows_of), gradient(lambda span, table: table[span.start : span.stop]))


def test_rows_that_were_computed_pass_their_gradient_on() -> None:
    table = nn.Parameter(torch.ones(4, 2))
    lookup(torch.tensor([1, 1, 3]), 2 * table).sum().backward()
    assert table.grad is not None
    assert table.grad.tolist() == [[0, 0], [4, 4], [0, 0], [2, 2]]
