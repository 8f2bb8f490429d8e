"""The model at the start of training: from a seed, from training users' co-occurrence, or an earlier one's weights.

Knows where first rows come from, and which process makes them. Does not know how they are trained.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from espalier.queries import VectorKind
from espalier.tree import Tree
from training.data.user_item_matrix import events_of_items
from training.deep.content_rows import add_content
from training.deep.parallel import process, processes
from training.deep.prepare import Prepared, item_embeddings
from training.deep.queries import query_kind
from training.deep.row_shares import share_rows, share_weights
from training.deep.scorers.heads import ProductHead
from training.deep.scorers.initial_rows import popularity_biases, rows_from_embeddings
from training.deep.scorers.model import NodeScorer, new_model
from training.deep.scorers.sequence import SequenceQuery
from training.deep.validation import ranked_by
from training.deep.vector_start import start_model
from training.specification.deep import DeepConfig

log = logging.getLogger(__name__)


def first_model(config: DeepConfig, tree: Tree, prepared: Prepared, device: torch.device, shared: bool) -> NodeScorer:
    """`build_model`'s model on a device, the same on every process; where they share node rows, process 0 alone has had them all."""
    if not shared:
        model = build_model(config, tree, prepared).to(device)
    else:
        model = build_model(config, tree, prepared) if process() == 0 else _without_rows(config, tree, prepared)
        share_rows(model, tree.node_count, device)
        log.info("%d processes share %d node rows", processes(), tree.node_count)
    share_weights(model)
    return model


def _without_rows(config: DeepConfig, tree: Tree, prepared: Prepared) -> NodeScorer:
    """A model that lacks node rows, for weights of `build_model`'s shapes."""
    kind = query_kind(config, prepared.interactions)
    model = new_model(config, tree, kind.width if isinstance(kind, VectorKind) else None, nodes=0)
    if prepared.content is not None:
        model.content_table = nn.Parameter(torch.zeros(prepared.content.rows.width, config.scorer.node_dim))
    return model


def build_model(config: DeepConfig, tree: Tree, prepared: Prepared) -> NodeScorer:
    """The model at the start of training: seeded, its node rows from training users' co-occurrence, or all of it an earlier one's.

    That of vectors starts from the means of the vectors that lead to each item, and searches as these would (`vector_start.py`).
    """
    torch.manual_seed(config.seed)
    scorer, kind = config.scorer, query_kind(config, prepared.interactions)
    vector_width = kind.width if isinstance(kind, VectorKind) else None
    model = new_model(config, tree, vector_width)
    if scorer.init == "embeddings":
        biased = isinstance(model.head, ProductHead)  # then the last entry of a row, or of each part of it, is a bias
        encoder = model.encoder
        columns = [part.columns for part in encoder.each] if isinstance(encoder, SequenceQuery) else [slice(0, scorer.node_dim)]
        if vector_width is None:
            embeddings_ID = item_embeddings(prepared, columns[0].stop - biased, config.seed)
        else:
            embeddings_ID = start_model(model, prepared.interactions, prepared.split.train, scorer.init_std, seed=config.seed)
        rows_ND = torch.from_numpy(rows_from_embeddings(tree, embeddings_ID, scorer.init_std))
        events_I = events_of_items(prepared.interactions, prepared.split.train)
        bias_N = torch.from_numpy(popularity_biases(tree, events_I, ranked_by(config)[1]))
        for part in columns:
            model.node_rows.data[:, part.start : part.start + embeddings_ID.shape[1]] = rows_ND
            if biased:
                model.node_rows.data[:, part.stop - 1] = bias_N
    elif scorer.init == "earlier" and prepared.earlier is not None:
        weights = prepared.earlier.model.state_dict()
        model.load_state_dict({name: values for name, values in weights.items() if name != "content_table"})
    if prepared.content is not None:
        add_content(model, prepared.content.rows, tree, prepared.seen_I, fitted=scorer.init != "random")
    return model
