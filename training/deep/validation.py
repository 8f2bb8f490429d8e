"""Searches of validation queries with the model in training; training and export choose by their recall. The compiled serving engine
searches, or torch (`beam.py`) if the engine does not know the scorer or where its rows lie.

Legend: B queries, T history, L levels, S state, E excluded items, X excluded nodes, M results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from espalier.arrays import Float32, Int64
from espalier.engines.compiled.engine import DenseSearch
from espalier.engines.stages import TreeQuery
from espalier.masks.eligibility import EligibleNodes, eligible_nodes, unrestricted_mask
from espalier.memory_lists import MemoryLists
from espalier.metrics import precision_recall_f
from espalier.queries import HistoryKind, QueryBatch, VectorKind
from espalier.search import SearchParams, padded
from espalier.tree import Tree

from ..data.splits import EvaluationPair, without_seen
from ..deep.beam import MemoryScores, OwnScore, search_states, sorted_excluded_nodes
from ..deep.instances import QueryRows
from ..deep.parallel import gathered_values, process, processes
from ..deep.prepare import Prepared
from ..deep.queries import model_input, rows_of_pairs
from ..deep.scorers.model import NodeScorer
from ..deep.topology import Topology
from ..specification.deep import DeepConfig

BLOCK = 100
"""Queries that are encoded and searched at a time."""


def validation_pairs(config: DeepConfig, prepared: Prepared, count: int) -> list[EvaluationPair]:
    """At most `count` validation queries, spread over all of them; seen items are left out if the search leaves them out.

    They are sorted by length, so that blocks hold little padding.
    """
    pairs = list(prepared.split.validation)
    pairs = without_seen(pairs) if config.search.exclude_seen else pairs
    return sorted(pairs[:: max(1, -(-len(pairs) // count))], key=lambda pair: len(pair.history))


class TrainedRanking(NamedTuple):
    """How the objective ranks nodes: rank = own score + γ · the parent's rank."""

    own_score: OwnScore
    gamma: float


def trained_ranking(config: DeepConfig) -> TrainedRanking:
    """The ranking that the objective trains."""
    return TrainedRanking("log_activation", 1.0) if config.ranks_by_path_product else TrainedRanking("logit", config.objective.gamma)


def validation_recall(config: DeepConfig, topology: Topology, model: NodeScorer, pairs: Sequence[EvaluationPair]) -> float:
    """Mean recall@`search.m` at `search.beam_size`, ranked as in serving, or if γ is chosen later, as in the objective.

    Every process searches its share of the queries.
    """
    own_score, gamma = trained_ranking(config)
    if own_score == "logit" and config.search.gamma != "auto":
        gamma = config.search.gamma
    process_pairs = list(pairs[process() :: processes()])
    searches = -(-len(pairs) // processes())  # every process makes as many searches: with shared rows they are collective calls
    padded_pairs = process_pairs + list(pairs[:1]) * (searches - len(process_pairs))
    rows_BM, _ = search_pairs(config, topology, model, padded_pairs, gamma, own_score, config.search.beam_size, config.search.m)
    recall_B = precision_recall_f(rows_BM[: len(process_pairs)], [pair.relevant for pair in process_pairs], config.search.m)[1]
    return float(gathered_values(recall_B, len(pairs), topology.device).mean())


@dataclass(frozen=True)
class EncodedQueries:
    """Some held-out queries, ready to be searched with any ranking.

    rows          int64[B, T] histories of item rows, −1 in front, or float32[B, F] vectors
    state_BLS     query states
    eligible      the nodes that their search may visit
    """

    rows: QueryRows
    state_BLS: Tensor
    eligible: EligibleNodes


@torch.no_grad()
def encode_blocks(config: DeepConfig, topology: Topology, model: NodeScorer, pairs: Sequence[EvaluationPair]) -> Iterator[EncodedQueries]:
    """The queries in blocks of at most `BLOCK`."""
    tree = topology.tree
    unrestricted = unrestricted_mask(tree)
    for start in range(0, len(pairs), BLOCK):
        block_pairs = pairs[start : start + BLOCK]
        rows = rows_of_pairs(config, block_pairs)
        exclude_BE = padded([pair.history for pair in block_pairs]) if config.search.exclude_seen else None
        eligible = eligible_nodes(tree, SearchParams.uniform(len(block_pairs), 1, 1, exclude_BE), unrestricted)
        yield EncodedQueries(rows, model.state(model_input(model, topology, rows)), eligible)


def search_encoded(
    model: NodeScorer,
    topology: Topology,
    blocks: Iterable[tuple[EncodedQueries, MemoryLists | None]],
    gamma: float,
    own_score: OwnScore,
    beam_size: int,
    m: int,
    key_weight: float = 0.0,
) -> tuple[Int64, Float32]:
    """int64[B, M] item rows and float32[B, M] keys; each block of queries comes with the memory's values of its nodes.

    key_weight  λ of the memory
    """
    rows, keys = [], []
    engine = compiled_search(model, topology.tree, gamma, own_score, key_weight)
    for block, lists in blocks:
        if engine is None:
            excluded_BX = None if block.eligible.excluded is None else sorted_excluded_nodes(topology, block.eligible.excluded)
            memory_scores = None if lists is None else MemoryScores.of(lists, key_weight, topology)
            row_BM, key_BM = search_states(model, topology, block.state_BLS, beam_size, m, gamma, own_score, excluded_BX, memory_scores)
            rows.append(row_BM.cpu().numpy())
            keys.append(key_BM.cpu().numpy())
        else:
            result = engine.search(_tree_query(block, lists, beam_size, m))
            rows.append(result.rows_BTM[:, 0])
            keys.append(result.keys_BTM[:, 0])
    if engine is not None:
        engine.close()
    return np.concatenate(rows), np.concatenate(keys)


def _tree_query(block: EncodedQueries, lists: MemoryLists | None, beam_size: int, m: int) -> TreeQuery:
    states_BLS = block.state_BLS.float().contiguous().numpy()
    beam_size_B, m_B = (np.full(len(states_BLS), value, np.int64) for value in (beam_size, m))
    width = block.rows.shape[1]
    kind = HistoryKind(length=width) if block.rows.dtype == np.int64 else VectorKind(width=width)
    return TreeQuery(QueryBatch(kind, block.rows), states_BLS, beam_size_B, m_B, (block.eligible,), lists)


def search_pairs(
    config: DeepConfig,
    topology: Topology,
    model: NodeScorer,
    pairs: Sequence[EvaluationPair],
    gamma: float,
    own_score: OwnScore,
    beam_size: int,
    m: int,
) -> tuple[Int64, Float32]:
    """int64[B, M] item rows and float32[B, M] ranks of held-out queries, without a memory."""
    blocks = ((block, None) for block in encode_blocks(config, topology, model, pairs))
    return search_encoded(model, topology, blocks, gamma, own_score, beam_size, m)


def compiled_search(model: NodeScorer, tree: Tree, gamma: float, own_score: OwnScore, key_weight: float) -> DenseSearch | None:
    """The compiled search of a model, on its rows without a copy; close it. None if it does not know the scorer or where the rows lie.

    key_weight  λ of a memory; 0 without one
    """
    scorer = model.head.scorer_weights()
    if scorer is None or model.row_table is not None or model.node_rows.device.type != "cpu":
        return None
    rows_ND = model.node_rows.detach().numpy()
    return DenseSearch(tree, rows_ND, scorer, gamma, own_score == "log_activation", key_weight, torch.get_num_threads())
