"""The model at the start of training: random, from training users' co-occurrence, or with the weights of an earlier model.

Knows where the first rows come from, and which process makes them. Does not know how they are trained.

Every node may start as the mean of the embeddings of the items below it: a factorisation of the training users' lists knows which items
co-occur, which random rows must learn first. On dense logs this only shortens the start of a run.

Legend: N nodes, I items, D node row, K columns at a time.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import nn

from espalier.arrays import Float32, Float64
from espalier.queries import VectorKind
from espalier.tree import Tree

from ..data.user_item_matrix import events_of_items
from ..deep.content_rows import add_content
from ..deep.directed_start import followers
from ..deep.jtm import sum_below
from ..deep.parallel import process, processes
from ..deep.prepare import Prepared, item_embeddings, with_unseen
from ..deep.queries import query_kind
from ..deep.row_shares import share_rows
from ..deep.scorers.heads import ProductHead
from ..deep.scorers.model import NodeScorer, new_model
from ..deep.scorers.sequence import SequenceQuery, TransformerStates
from ..deep.scorers.window_states import WindowStates
from ..deep.validation import trained_ranking
from ..deep.vector_start import start_model
from ..neighbours.popularity import popularity_ranks
from ..specification.deep import DeepConfig

log = logging.getLogger(__name__)

INVERSE_TEMPERATURE = 15.0
"""A first logit is about so many times the cosine of a node and the mean of a history."""
COLUMNS = 16
"""Columns of rows that are summed at a time, in float64."""


def first_model(config: DeepConfig, tree: Tree, prepared: Prepared, device: torch.device) -> NodeScorer:
    """`build_model`'s model on a device, the same on every process; of several, each has its share of the node rows."""
    if processes() == 1:
        return build_model(config, tree, prepared).to(device)
    model = build_model(config, tree, prepared) if process() == 0 else _new_model_without_rows(config, tree, prepared)
    share_rows(model, tree.node_count, device)
    log.info("%d processes share %d node rows", processes(), tree.node_count)
    return model


def _new_model_without_rows(config: DeepConfig, tree: Tree, prepared: Prepared) -> NodeScorer:
    """A model that lacks node rows, for weights of `build_model`'s shapes."""
    model = new_model(config, tree, query_kind(config, prepared.interactions), nodes=0)
    if prepared.content is not None:
        model.content_table = nn.Parameter(torch.zeros(prepared.content.rows.width, model.node_rows.shape[1]))
    return model


def build_model(config: DeepConfig, tree: Tree, prepared: Prepared) -> NodeScorer:
    """The model at the start of training: seeded, with node rows from training users' co-occurrence, or a copy of an earlier model.

    A model of vectors starts from the mean of the vectors that lead to each item (`vector_start.py`).
    """
    if prepared.shared_start is not None:
        first: NodeScorer = torch.load(prepared.shared_start.model, weights_only=False)
        return first
    torch.manual_seed(config.seed)
    scorer, kind = config.scorer, query_kind(config, prepared.interactions)
    model = new_model(config, tree, kind)
    if scorer.init == "embeddings":
        has_bias = isinstance(model.head, ProductHead)  # then the last entry of a row, or of each part of it, is a bias
        encoder = model.encoder
        columns = [slice(0, model.node_rows.shape[1])]
        if isinstance(encoder, SequenceQuery):
            columns = [part.columns for part in encoder.typed_parts]
        if not isinstance(kind, VectorKind):
            embeddings_ID = item_embeddings(prepared, columns[0].stop - has_bias, config.seed)
        else:
            embeddings_ID = start_model(model, prepared.interactions, prepared.split.train, scorer.init_std, seed=config.seed)
        rows_ND = torch.from_numpy(rows_from_embeddings(tree, embeddings_ID, scorer.init_std))
        events_I = events_of_items(prepared.interactions, prepared.split.train)
        bias_N = torch.from_numpy(popularity_biases(tree, events_I, trained_ranking(config).gamma))
        for part in columns:
            model.node_rows.data[:, part.start : part.start + embeddings_ID.shape[1]] = rows_ND
            if has_bias:
                model.node_rows.data[:, part.stop - 1] = bias_N
        if isinstance(encoder, SequenceQuery):
            _start_parts(model, encoder, tree, prepared, config, embeddings_ID.shape[1])
    elif scorer.init == "earlier" and prepared.earlier is not None:
        weights = prepared.earlier.model.state_dict()
        model.load_state_dict({name: values for name, values in weights.items() if name != "content_table"})
    if prepared.content is not None:
        add_content(model, prepared.content.rows, tree, prepared.seen_I, fitted=scorer.init != "random")
    return model


def _start_parts(model: NodeScorer, encoder: SequenceQuery, tree: Tree, prepared: Prepared, config: DeepConfig, width: int) -> None:
    """Further starts of a sequence's readers: transformers from `directed_start.py`, windows of unordered lists from the mean item."""
    std, has_order = config.scorer.init_std, prepared.interactions.order != "none"
    follower_ND: torch.Tensor | None = None
    for part in encoder.typed_parts:
        if isinstance(part.reader, WindowStates) and not has_order:
            part.reader.start_from_mean(INVERSE_TEMPERATURE / (std**2 * width))
        if isinstance(part.reader, TransformerStates) and has_order:
            if follower_ND is None:
                follower_ID = followers(prepared.interactions, prepared.split.train, width, config.seed)
                follower_ND = torch.from_numpy(rows_from_embeddings(tree, with_unseen(follower_ID, prepared, config.seed), std))
            model.node_rows.data[:, part.columns.start : part.columns.start + follower_ND.shape[1]] = follower_ND


@torch.no_grad()
def by_popularity(config: DeepConfig, prepared: Prepared, tree: Tree) -> NodeScorer:
    """A model whose logits are `popularity_ranks`."""
    model = new_model(config, tree, query_kind(config, prepared.interactions))
    for weights in model.parameters():
        weights.zero_()
    ranks_N = popularity_ranks(tree, events_of_items(prepared.interactions, prepared.split.train))
    model.node_rows[:, -1] = torch.from_numpy(ranks_N)  # the last entry of a query's state is 1
    return model


def rows_from_embeddings(tree: Tree, embeddings_ID: Float32, std: float) -> Float32:
    """float32[N, D]: means over the items below of unit-length embeddings, scaled to root mean square `std` on each level.

    Nodes without items get zero rows.
    """
    length_I = np.linalg.norm(embeddings_ID, axis=1)
    scale_I = np.divide(1, length_I, out=np.zeros(len(length_I)), where=length_I > 0)
    rows_ND = np.empty((tree.node_count, embeddings_ID.shape[1]), np.float32)
    squares_L = np.zeros(tree.height + 1)
    for start in range(0, embeddings_ID.shape[1], COLUMNS):
        columns = slice(start, start + COLUMNS)
        means_NK = _means_below(tree, embeddings_ID[:, columns] * scale_I[:, None])
        squares_L += [np.square(means_NK[tree.level(h).start : tree.level(h).stop]).sum() for h in range(tree.height + 1)]
        rows_ND[:, columns] = means_NK
    for h in range(tree.height + 1):
        size = np.sqrt(squares_L[h] / (tree.level_size(h) * embeddings_ID.shape[1]))
        rows_ND[tree.level(h).start : tree.level(h).stop] *= std / size if size > 0 else 0
    return rows_ND


def _means_below(tree: Tree, values_IK: Float64) -> Float64:
    """float64[N, K]: means over the items below."""
    leaves_nK = np.zeros((tree.leaf_count, values_IK.shape[1]))
    leaves_nK[tree.leaf_of_item - tree.leaf_offset] = values_IK
    means_NK = sum_below(tree, leaves_nK, tree.height)
    means_NK /= np.maximum(tree.items_below, 1)[:, None]
    return means_NK


def popularity_biases(tree: Tree, events_I: Float64, gamma: float) -> Float32:
    """float32[N]: biases with which every node ranks by the log of the events below it; one event more for every item.

    rank(n) = b(n) + γ · rank(parent(n)), so b(n) = log p(n) − γ · log p(parent(n)), p the share of all events; 0 for nodes without items.
    A softmax has to learn popularity first, and a slow learning rate takes long over it.
    """
    share_n = np.zeros(tree.leaf_count)
    share_n[tree.leaf_of_item - tree.leaf_offset] = (events_I + 1) / (events_I + 1).sum()
    share_N = sum_below(tree, share_n, tree.height)
    rank_N = np.log(share_N, out=np.zeros_like(share_N), where=share_N > 0)
    return np.asarray(rank_N - gamma * np.where(share_N > 0, rank_N[tree.parent], 0), np.float32)
