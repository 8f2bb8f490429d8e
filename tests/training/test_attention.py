"""TDM's attention unit: equal to the paper's words, trained within bounded memory, exported, served, and worth it where pooling fails.

Legend: B queries, L levels, T history, C candidates, D node row, G groups.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor

from training.deep.export import check_parity, scorer_form
from training.deep.scorers import attention
from training.deep.scorers.attention import AttentionHead
from training.deep.scorers.model import NodeScorer, export_graphs, new_scorer
from training.specification.networks import SCORER

WINDOWS = (3, 2, 1)
DIM, NODES = 4, 20


def small_scorer(kind: str = "attention", windows: tuple[int, ...] = WINDOWS, dim: int = DIM, nodes: int = NODES) -> NodeScorer:
    config = SCORER.checked(
        {"kind": kind, "node_dim": dim, "hidden": [6, 5], "init_std": 1.0} | ({"attention_hidden": 3} if kind == "attention" else {})
    )
    return new_scorer(config, windows, nodes)


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
    model = small_scorer("attention", tuple(windows), dim).double()
    history_BLT = histories(rng, batch, 2, sum(windows))
    nodes_BC = rng.integers(0, NODES, (batch, candidates))
    state_BLS = model.state(history_BLT)
    for level in range(2):
        logits_BC = model.logits(state_BLS, torch.from_numpy(nodes_BC), level).detach().numpy()
        for b in range(batch):
            expected = [literal_logit(model, history_BLT[b, level].numpy(), n, tuple(windows)) for n in nodes_BC[b]]
            assert_allclose(logits_BC[b], expected, rtol=1e-9, atol=1e-9)


def test_padding_counts_nothing() -> None:
    """Neither the attention network nor the row that padding is looked up as has a say in the answer for an empty history."""
    torch.manual_seed(0)
    model = small_scorer()
    nodes_BC = torch.arange(5, 11)[None]
    empty_BLT, one_BLT = torch.full((1, 1, 6), -1), torch.tensor([[[-1, -1, 7, -1, -1, 3]]])
    before = [model.logits(model.state(history), nodes_BC, 0).detach() for history in (empty_BLT, one_BLT)]
    with torch.no_grad():
        model.node_rows[0] = 100.0
    after = [model.logits(model.state(history), nodes_BC, 0).detach() for history in (empty_BLT, one_BLT)]
    for old, new in zip(before, after, strict=True):
        assert_array_equal(new.numpy(), old.numpy())
    assert isinstance(model.head, AttentionHead)
    with torch.no_grad():
        model.head.out.weight.mul_(-3.0)
    assert_array_equal(model.logits(model.state(empty_BLT), nodes_BC, 0).detach().numpy(), before[0].numpy())
    assert not np.allclose(model.logits(model.state(one_BLT), nodes_BC, 0).detach().numpy(), before[1].numpy())


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(1)
    model = small_scorer("attention", (2, 1), 2, 6).double()
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
    model = small_scorer("attention", (20, 20))
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
    assert scorer_form(model, graphs[1]) is None, "only ONNX Runtime runs it"
    for batch, levels in ((1, 1), (5, 2), (2, 7)):
        assert check_parity(model, *graphs, histories(rng, batch, levels, 6)) < 1e-5
