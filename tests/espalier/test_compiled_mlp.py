"""Compiled code computes an MLP as its weights say, each row by itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from espalier.engines.compiled.mlp import mlp_logits, packed
from espalier.engines.scorer_weights import Layer, ScorerWeights
from espalier.read_only import read_only

Floats = NDArray[np.float32]


def random_scorer(rng: np.random.Generator, widths: list[int], integer: bool) -> ScorerWeights:
    def numbers(*shape: int) -> Floats:
        return (rng.integers(-2, 3, shape) if integer else rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    def slopes(width: int) -> Floats:
        return (rng.integers(0, 2, width) if integer else rng.uniform(-1, 1, width)).astype(np.float32)

    layers = tuple(Layer(numbers(before, after), numbers(after), slopes(after)) for before, after in pairwise(widths))
    return ScorerWeights(layers, numbers(widths[-1]), float(numbers(1)[0]))


def logits_of(scorer: ScorerWeights, counts: list[int], rows_PD: Floats, place_X: NDArray[np.int64], states_BS: Floats) -> Floats:
    """Those of all rows for queries of so many of them each."""
    begin_B = np.append(0, np.cumsum(counts))
    logits_C: Floats = mlp_logits(*read_only(begin_B, np.arange(begin_B[-1]), place_X, rows_PD, states_BS), packed(scorer))
    return logits_C


@given(
    seed=st.integers(0, 2**32 - 1),
    widths=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    integer=st.booleans(),
)
def test_logits_are_those_of_the_weights(seed: int, widths: list[int], counts: list[int], integer: bool) -> None:
    rng = np.random.default_rng(seed)
    scorer, total = random_scorer(rng, widths, integer), sum(counts)
    rows_PD: Any = rng.integers(-2, 3, (total, widths[0])) if integer else rng.standard_normal((total, widths[0]))
    states_BS: Any = rng.integers(-2, 3, (len(counts), widths[1])) if integer else rng.standard_normal((len(counts), widths[1]))
    rows_PD, states_BS, place_X = rows_PD.astype(np.float32), states_BS.astype(np.float32), rng.permutation(total)
    found_C = logits_of(scorer, counts, rows_PD, place_X, states_BS)
    rows_CD = rows_PD[place_X]
    expected_C = scorer.logits(np.repeat(states_BS, counts, axis=0), rows_CD[:, None])[:, 0]
    if integer:
        assert_array_equal(found_C, expected_C)
    else:
        assert_allclose(found_C, expected_C, rtol=1e-4, atol=1e-4)


def test_a_row_that_overflows_leaves_the_others_alone() -> None:
    rng = np.random.default_rng(3)
    scorer, rows_PD, states_BS = random_scorer(rng, [5, 7, 3], False), rng.standard_normal((6, 5), np.float32), np.zeros((1, 7), np.float32)
    before_C = logits_of(scorer, [6], rows_PD, np.arange(6), states_BS)
    rows_PD[2] = 3e38
    after_C = logits_of(scorer, [6], rows_PD, np.arange(6), states_BS)
    assert np.flatnonzero(~np.isfinite(after_C)).tolist() == [2]
    assert_array_equal(np.delete(after_C, 2), np.delete(before_C, 2))


@given(st.integers(1, 9))
def test_a_row_scores_the_same_whichever_rows_stand_beside_it(count: int) -> None:
    rng = np.random.default_rng(4)
    scorer, rows_PD, states_BS = (
        random_scorer(rng, [13, 30, 11], False),
        rng.standard_normal((9, 13), np.float32),
        np.ones((1, 30), np.float32),
    )
    whole_C = logits_of(scorer, [9], rows_PD, np.arange(9), states_BS)
    assert_array_equal(logits_of(scorer, [count], rows_PD, np.arange(9)[-count:], states_BS), whole_C[-count:])
