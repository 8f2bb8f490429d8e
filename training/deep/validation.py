"""Validation users, by whose recall training and export choose. Searched in torch, with the model in training.

Legend: B queries, M results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.metrics import precision_recall_f
from training.data.splits import EvaluationPair, without_seen
from training.deep.beam import search
from training.deep.prepare import Prepared
from training.deep.queries import model_input, rows_of_pairs
from training.deep.scorers.model import NodeScorer
from training.deep.topology import Topology
from training.specification.deep import DeepConfig

Own = Literal["logit", "log_activation"]


def validation_pairs(config: DeepConfig, prepared: Prepared, count: int) -> list[EvaluationPair]:
    """At most `count` validation queries, spread over all of them; seen items are left out where the search leaves them out."""
    pairs = list(prepared.split.validation)
    pairs = without_seen(pairs) if config.search.exclude_seen else pairs
    return pairs[:: max(1, -(-len(pairs) // count))]


def ranked_by(config: DeepConfig) -> tuple[Own, float]:
    """The ranking that the objective trains: own, and γ."""
    return ("log_activation", 1.0) if config.ranks_by_path_product else ("logit", config.objective.gamma)


def validation_recall(config: DeepConfig, topology: Topology, model: NodeScorer, pairs: Sequence[EvaluationPair]) -> float:
    """Mean recall@`search.m` at `search.beam_size`, ranked as it will be served, or, where γ is chosen later, as the objective trains."""
    own, gamma = ranked_by(config)
    if own == "logit" and config.search.gamma != "auto":
        gamma = config.search.gamma
    rows_BM, _ = search_pairs(config, topology, model, pairs, gamma, own, config.search.beam_size, config.search.m)
    return float(precision_recall_f(rows_BM, [pair.relevant for pair in pairs], config.search.m)[1].mean())


def search_pairs(
    config: DeepConfig,
    topology: Topology,
    model: NodeScorer,
    pairs: Sequence[EvaluationPair],
    gamma: float,
    own: Own,
    beam_size: int,
    m: int,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """int64[B, M] item rows and float32[B, M] ranks of held-out queries."""
    rows, ranks = [], []
    for start in range(0, len(pairs), 100):
        part = pairs[start : start + 100]
        query = model_input(model, topology, rows_of_pairs(config, part))
        exclude_BE = _pad_rows([pair.history for pair in part]).to(topology.device) if config.search.exclude_seen else None
        item_rows, rank = search(model, topology, query, beam_size, m, gamma, own, exclude_BE)
        missing = m - item_rows.shape[1]
        rows.append(np.pad(item_rows.cpu().numpy(), ((0, 0), (0, missing)), constant_values=-1))
        ranks.append(np.pad(rank.cpu().numpy(), ((0, 0), (0, missing)), constant_values=-np.inf))
    return np.concatenate(rows), np.concatenate(ranks)


def _pad_rows(lists: Sequence[NDArray[np.int64]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(rows) for rows in lists], batch_first=True, padding_value=-1)
