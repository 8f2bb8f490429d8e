"""Inputs of a model in training: for histories the leaves of their items, or the ancestors on every level; vectors unchanged.

Knows how histories differ from vectors. Does not know how a model encodes them.

Legend: B queries, L levels, T history, F numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from espalier.queries import HistoryKind, VectorKind, pad_histories

from ..data.interactions import Interactions
from ..data.splits import EvaluationPair
from ..deep.instances import QueryRows
from ..deep.scorers.model import NodeScorer
from ..deep.scorers.sequence import SequenceQuery
from ..deep.topology import Topology, on_device
from ..specification.deep import DeepConfig


def query_kind(config: DeepConfig, interactions: Interactions) -> HistoryKind | VectorKind:
    """The kind of queries of a model of this configuration and log."""
    if interactions.vectors_UF is not None:
        return VectorKind(width=interactions.vectors_UF.shape[1])
    return HistoryKind(length=config.history_length)


def rows_of_pairs(config: DeepConfig, pairs: Sequence[EvaluationPair]) -> QueryRows:
    """The queries of held-out pairs, all of one kind."""
    vectors = [pair.vector for pair in pairs if pair.vector is not None]
    if vectors:
        return np.stack(vectors)
    kind = HistoryKind(length=config.history_length)
    return pad_histories(kind, [pair.history for pair in pairs]).array.astype(np.int64)


def model_input(model: NodeScorer, topology: Topology, rows: QueryRows) -> Tensor:
    """history_nodes int64[B, L, T], history_leaves int64[B, T] or vector float32[B, F], on the topology's device.

    Leaves come without positions that are padding in every history.
    """
    if isinstance(model.encoder, SequenceQuery):
        empty = int(np.argmax(np.append((rows[:, :-1] >= 0).any(0), True)))
        return topology.leaf_of_item_I1[on_device(np.ascontiguousarray(rows[:, empty:]), topology.device)]
    query = on_device(rows, topology.device)
    return query if query.is_floating_point() else topology.history_nodes(query)


def states_of(model: NodeScorer, topology: Topology, rows: QueryRows, levels: slice) -> Tensor:
    """[B, n, S]: the query states of some levels, or [B, 1, S] if all levels share one."""
    query = model_input(model, topology, rows)
    if query.dim() == 3:  # levels are independent of each other
        return model.state(query[:, levels])
    state_BLS = model.state(query)
    return state_BLS if state_BLS.shape[1] == 1 else state_BLS[:, levels]
