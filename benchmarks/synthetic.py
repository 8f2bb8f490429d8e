"""A seeded synthetic model of any size with the papers' scorer, for speed benchmarks: random weights, a complete binary tree.

Its answers mean nothing; its cost is that of a trained model of the same shape.
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
from espalier.queries import HistoryKind
from espalier.tree import complete_tree
from training.scorers.encoders import PAPER_WINDOWS, WindowEncoder
from training.scorers.heads import MlpHead
from training.scorers.model import NodeScorer, export_graphs

NODE_DIM = 24
HIDDEN = (128, 64, 24)


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
