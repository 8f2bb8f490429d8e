"""Rows that are updated when they are read, against dense AdamW and the mean of its weights over steps; and what a model's table does."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor, nn

from training.deep.optimiser import AVERAGE_EVERY, averaged_over, share_kept
from training.deep.row_adam import RowAdam
from training.deep.scorers.row_table import RowTable

ROWS, WIDTH, SPAN = 40, 3, 12
BETAS = (0.9, 0.98)


def rate_at(step: int) -> float:
    return 0.01 * min((step + 1) / 5, 1 - step / 200)


def gradients(rng: np.random.Generator, step: int) -> tuple[Tensor, Tensor]:
    """Of a step: some rows and their gradients. Row 0 has one in every step, rows 1 and 2 in the first only, the last 5 never."""
    drawn = rng.permutation(np.arange(3, ROWS - 5))[:4]
    places = torch.from_numpy(np.concatenate([[0], [1, 2] if step == 0 else [], drawn]).astype(np.int64))
    return places, torch.from_numpy(rng.normal(size=(len(places), WIDTH)).astype(np.float32) * 10.0 ** rng.uniform(-2, 0))


@dataclass
class Dense:
    """torch's optimiser of a whole table, and the mean of its weights."""

    decay: float
    rows: nn.Parameter
    averaged: torch.optim.swa_utils.AveragedModel = field(init=False)

    def __post_init__(self) -> None:
        module = nn.Module()
        module.rows = self.rows
        self.module = module
        self.adam = torch.optim.AdamW([self.rows], betas=BETAS, weight_decay=self.decay)
        self.averaged = averaged_over(SPAN, module)

    def step(self, places: Tensor, gradient: Tensor, rate: float) -> None:
        self.rows.grad = torch.zeros_like(self.rows).index_add(0, places, gradient)
        self.adam.param_groups[0]["lr"] = rate
        self.adam.step()

    @property
    def mean(self) -> Tensor:
        (mean,) = self.averaged.module.parameters()
        return mean.detach()


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_rows_and_their_means_are_those_of_dense_adamw(decay: float) -> None:
    """Rows are read at some steps and left alone for long at others; the last 60 steps are after all rows were brought up to date."""
    rng = np.random.default_rng(3)
    first_ND = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    dense = Dense(decay, nn.Parameter(first_ND.clone()))
    rows_ND, mean_ND, averages = first_ND.clone(), first_ND.clone(), 0
    adam = RowAdam(rows_ND, mean_ND, BETAS, decay)
    for step in range(160):
        places, gradient = gradients(rng, step)
        adam.refresh(places)
        assert_allclose(rows_ND[places], dense.rows.detach()[places], atol=2e-6)
        adam.step(places, gradient, rate_at(step))
        dense.step(places, gradient, rate_at(step))
        assert_allclose(rows_ND[places], dense.rows.detach()[places], atol=2e-6)
        if (step + 1) % AVERAGE_EVERY == 0:
            adam.average(share_kept(SPAN, averages))
            averages += 1
            dense.averaged.update_parameters(dense.module)
        if step in (99, 159):
            adam.refresh_all()
            assert_allclose(rows_ND, dense.rows.detach(), atol=2e-6)
            assert_allclose(mean_ND, dense.mean, atol=2e-6)
            assert (rows_ND[1] - first_ND[1]).abs().min() > 0.005, "momentum moved it on"


def test_a_step_writes_nothing_but_the_rows_that_have_a_gradient() -> None:
    rows_ND = torch.ones(ROWS, WIDTH)
    adam = RowAdam(rows_ND, rows_ND.clone(), BETAS, 0.1)
    for step in range(3):
        adam.step(torch.tensor([4, 7]), torch.ones(2, WIDTH), 0.01)
        assert (rows_ND != 1).any(1).nonzero().flatten().tolist() == [4, 7], step
    adam.refresh_all()
    assert_allclose(rows_ND[0], (1 - 0.01 * 0.1) ** 3, rtol=1e-6)


def test_a_run_that_went_on_from_its_state_has_the_same_bytes() -> None:
    def run(adam: RowAdam, steps: range) -> None:
        for step in steps:
            adam.step(*gradients(np.random.default_rng(step), step), rate_at(step))
            adam.average(share_kept(SPAN, step))

    whole_ND, mean_ND = torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH)
    whole = RowAdam(whole_ND, mean_ND, BETAS, 0.1)
    run(whole, range(20))
    whole.refresh_all()
    again_ND, again_mean_ND = whole_ND.clone(), mean_ND.clone()
    again = RowAdam(again_ND, again_mean_ND, BETAS, 0.1)
    again.load_state_dict({name: value.clone() if isinstance(value, Tensor) else value for name, value in whole.state_dict().items()})
    for adam in (whole, again):
        run(adam, range(20, 40))
        adam.refresh_all()
    assert torch.equal(whole_ND, again_ND)
    assert torch.equal(mean_ND, again_mean_ND)


# -- the table ------------------------------------------------------------------------------------------------------------


def test_a_tables_gradients_are_those_of_all_its_lookups() -> None:
    """Repeats inside a lookup and across lookups add up; a lookup that nothing followed from adds nothing; each is counted once."""
    rng = np.random.default_rng(5)
    whole = nn.Parameter(torch.from_numpy(rng.normal(size=(9, 2)).astype(np.float32)))
    table = RowTable(nn.Parameter(whole.detach().clone()), 9)
    lookups = [torch.tensor(nodes) for nodes in ([1, 3, 8], [[3, 3], [0, 1]], [7, 2])]
    for repeat in range(2):
        weights = [torch.from_numpy(rng.normal(size=(*nodes.shape, 2)).astype(np.float32)) for nodes in lookups]
        for look in (table.lookup, lambda nodes: whole[nodes]):
            found = [look(nodes) for nodes in lookups]
            assert all(torch.equal(rows, whole[nodes]) for rows, nodes in zip(found, lookups, strict=True))
            torch.stack([(rows * weight).sum() for rows, weight in zip(found[:2], weights[:2], strict=True)]).sum().backward()
        with torch.no_grad():
            table.lookup(torch.tensor([5]))
        places, gradient = table.gradients()
        assert places.tolist() == [0, 1, 2, 3, 7, 8], repeat
        assert whole.grad is not None
        assert_allclose(gradient, whole.grad[places], atol=1e-6)
        assert table.own.grad is None, "no gradient of the whole table"
        whole.grad = None


def test_a_lookup_brings_rows_up_to_date_and_does_nothing_to_others() -> None:
    rows = nn.Parameter(torch.ones(6, 2))
    adam = RowAdam(rows, torch.ones(6, 2), BETAS, 1.0)
    table = RowTable(rows, 6, adam)
    adam.step(torch.tensor([0]), torch.zeros(1, 2), 0.1)
    assert_allclose(table.lookup(torch.tensor([[4, 0], [4, 4]])).detach(), np.full((2, 2, 2), 0.9), rtol=1e-6)
    assert rows[[1, 2, 3, 5]].detach().eq(1).all()
