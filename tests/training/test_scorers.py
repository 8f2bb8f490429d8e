"""Scorers: dropout, padding, TDM's attention unit by the paper's words and within bounded memory; rows updated when they are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor, nn

from espalier.tree import complete_tree
from training.deep.export import check_parity
from training.deep.fit import LOSSES
from training.deep.optimiser import AVERAGE_EVERY, averaged_over, mean_share
from training.deep.row_adam import RowAdam
from training.deep.scorers import attention
from training.deep.scorers.attention import AttentionHead
from training.deep.scorers.encoders import WindowEncoder
from training.deep.scorers.heads import ProductHead, dropped
from training.deep.scorers.model import NodeScorer, export_graphs, new_scorer
from training.deep.scorers.row_table import RowTable
from training.deep.topology import Topology
from training.specification.models import deep_config
from training.specification.networks import AttentionScorer

CPU = torch.device("cpu")
WINDOWS = (2, 1, 1)


# -- dropout and padding --------------------------------------------------------------------------------------------------


def test_dropout_is_one_for_all_levels_of_a_query_and_keeps_means() -> None:
    x_BLF = torch.ones(400, 3, 50)
    got_BLF = dropped(x_BLF, 0.2, torch.Generator().manual_seed(3))
    assert np.unique(got_BLF).tolist() == [0, 1.25]
    assert torch.equal(got_BLF, got_BLF[:, :1].expand(-1, 3, -1))
    assert got_BLF.mean().item() == pytest.approx(1, abs=0.01)
    assert len(np.unique(got_BLF[:, 0], axis=0)) == 400  # every query has its own
    assert torch.equal(got_BLF, dropped(x_BLF, 0.2, torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("kind", ["otm-robust", "otm", "otm-no-bs", "otm-no-optest", "tdm", "plt", "hsm"])
def test_every_objective_trains_with_dropout(kind: str) -> None:
    tree = complete_tree(np.arange(16), 2)
    encoder = WindowEncoder(WINDOWS, 4)
    model = NodeScorer(tree.node_count, 4, encoder, ProductHead(encoder.features, 4, [5], dropout=0.5), 1.0)
    query = Topology(tree, CPU).history_nodes(torch.arange(2 * sum(WINDOWS)).view(2, -1) % 16)
    config = deep_config({"name": "a", "kind": kind, "data": {"log": "a.csv"}}).objective

    def value(dropout: float) -> float:
        cast(ProductHead, model.head).dropout = dropout
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            return LOSSES[kind](model, Topology(tree, CPU), query, torch.tensor([[3], [9]]), config, generator).item()

    assert value(0.5) != value(0.0)


@pytest.mark.parametrize("levels", [1, 4])
def test_histories_without_their_padding_are_encoded_as_with_it(levels: int) -> None:
    """The graph that is exported takes padding too; real places lie anywhere, and some windows and histories are empty."""
    rng = np.random.default_rng(levels)
    nodes_BLT = torch.from_numpy(rng.integers(0, 9, (6, levels, 7)))
    nodes_BLT = torch.where(torch.from_numpy(rng.random((6, 1, 7)) < 0.6), -1, nodes_BLT)
    nodes_BLT[2] = -1
    encoder, rows_ND = WindowEncoder((4, 2, 1), 5), torch.from_numpy(rng.normal(size=(9, 5)).astype(np.float32))
    got_BLF = encoder(nodes_BLT, rows_ND)
    for b, h in np.ndindex(6, levels):
        for w, window in enumerate((slice(0, 4), slice(4, 6), slice(6, 7))):
            real = [node for node in nodes_BLT[b, h, window].tolist() if node >= 0]
            expected = rows_ND[real].mean(0) if real else torch.zeros(5)
            assert_allclose(got_BLF[b, h, 5 * w : 5 * w + 5], expected, atol=1e-6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.compiler.is_exporting", lambda: True)
        assert_allclose(encoder(nodes_BLT, rows_ND), got_BLF, atol=1e-6)


# -- attention ------------------------------------------------------------------------------------------------------------


SMALL_WINDOWS = (3, 2, 1)
DIM, NODES = 4, 20


def small_scorer(windows: tuple[int, ...] = SMALL_WINDOWS, dim: int = DIM, nodes: int = NODES) -> NodeScorer:
    return new_scorer(AttentionScorer(node_dim=dim, hidden=(6, 5), init_std=1.0, attention_hidden=3), windows, nodes)


def histories(rng: np.random.Generator, batch: int, levels: int, length: int, nodes: int = NODES) -> Tensor:
    """int64[B, L, T] nodes; the same places are padding on all levels."""
    history = rng.integers(0, nodes, (batch, levels, length))
    return torch.from_numpy(np.where(rng.random((batch, 1, length)) < 0.3, -1, history))


def prelu(unit: Any, x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, unit.weight.detach().numpy() * x)


def dense(layer: Any, x: np.ndarray) -> np.ndarray:
    added: np.ndarray = layer.weight.detach().numpy() @ x + layer.bias.detach().numpy()
    return added


def literal_logit(model: NodeScorer, history_T: np.ndarray, node: int, windows: tuple[int, ...]) -> float:
    """The unit as the paper draws it, behaviour by behaviour: concatenate, dense, PReLU, dense; weigh, average, concatenate, network."""
    head = model.head
    assert isinstance(head, AttentionHead)
    rows = model.node_rows.detach().numpy()
    first = np.concatenate([part.weight.detach().numpy() for part in (head.behaviour_part, head.product_part, head.node_part)], 1)
    pooled, start = [], 0
    for length in windows:
        real = [rows[n] for n in history_T[start : start + length] if n >= 0]
        total = np.zeros(rows.shape[1])
        for row in real:
            joined = np.concatenate([row, row * rows[node], rows[node]])
            hidden = prelu(head.slope, first @ joined + head.behaviour_part.bias.detach().numpy())
            total += dense(head.out, hidden)[0] * row
        pooled.append(total / max(1, len(real)))
        start += length
    network = head.network
    first = np.concatenate([network.query_part.weight.detach().numpy(), network.node_part.weight.detach().numpy()], 1)
    x = prelu(network.slopes[0], first @ np.concatenate([*pooled, rows[node]]) + network.query_part.bias.detach().numpy())
    for layer, slope in zip(network.layers, list(network.slopes)[1:], strict=True):
        x = prelu(slope, dense(layer, x))
    return float(dense(network.out, x)[0])


@given(
    seed=st.integers(0, 2**32 - 1),
    windows=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    dim=st.integers(2, 5),
    batch=st.integers(1, 3),
    candidates=st.integers(1, 4),
)
def test_the_logit_is_that_of_the_paper_s_unit(seed: int, windows: list[int], dim: int, batch: int, candidates: int) -> None:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = small_scorer(tuple(windows), dim).double()
    history_BLT = histories(rng, batch, 2, sum(windows))
    nodes_BC = rng.integers(0, NODES, (batch, candidates))
    state_BLS = model.state(history_BLT)
    for level in range(2):
        logits_BC = model.logits(state_BLS, torch.from_numpy(nodes_BC), level).detach().numpy()
        for b in range(batch):
            expected = [literal_logit(model, history_BLT[b, level].numpy(), n, tuple(windows)) for n in nodes_BC[b]]
            assert_allclose(logits_BC[b], expected, rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(1)
    model = small_scorer((2, 1), 2, 6).double()
    history_BLT, nodes_BC = torch.tensor([[[3, 4, 5]], [[-1, 2, 1]]]), torch.tensor([[1, 2, 3], [4, 5, 0]])

    def logits(rows_ND: Tensor, *_: Tensor) -> Tensor:
        table_ND = rows_ND.clone()  # gradients of a parameter's looked-up rows bypass autograd's own bookkeeping
        state_BLS = model.head.state(model.encoder(history_BLT, table_ND))
        scored: Tensor = model.head(state_BLS[:, 0], table_ND[nodes_BC])
        return scored

    assert torch.autograd.gradcheck(logits, (model.node_rows, *model.head.parameters()))


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    model, rng = small_scorer(), np.random.default_rng(2)
    history_BLT, nodes_BC = histories(rng, 7, 1, 6), torch.from_numpy(rng.integers(0, NODES, (7, 5)))
    found = []
    for queries in (1, 3, 7):
        monkeypatch.setitem(attention.BLOCK_BYTES, "cpu", 4 * 6 * 3 * 5 * queries)
        model.zero_grad()
        logits_BC = model.logits(model.state(history_BLT), nodes_BC, 0)
        logits_BC.square().sum().backward()
        found.append([logits_BC.detach(), *(parameter.grad for parameter in model.parameters())])
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert one is not None
            assert same is not None
            assert_allclose(same.numpy(), one.numpy(), rtol=1e-4, atol=1e-5)


def test_memory_for_the_gradient_does_not_grow_with_the_behaviours_of_every_candidate() -> None:
    """What is kept until the backward pass: less than a tenth of the hidden units, and not much more than rows and states."""
    batch, candidates, length = 8, 100, 40
    model = small_scorer((20, 20))
    history_BLT = torch.randint(0, NODES, (batch, 1, length))
    nodes_BC = torch.randint(0, NODES, (batch, candidates))
    state_BLS = model.state(history_BLT)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def give(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, give):
        model.logits(state_BLS, nodes_BC, 0)
    hidden_bytes = 4 * batch * candidates * length * 3
    assert 0 < sum(kept.values()) < hidden_bytes / 10


# -- serving ------------------------------------------------------------------------------------------------------------


def test_the_graphs_take_any_batch_levels_and_candidates() -> None:
    torch.manual_seed(4)
    rng = np.random.default_rng(4)
    model = small_scorer().eval()
    graphs = export_graphs(model, "history_nodes", histories(rng, 3, 4, 6))
    assert graphs.form is None, "only ONNX Runtime runs it"
    assert not any(b".py" in graph for graph in (graphs.query_onnx, graphs.scorer_onnx)), "the paths of the machine that trained it"
    for batch, levels in ((1, 1), (5, 2), (2, 7)):
        assert check_parity(model, graphs, histories(rng, batch, levels, 6)) < 1e-5


# -- Adam of rows ---------------------------------------------------------------------------------------------------------


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
            adam.average(mean_share(SPAN, averages))
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
        assert table.held_nD.grad is None, "no gradient of the whole table"
        whole.grad = None
