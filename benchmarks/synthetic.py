"""Seeded synthetic models in the form that training exports: two of any size over complete binary trees, and a small one of each scorer.

`synthetic_bundle` has the papers' scorer with random weights: it costs as much as a trained model of its shape, but answers at random.
`diffusion_bundle` has a linear scorer. Its inner nodes resemble the leaves below them, so a beam finds most of the best items.
`trained_kind` makes a small bundle with the graphs of any scorer.

Legend: N nodes, D node row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.random_bundles import make_bundle
from espalier.arrays import Float32
from espalier.bundle import Bundle
from espalier.queries import QueryBatch
from espalier.tree import complete_tree
from training.deep.scorers.encoders import VectorEncoder, WindowEncoder
from training.deep.scorers.heads import MlpHead, ProductHead
from training.deep.scorers.model import NodeScorer, export_graphs, new_scorer, sequence_parts
from training.deep.scorers.sequence import SequenceQuery
from training.specification.deep import PAPER_WINDOWS
from training.specification.networks import SCORER, SequenceScorer

NODE_DIM = 24
HIDDEN = (128, 64, 24)
VECTOR_DIM = 32
LIKENESS = 0.95
"""Correlation of a child's vector with its parent's; chosen so that overlap with exhaustive scoring is far from 0 and 1."""
NOISE = 0.3
"""Standard deviation of the noise that makes a query from an item's vector for `diffusion_bundle`; that of the item's numbers is 1."""
CLUSTER = 1024
"""Items with the same value of `clustered`: a whole subtree."""


def synthetic_bundle(folder: Path, height: int, gamma: float = 0.0, seed: int = 0) -> Bundle:
    """The bundle of 2^height items under `folder`, made once."""
    name = f"synthetic-{height}" + (f"-gamma-{gamma:g}" if gamma else "")
    path = folder / name / "1"
    if path.exists():
        return Bundle.open(path, verify=False)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tree = complete_tree(rng.permutation(1 << height), 2)
    model = NodeScorer(tree.node_count, NODE_DIM, WindowEncoder(PAPER_WINDOWS, NODE_DIM), MlpHead(10 * NODE_DIM, NODE_DIM, HIDDEN), 0.5)
    length = sum(PAPER_WINDOWS)
    graphs = export_graphs(model, "history_nodes", torch.zeros((2, tree.height + 1, length), dtype=torch.int64))
    rows = model.node_rows.detach().numpy()
    sizes: dict[str, Any] = {
        "width": NODE_DIM,
        "length": length,
        "beam_size": 200,
        "m": 200,
        "max_beam_size": 1000,
        "max_m": 1000,
    }
    return make_bundle(folder, rng, tree, gamma=gamma, name=name, rows=rows, graphs=graphs, **sizes)


def diffused_rows(rng: np.random.Generator, height: int, dim: int) -> Float32:
    """float32[N, dim], rows of a complete binary tree whose inner nodes resemble the leaves below them.

    Item vectors come down the tree: a child's is √ρ · its parent's + √(1 − ρ) · noise, ρ = LIKENESS. An inner node's row is the mean of
    the item vectors below.
    """
    rows = rng.standard_normal((1, dim), np.float32)
    for level in range(1, height + 1):
        noise = rng.standard_normal((1 << level, dim), np.float32)
        rows = np.sqrt(np.float32(LIKENESS)) * np.repeat(rows, 2, axis=0) + np.sqrt(np.float32(1 - LIKENESS)) * noise
    levels = [rows]
    while len(levels[0]) > 1:
        levels.insert(0, levels[0].reshape(-1, 2, dim).mean(1))
    return np.concatenate(levels)


def diffusion_bundle(folder: Path, height: int, seed: int = 0, dim: int = VECTOR_DIM) -> Bundle:
    """Vector queries of `dim` numbers over 2^height items under `folder`, made once; logit = ⟨query, row⟩, γ = 0, rows as `diffused_rows`.

    Two columns to filter on: `scattered`, a random number in [0, 1), and `clustered`, one of [0, 1) for each
    subtree of CLUSTER items.
    """
    name = f"diffusion-{height}" + (f"-{dim}" if dim != VECTOR_DIM else "")
    path = folder / name / "1"
    if path.exists():
        return Bundle.open(path, verify=False)
    rng = np.random.default_rng(seed)
    items = 1 << height
    rows_ND = diffused_rows(rng, height, dim)
    leaf_item = rng.permutation(items)
    clustered = np.empty(items)
    clustered[leaf_item] = np.repeat(rng.permutation(-(-items // CLUSTER)) * CLUSTER / items, CLUSTER)[:items]
    columns = {"scattered": rng.random(items), "clustered": clustered}
    head = ProductHead(dim, dim + 1, None)
    graphs = export_graphs(NodeScorer(8, dim + 1, VectorEncoder(dim), head, 1.0), "vector", torch.zeros((2, dim)))
    rows = np.pad(rows_ND, ((0, 0), (0, 1)))  # a bias of 0
    sizes: dict[str, Any] = {"width": dim, "beam_size": 200, "m": 100, "max_beam_size": 1000, "max_m": 1000}
    tree = complete_tree(leaf_item, 2)
    return make_bundle(folder, rng, tree, "vector", name=name, rows=rows, graphs=graphs, columns=columns, **sizes)


def diffusion_queries(bundle: Bundle, count: int) -> QueryBatch:
    """Item vectors with noise, for a `diffusion_bundle`."""
    rng = np.random.default_rng(1)
    leaves = bundle.tree.leaf_offset + rng.integers(0, bundle.tree.leaf_count, count)
    rows = bundle.node_rows_ND[leaves][:, :-1]
    return QueryBatch(bundle.manifest.query, (rows + NOISE * rng.standard_normal(rows.shape)).astype(np.float32))


def trained_kind(folder: Path, kind: str, hidden: tuple[int, ...], rng: np.random.Generator, name: str = "trained") -> Bundle:
    """A bundle with the graphs that training exports, random weights. `sequence`: sequence encoders, with an inner product."""
    tree = complete_tree(rng.permutation(27), 3)
    windows = (3, 2)
    torch.manual_seed(3)
    if kind == "sequence":
        network_parts = sequence_parts(SequenceScorer(node_dim=24, window_hidden=20, dropout=0.0), 5, tree.height + 1)
        model = NodeScorer(tree.node_count, 24, SequenceQuery(5, network_parts), ProductHead(24, 24, None), init_std=1.0)
        graphs = export_graphs(model, "history_leaves", torch.randint(tree.leaf_offset, tree.node_count, (2, 5)))
    else:
        model = new_scorer(SCORER.checked({"kind": kind, "node_dim": 24, "hidden": hidden}), windows, tree.node_count)
        graphs = export_graphs(model, "history_nodes", torch.randint(0, tree.node_count, (2, tree.height + 1, 5)))
    return make_bundle(
        folder,
        rng,
        tree,
        gamma=0.5,
        integer=False,
        graphs=graphs,
        encoder="sequence" if kind == "sequence" else "levels",
        weights={name: tensor.numpy() for name, tensor in model.state_dict().items() if name != "node_rows"},
        width=24,
        length=5,
        name=name,
        max_beam_size=16,
        max_m=20,
    )
