"""Seeded synthetic models of any size over complete binary trees.

`synthetic_bundle` has the papers' scorer with random weights: its answers mean nothing, its cost is that of a trained model of the same
shape. `diffusion_bundle` has a linear scorer whose inner nodes tell what lies below them, so that a beam finds most of the best items.

Legend: N nodes, D node row.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.bundle_writer import GraphContent, write_bundle
from espalier.checks.golden import GOLDEN_COLUMNS
from espalier.items import ItemTable
from espalier.manifest import InnerProductForm, ManifestDraft, Ranking, SearchDefaults
from espalier.queries import HistoryKind, QueryBatch, VectorKind
from espalier.tree import complete_tree
from training.deep.export import scorer_form
from training.deep.scorers.encoders import VectorEncoder, WindowEncoder
from training.deep.scorers.heads import MlpHead, ProductHead
from training.deep.scorers.model import NodeScorer, export_graphs
from training.specification.deep import PAPER_WINDOWS

NODE_DIM = 24
HIDDEN = (128, 64, 24)
VECTOR_DIM = 32
LIKENESS = 0.95
"""Correlation of a child's vector with its parent's; chosen so that overlap with exhaustive scoring is far from 0 and 1."""
NOISE = 0.3
"""Standard deviation of what is added to an item's vector to make a query for `diffusion_bundle`; an item's own numbers have 1."""
CLUSTER = 1024
"""Items of one value of `clustered`: whole subtrees."""


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
    query, scorer = export_graphs(model, "history_nodes", torch.zeros((2, tree.height + 1, length), dtype=torch.int64))
    strings = pa.list_(pa.string())
    content = GraphContent(
        tree=tree,
        stored_rows=model.node_rows.detach().numpy(),
        state_levels=tree.height + 1,
        state_dim=HIDDEN[0],
        query_onnx=query,
        scorer_onnx=scorer,
        form=scorer_form(model, scorer),
        items=ItemTable.build(pa.table({"id": [str(i) for i in range(tree.item_count)]})),
        golden=pa.table({"history": pa.array([], strings)} | {column: pa.array([], kind) for column, kind in GOLDEN_COLUMNS.items()}),
        heldout=pa.table({"history": pa.array([[]], strings), "relevant": pa.array([["0"]], strings)}),
    )
    draft = ManifestDraft(
        name=path.parent.name,
        version=int(path.name),
        algorithm="synthetic",
        created=datetime.now(UTC),
        query=HistoryKind(length=length),
        ranking=Ranking(own="logit", gamma=gamma),
        search=SearchDefaults(beam_size=200, m=200, max_beam_size=1000, max_m=1000),
    )
    return write_bundle(path, draft, content)


def diffused_rows(rng: np.random.Generator, height: int, dim: int) -> NDArray[np.float32]:
    """float32[N, dim], rows of a complete binary tree whose inner nodes tell what lies below.

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
    columns = {"id": [str(i) for i in range(items)], "scattered": rng.random(items), "clustered": clustered}
    head = ProductHead(dim, dim + 1, None)
    query, scorer = export_graphs(NodeScorer(8, dim + 1, VectorEncoder(dim), head, 1.0), "vector", torch.zeros((2, dim)))
    example = pa.array([[0.0] * dim], pa.list_(pa.float32()))
    content = GraphContent(
        tree=complete_tree(leaf_item, 2),
        stored_rows=np.pad(rows_ND, ((0, 0), (0, 1))),  # a bias of 0
        state_levels=1,
        state_dim=dim + 1,
        query_onnx=query,
        scorer_onnx=scorer,
        form=InnerProductForm(),
        items=ItemTable.build(pa.table(columns)),
        golden=pa.table({"vector": example.slice(0, 0)} | {column: pa.array([], kind) for column, kind in GOLDEN_COLUMNS.items()}),
        heldout=pa.table({"vector": example, "relevant": pa.array([["0"]])}),
    )
    draft = ManifestDraft(
        name=name,
        version=1,
        algorithm="synthetic",
        created=datetime.now(UTC),
        query=VectorKind(width=dim),
        ranking=Ranking(own="logit", gamma=0),
        search=SearchDefaults(beam_size=200, m=100, max_beam_size=1000, max_m=1000),
    )
    return write_bundle(path, draft, content)


def diffusion_queries(bundle: Bundle, count: int) -> QueryBatch:
    """Item vectors with noise, for a `diffusion_bundle`."""
    rng = np.random.default_rng(1)
    leaves = bundle.tree.leaf_offset + rng.integers(0, bundle.tree.leaf_count, count)
    rows = bundle.node_rows_ND[leaves][:, :-1]
    return QueryBatch(bundle.manifest.query, (rows + NOISE * rng.standard_normal(rows.shape)).astype(np.float32))
