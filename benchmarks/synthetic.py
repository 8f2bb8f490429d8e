"""Seeded synthetic models of any size over complete binary trees.

`synthetic_bundle` has the papers' scorer with random weights: its answers mean nothing, its cost is that of a trained model of the same
shape. `diffusion_bundle` has a linear scorer whose inner nodes tell what lies below them, so that a beam finds most of the best items.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from espalier.bundle import Bundle, BundleContent, write_bundle
from espalier.golden import GOLDEN_COLUMNS
from espalier.items import ItemTable
from espalier.manifest import ManifestDraft, Ranking, SearchDefaults
from espalier.queries import HistoryKind, VectorKind
from espalier.tree import complete_tree
from training.scorers.encoders import PAPER_WINDOWS, VectorEncoder, WindowEncoder
from training.scorers.heads import LinearHead, MlpHead
from training.scorers.model import NodeScorer, export_graphs

NODE_DIM = 24
HIDDEN = (128, 64, 24)
VECTOR_DIM = 32
LIKENESS = 0.95
"""Correlation of a child's vector with its parent's; chosen so that overlap with exhaustive scoring is far from 0 and 1."""
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
    query, scorer = export_graphs(model, "history_nodes", torch.zeros((2, height + 1, length), dtype=torch.int64))
    empty = {"history": pa.array([[]], pa.list_(pa.string()))}
    content = BundleContent(
        tree=tree,
        node_rows_ND=model.node_rows.detach().numpy(),
        state_levels=height + 1,
        state_dim=HIDDEN[0],
        query_onnx=query,
        scorer_onnx=scorer,
        items=ItemTable.build(pa.table({"id": [str(i) for i in range(1 << height)]})),
        golden=pa.table(
            {"history": empty["history"].slice(0, 0)} | {column: pa.array([], kind) for column, kind in GOLDEN_COLUMNS.items()}
        ),
        heldout=pa.table(empty | {"relevant": pa.array([["0"]])}),
    )
    draft = ManifestDraft(
        name=name,
        version=1,
        algorithm="synthetic",
        created=datetime.now(UTC),
        query=HistoryKind(length=length),
        ranking=Ranking(own="logit", gamma=gamma),
        search=SearchDefaults(beam_size=200, m=200, max_beam_size=1000, max_m=1000),
    )
    return write_bundle(path, draft, content)


def diffusion_bundle(folder: Path, height: int, seed: int = 0) -> Bundle:
    """Vector queries over 2^height items under `folder`, made once; logit = ⟨query, row⟩, γ = 0.

    Item vectors come down the tree: a child's is √ρ · its parent's + √(1 − ρ) · noise, ρ = LIKENESS. An inner node's row is the mean of
    the item vectors below. Two columns to filter on: `scattered`, a random number in [0, 1), and `clustered`, one of [0, 1) for each
    subtree of CLUSTER items.
    """
    path = folder / f"diffusion-{height}" / "1"
    if path.exists():
        return Bundle.open(path, verify=False)
    rng = np.random.default_rng(seed)
    items = 1 << height
    rows = rng.standard_normal((1, VECTOR_DIM), np.float32)
    for level in range(1, height + 1):
        noise = rng.standard_normal((1 << level, VECTOR_DIM), np.float32)
        rows = np.sqrt(np.float32(LIKENESS)) * np.repeat(rows, 2, axis=0) + np.sqrt(np.float32(1 - LIKENESS)) * noise
    levels = [rows]
    while len(levels[0]) > 1:
        levels.insert(0, levels[0].reshape(-1, 2, VECTOR_DIM).mean(1))
    leaf_item = rng.permutation(items)
    clustered = np.empty(items)
    clustered[leaf_item] = np.repeat(rng.permutation(-(-items // CLUSTER)) * CLUSTER / items, CLUSTER)[:items]
    columns = {"id": [str(i) for i in range(items)], "scattered": rng.random(items), "clustered": clustered}
    head = LinearHead(VECTOR_DIM, VECTOR_DIM + 1, project=False)
    query, scorer = export_graphs(
        NodeScorer(8, VECTOR_DIM + 1, VectorEncoder(VECTOR_DIM), head, 1.0), "vector", torch.zeros((2, VECTOR_DIM))
    )
    example = pa.array([[0.0] * VECTOR_DIM], pa.list_(pa.float32()))
    content = BundleContent(
        tree=complete_tree(leaf_item, 2),
        node_rows_ND=np.pad(np.concatenate(levels), ((0, 0), (0, 1))),  # a bias of 0
        state_levels=1,
        state_dim=VECTOR_DIM + 1,
        query_onnx=query,
        scorer_onnx=scorer,
        items=ItemTable.build(pa.table(columns)),
        golden=pa.table({"vector": example.slice(0, 0)} | {column: pa.array([], kind) for column, kind in GOLDEN_COLUMNS.items()}),
        heldout=pa.table({"vector": example, "relevant": pa.array([["0"]])}),
    )
    draft = ManifestDraft(
        name=f"diffusion-{height}",
        version=1,
        algorithm="synthetic",
        created=datetime.now(UTC),
        query=VectorKind(width=VECTOR_DIM),
        ranking=Ranking(own="logit", gamma=0),
        search=SearchDefaults(beam_size=200, m=100, max_beam_size=1000, max_m=1000),
    )
    return write_bundle(path, draft, content)
