"""Small bundles with the graphs that training exports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch

from benchmarks.random_bundles import make_bundle
from espalier.bundle import Bundle
from espalier.tree import complete_tree
from training.deep.export import scorer_form
from training.deep.scorers.heads import ProductHead
from training.deep.scorers.model import NodeScorer, export_graphs, new_scorer, sequence_parts
from training.deep.scorers.sequence import SequenceQuery
from training.specification.networks import SCORER, SequenceScorer


def trained_kind(folder: Path, kind: str, hidden: tuple[int, ...], rows: np.random.Generator, name: str = "trained") -> Bundle:
    """A bundle with the graphs that training exports, random weights. `sequence`: sequence encoders, with an inner product."""
    tree = complete_tree(rows.permutation(27), 3)
    windows = (3, 2)
    torch.manual_seed(3)
    if kind == "sequence":
        parts = sequence_parts(SequenceScorer(node_dim=24, window_hidden=20, dropout=0.0), 5, tree.height + 1)
        model = NodeScorer(tree.node_count, 24, SequenceQuery(5, parts), ProductHead(24, 24, None), init_std=1.0)
        graphs = export_graphs(model, "history_leaves", torch.randint(tree.leaf_offset, tree.node_count, (2, 5)))
    else:
        model = new_scorer(SCORER.checked({"kind": kind, "node_dim": 24, "hidden": hidden}), windows, tree.node_count)
        graphs = export_graphs(model, "history_nodes", torch.randint(0, tree.node_count, (2, tree.height + 1, 5)))
    state = onnx.load_from_string(graphs[1]).graph.input[0].type.tensor_type.shape.dim[-1].dim_value
    return make_bundle(
        folder,
        rows,
        tree,
        gamma=0.5,
        integer=False,
        graphs=graphs,
        encoder="sequence" if kind == "sequence" else "levels",
        form=scorer_form(model, graphs[1]),
        weights={name: tensor.numpy() for name, tensor in model.state_dict().items() if name != "node_rows"},
        state_dim=state,
        width=24,
        length=5,
        name=name,
        max_beam_size=16,
        max_m=20,
    )
