"""Queries as a model in training takes them: histories as their items' ancestors on every level, vectors as they are.

Knows what tells histories from vectors. Does not know what a model makes of them.

Legend: B queries, L levels, T history, F numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from espalier.queries import HistoryKind, VectorKind, pad_histories
from training.data.interactions import Interactions
from training.data.splits import EvaluationPair
from training.deep.instances import QueryRows
from training.deep.topology import Topology
from training.specification.deep import DeepConfig


def query_kind(config: DeepConfig, interactions: Interactions) -> HistoryKind | VectorKind:
    """What a model of this configuration and log is asked with."""
    if interactions.vectors_UF is not None:
        return VectorKind(width=interactions.vectors_UF.shape[1])
    return HistoryKind(length=sum(config.instances.windows))


def rows_of_pairs(config: DeepConfig, pairs: Sequence[EvaluationPair]) -> QueryRows:
    """The queries of held-out pairs, all of one kind."""
    vectors = [pair.vector for pair in pairs if pair.vector is not None]
    if vectors:
        return np.stack(vectors)
    kind = HistoryKind(length=sum(config.instances.windows))
    return pad_histories(kind, [pair.history for pair in pairs]).array.astype(np.int64)


def model_input(topology: Topology, rows: QueryRows) -> Tensor:
    """history_nodes int64[B, L, T] or vector float32[B, F], on the topology's device."""
    query = torch.from_numpy(rows).to(topology.device)
    return query if query.is_floating_point() else topology.history_nodes(query)
