"""The trainable model: node rows, a query encoder and a scoring head, with their ONNX forms.

Legend: B queries, L levels, C candidates, D node row, S state, N nodes, T history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from espalier.bundle_writer import Graphs
from espalier.engines.scorer_weights import scorer_graph
from espalier.queries import Kind, VectorKind
from espalier.tree import Tree

from ...deep.scorers.attention import AttentionHead, BehaviourEncoder
from ...deep.scorers.encoders import VectorEncoder, WindowEncoder
from ...deep.scorers.heads import MlpHead, ProductHead
from ...deep.scorers.row_table import Rows, RowTable, lookup, rows_of
from ...deep.scorers.sequence import Reader, SequencePart, SequenceQuery, TransformerStates
from ...deep.scorers.window_states import WindowStates, windows_of
from ...onnx_graphs import onnx_bytes
from ...specification.deep import DeepConfig
from ...specification.networks import AttentionScorer, MlpScorer, Scorer, SequenceScorer
from ...specification.sections import number_of

Encoder = WindowEncoder | BehaviourEncoder | VectorEncoder | SequenceQuery
Head = ProductHead | MlpHead | AttentionHead


class NodeScorer(nn.Module):
    """g(query, node) → logit, over all nodes of a tree.

    node_rows      float32[N, D], drawn from N(0, init_std²); where processes share the rows, this process's (`training.deep.row_shares`)
    row_table      the table for lookups, in training and if processes share the rows; None: lookups read node_rows
    content_table  float32[F, D]: item features @ content_table is added to leaf rows (`training.deep.content_rows`); None: nothing is
    """

    content_table: nn.Parameter | None

    def __init__(self, nodes: int, node_dim: int, encoder: Encoder, head: Head, init_std: float) -> None:
        super().__init__()
        self.node_rows = nn.Parameter(torch.randn(nodes, node_dim) * init_std)
        self.register_parameter("content_table", None)
        self.encoder = encoder
        self.head = head
        self.row_table: RowTable | None = None

    @property
    def table(self) -> Rows:
        """The node rows to look up in."""
        return self.node_rows if self.row_table is None else self.row_table

    def state(self, query: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """history_nodes [B, L, T], history_leaves [B, T] or vector [B, F] → query states [B, L, S] (L = 1 for vectors).

        generator  for a head with dropout; without one, as in serving, nothing is dropped
        """
        features_BLF = self.encoder(query, self.table)
        return self.head.state(features_BLF, generator) if isinstance(self.head, ProductHead) else self.head.state(features_BLF)

    def logits(self, state_BLS: Tensor, nodes_BC: Tensor, level: int) -> Tensor:
        """Logits [B, C] of nodes on one level."""
        rows_BCD = lookup(nodes_BC, self.table)
        state = state_BLS[:, 0 if state_BLS.shape[1] == 1 else level]
        logits: Tensor = self.head(state, rows_BCD)
        return logits

    def logits_of_level(self, state_BLS: Tensor, level: int, span: range) -> Tensor:
        """Logits [B, n] of all nodes `span` of a level, for a `ProductHead`: one matrix product, rounded to bfloat16 under autocast."""
        return state_BLS[:, 0 if state_BLS.shape[1] == 1 else level] @ rows_of(span, self.table).T


def new_model(config: DeepConfig, tree: Tree, kind: Kind, nodes: int | None = None) -> NodeScorer:
    """The model of a whole configuration over a tree, with random weights, from torch's generator as it stands.

    kind   of queries: vectors or histories
    nodes  number of node rows at the start; None: one for each node of the tree
    """
    scorer, nodes = config.scorer, tree.node_count if nodes is None else nodes
    if not isinstance(scorer, SequenceScorer):
        width = kind.width if isinstance(kind, VectorKind) else None
        return new_scorer(scorer, config.windowed_instances.windows, nodes, width)
    parts = sequence_parts(scorer, config.history_length, tree.height + 1, config.data.format.order != "none")
    encoder = SequenceQuery(config.history_length, parts)
    return NodeScorer(nodes, scorer.width, encoder, ProductHead(scorer.width, scorer.width, None), scorer.init_std)


def sequence_parts(config: SequenceScorer, length: int, levels: int, ordered: bool = True) -> list[SequencePart]:
    """The configured parts, with equal shares of the row's columns, for lists with an order or without."""
    encoders, windows, parts = config.readers(ordered), windows_of(length) if ordered else (length,), []
    width = config.width // len(encoders)
    for number, name in enumerate(encoders):
        reader: Reader
        if name == "transformer":
            reader = TransformerStates(width, config.layers, config.heads, length)
            dropout = number_of("scorer.dropout", config.dropout)
        else:
            reader, dropout = WindowStates(width, config.window_hidden, windows), config.window_dropout
        parts.append(SequencePart(reader, slice(number * width, (number + 1) * width), levels, dropout))
    return parts


def new_scorer(config: Scorer, windows: Sequence[int], nodes: int, vector_width: int | None = None) -> NodeScorer:
    """A configured model with random weights, from torch's generator as it stands.

    windows       of histories
    vector_width  width of query vectors; None: queries are histories
    """
    encoder: Encoder
    head: Head
    if isinstance(config, AttentionScorer):
        encoder = BehaviourEncoder(windows, config.node_dim)
        head = AttentionHead(windows, config.node_dim, config.attention_hidden, config.hidden)
    else:
        encoder = WindowEncoder(windows, config.node_dim) if vector_width is None else VectorEncoder(vector_width)
        if isinstance(config, MlpScorer):
            head = MlpHead(encoder.features, config.node_dim, config.hidden)
        else:
            head = ProductHead(encoder.features, config.node_dim, config.hidden, config.dropout)
    return NodeScorer(nodes, config.node_dim, encoder, head, config.init_std)


class QueryGraph(nn.Module):
    """query.onnx: (query, node_rows float32[N, D]) → query_state float32[B, L, S].

    The query is history_nodes int64[B, L, T], history_leaves int64[B, T] or vector float32[B, F].
    """

    def __init__(self, model: NodeScorer) -> None:
        super().__init__()
        self.encoder, self.head = model.encoder, model.head

    def forward(self, query: Tensor, node_rows: Tensor) -> Tensor:
        return self.head.state(self.encoder(query, node_rows))


def export_graphs(model: NodeScorer, query_name: str, example: Tensor) -> Graphs:
    """The graphs of a model. Only ONNX Runtime runs a scorer without a form, that is, attention.

    query_name  `history_nodes`, `history_leaves` or `vector`
    example     a batch of at least two such queries, of at least two positions; it fixes the sizes that are not dynamic: F of vectors,
                and T if the states grow with it
    """
    model = model.eval().cpu()
    dim = torch.export.Dim
    query_dims: dict[int, Any] = {0: dim.DYNAMIC}
    if query_name != "vector":
        query_dims |= dict.fromkeys(range(1, example.ndim), dim.DYNAMIC)
    if isinstance(model.encoder, BehaviourEncoder):
        del query_dims[2]
    rows_ND = model.node_rows.detach()
    uses_rows = not isinstance(model.encoder, VectorEncoder)
    query = onnx_bytes(
        QueryGraph(model), (example, rows_ND), [query_name, "node_rows"], "query_state", [query_dims, {0: dim.DYNAMIC} if uses_rows else {}]
    )
    weights, state_dim = model.head.scorer_weights(), model.head.state_dim
    if weights is not None:
        return Graphs(query, scorer_graph(weights, state_dim, rows_ND.shape[1]), state_dim, weights.form)
    state_BS = model.state(example)[:, -1].detach().contiguous()  # the graph would record other strides
    rows_BCD = rows_ND[torch.arange(3 * len(state_BS)).view(len(state_BS), 3) % len(rows_ND)]
    scorer = onnx_bytes(
        model.head, (state_BS, rows_BCD), ["query_state", "node_rows"], "logits", [{0: dim.DYNAMIC}, {0: dim.DYNAMIC, 1: dim.DYNAMIC}]
    )
    return Graphs(query, scorer, state_dim)
