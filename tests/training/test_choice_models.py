"""Choice by elimination and Plackett–Luce: probabilities of orders, their gradients, and ties."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.papers.nce.boosting import gradient_and_curvature
from training.rankers.choice_models import elimination_loss, plackett_luce_loss
from training.rankers.ties import random_order, tied_elimination_loss, tied_plackett_luce_loss
from training.specification.ranker import ChoiceModel

Loss = Callable[[Tensor, Tensor], Tensor]
Tied = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES = pytest.mark.parametrize("loss", [elimination_loss, plackett_luce_loss])
BOTH = pytest.mark.parametrize(("tied", "loss"), [(tied_elimination_loss, elimination_loss), (tied_plackett_luce_loss, plackett_luce_loss)])


def scores(seed: int, *shape: int, spread: float = 2.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def all_real(scores_BN: Tensor) -> Tensor:
    return torch.ones_like(scores_BN, dtype=torch.bool)


def printed_elimination(f: Tensor) -> Tensor:
    """Eq. 5, term by term."""
    return torch.stack([f[i] + torch.log(torch.exp(-f[: i + 1]).sum()) for i in range(len(f))]).sum()


def printed_plackett_luce(f: Tensor) -> Tensor:
    """Eq. 2, term by term."""
    terms = [-f[i] + torch.log(torch.exp(f[i:]).sum()) for i in range(len(f) - 1)]
    return torch.stack(terms).sum() if terms else f.sum() * 0


@pytest.mark.parametrize(("loss", "printed"), [(elimination_loss, printed_elimination), (plackett_luce_loss, printed_plackett_luce)])
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_values_and_gradients_are_those_of_the_printed_formula_for_queries_of_different_lengths(
    loss: Loss, printed: Callable[[Tensor], Tensor], sizes: list[int], seed: int
) -> None:
    f = scores(seed, len(sizes), max(sizes)).requires_grad_()
    real = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
    expected = torch.stack([printed(row[:size]) for row, size in zip(f, sizes, strict=True)])
    found = loss(f, real)
    torch.testing.assert_close(found, expected)
    weights = torch.arange(1.0, len(sizes) + 1, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(found @ weights, f), torch.autograd.grad(expected @ weights, f))


@LOSSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_scores_give_finite_values_and_gradients(loss: Loss, dtype: torch.dtype) -> None:
    f = torch.tensor([[1e4, -1e4, 0, 1e4, -1e4], [-1e4, -1e4, -1e4, -1e4, 1e4]], dtype=dtype, requires_grad=True)
    value = loss(f, all_real(f))
    (gradient,) = torch.autograd.grad(value.sum(), f)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    assert (value > 1e4).all()


@pytest.mark.parametrize(("model", "printed"), [("elimination", printed_elimination), ("plackett-luce", printed_plackett_luce)])
def test_the_curvature_beside_the_gradient_is_above_the_hessian(model: ChoiceModel, printed: Callable[[Tensor], Tensor]) -> None:
    f, real = scores(7, 1, 6), torch.ones(1, 6, dtype=torch.bool)
    _, curvature = gradient_and_curvature(model, f, real)
    hessian = torch.autograd.functional.hessian(printed, f[0])
    assert isinstance(hessian, Tensor)
    assert torch.linalg.eigvalsh(torch.diag(curvature[0]) - hessian).min() > -1e-10
    assert torch.linalg.eigvalsh(0.5 * torch.diag(curvature[0]) - hessian).min() < 0


# -- ties -----------------------------------------------------------------------------------------------------------------


def marginal_of_grades(loss: Loss, f: Tensor, grades: Tensor) -> Tensor:
    """−log Σ of the probabilities of all orders in which grades fall."""
    orders = [list(order) for order in itertools.permutations(range(len(f))) if (grades[list(order)].diff() <= 0).all()]
    ordered = torch.stack([f[order] for order in orders])
    return -(-loss(ordered, all_real(ordered))).logsumexp(0)


@BOTH
@pytest.mark.parametrize("grades", [[0, 0, 1, 1, 0, 2], [0, 1, 2, 3, 4, 5], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0], [1] * 6])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_marginal_ties_are_the_sum_over_all_orders_that_agree_with_the_grades(
    tied: Tied, loss: Loss, grades: list[int], spread: float
) -> None:
    f = scores(6, 6, spread=spread).requires_grad_()
    expected = marginal_of_grades(loss, f, torch.tensor(grades))
    found = tied(f[None], torch.tensor([grades]), all_real(f[None]))[0]
    assert found.item() == pytest.approx(expected.item(), abs=2e-7)
    torch.testing.assert_close(torch.autograd.grad(found, f)[0], torch.autograd.grad(expected, f)[0], atol=2e-7, rtol=0)


@BOTH
def test_marginal_ties_stay_finite_with_extreme_scores_and_large_groups(tied: Tied, loss: Loss) -> None:
    generator = torch.Generator().manual_seed(1)
    for spread in (1e-3, 30.0, 1e4):
        f = (torch.randn(2, 1000, generator=generator) * spread).requires_grad_()
        value = tied(f, torch.randint(0, 3, (2, 1000), generator=generator), all_real(f))
        (gradient,) = torch.autograd.grad(value.sum(), f)
        assert value.isfinite().all()
        assert gradient.isfinite().all()
        assert (value > 0).all()


def test_random_order_sorts_by_grade_and_shuffles_equal_ones() -> None:
    grades = torch.tensor([[0.0, 2, 0, 1, 2, 0, 9, 9]])
    real = torch.tensor([[True] * 6 + [False] * 2])
    generator = torch.Generator().manual_seed(3)
    seen = set()
    for _ in range(200):
        order = random_order(grades, real, generator)[0].tolist()
        assert sorted(order) == list(range(8))
        assert set(order[:2]) == {1, 4}
        assert order[2] == 3
        assert set(order[3:6]) == {0, 2, 5}
        seen.add(tuple(order[:6]))
    assert len(seen) == 2 * 6
