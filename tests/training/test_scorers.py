"""Scorers: dropout, and histories without their padding."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from espalier.tree import complete_tree
from training.deep.fit import LOSSES
from training.deep.scorers.encoders import WindowEncoder
from training.deep.scorers.heads import ProductHead, dropped
from training.deep.scorers.model import NodeScorer
from training.deep.topology import Topology
from training.specification.models import deep_config

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


def test_dropout_is_for_training_only() -> None:
    head = ProductHead(6, 4, [5], dropout=0.5)
    x_BLF = torch.from_numpy(np.random.default_rng(1).normal(size=(8, 2, 6)).astype(np.float32))
    with torch.no_grad():
        served = head.state(x_BLF)
        assert torch.equal(served, head.eval().state(x_BLF))
        assert not torch.equal(served, head.state(x_BLF, torch.Generator().manual_seed(1)))
        head.dropout = 0.0
        assert torch.equal(served, head.state(x_BLF, torch.Generator().manual_seed(1)))


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
