"""Validation users, by whose recall training and export choose, searched with the model in training: by the engine that serves, in compiled
loops, or in torch (`beam.py`) where its scorer or its rows are none that the loops know.

Legend: B queries, T history, L levels, S state, E excluded items, X excluded nodes, M results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from espalier.engines.compiled.engine import DenseSearch
from espalier.engines.scorer_weights import Layer, ScorerWeights
from espalier.engines.stages import TreeQuery
from espalier.masks.eligibility import EligibleNodes, eligible_nodes, unrestricted_mask
from espalier.memory_lists import MemoryLists
from espalier.metrics import precision_recall_f
from espalier.queries import HistoryKind, QueryBatch, VectorKind
from espalier.search import SearchParams
from espalier.tree import Tree

from ..data.splits import EvaluationPair, without_seen
from ..deep.beam import Added, Own, search_states, sorted_excluded_nodes
from ..deep.instances import QueryRows
from ..deep.parallel import every_value, process, processes
from ..deep.prepare import Prepared
from ..deep.queries import model_input, rows_of_pairs
from ..deep.scorers.heads import MlpHead, ProductHead, SharedPReLU
from ..deep.scorers.model import NodeScorer
from ..deep.topology import Topology
from ..evaluate import padded
from ..specification.deep import DeepConfig

BLOCK = 100
"""Queries that are encoded and searched at a time."""


def validation_pairs(config: DeepConfig, prepared: Prepared, count: int) -> list[EvaluationPair]:
    """At most `count` validation queries, spread over all of them; seen items are left out where the search leaves them out.

    Those of about one length follow each other, so that blocks of them hold little padding.
    """
    pairs = list(prepared.split.validation)
    pairs = without_seen(pairs) if config.search.exclude_seen else pairs
    return sorted(pairs[:: max(1, -(-len(pairs) // count))], key=lambda pair: len(pair.history))


def ranked_by(config: DeepConfig) -> tuple[Own, float]:
    """The ranking that the objective trains: own, and γ."""
    return ("log_activation", 1.0) if config.ranks_by_path_product else ("logit", config.objective.gamma)


def validation_recall(config: DeepConfig, topology: Topology, model: NodeScorer, pairs: Sequence[EvaluationPair]) -> float:
    """Mean recall@`search.m` at `search.beam_size`, ranked as it will be served, or, where γ is chosen later, as the objective trains.

    Every process searches for its part of the queries.
    """
    own, gamma = ranked_by(config)
    if own == "logit" and config.search.gamma != "auto":
        gamma = config.search.gamma
    mine = list(pairs[process() :: processes()])
    longest = -(-len(pairs) // processes())  # every process makes as many searches: those of shared rows are collective
    searched = mine + list(pairs[:1]) * (longest - len(mine))
    rows_BM, _ = search_pairs(config, topology, model, searched, gamma, own, config.search.beam_size, config.search.m)
    recall_B = precision_recall_f(rows_BM[: len(mine)], [pair.relevant for pair in mine], config.search.m)[1]
    return float(every_value(recall_B, len(pairs), topology.device).mean())


@dataclass(frozen=True)
class EncodedQueries:
    """Some held-out queries, ready to be searched with any ranking.

    rows          int64[B, T] histories of item rows, −1 in front, or float32[B, F] vectors
    state_BLS     query states
    eligible      the nodes that they may visit
    """

    rows: QueryRows
    state_BLS: Tensor
    eligible: EligibleNodes


@torch.no_grad()
def encoded(config: DeepConfig, topology: Topology, model: NodeScorer, pairs: Sequence[EvaluationPair]) -> Iterator[EncodedQueries]:
    """The queries in blocks of at most `BLOCK`."""
    tree = topology.tree
    unrestricted = unrestricted_mask(tree)
    for start in range(0, len(pairs), BLOCK):
        part = pairs[start : start + BLOCK]
        rows = rows_of_pairs(config, part)
        exclude_BE = padded([pair.history for pair in part]) if config.search.exclude_seen else None
        eligible = eligible_nodes(tree, SearchParams.uniform(len(part), 1, 1, exclude_BE), unrestricted)
        yield EncodedQueries(rows, model.state(model_input(model, topology, rows)), eligible)


def search_encoded(
    model: NodeScorer,
    topology: Topology,
    blocks: Iterable[tuple[EncodedQueries, MemoryLists | None]],
    gamma: float,
    own: Own,
    beam_size: int,
    m: int,
    key_weight: float = 0.0,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """int64[B, M] item rows and float32[B, M] keys; each block of queries with what a memory remembers of its nodes.

    key_weight  λ of the memory
    """
    rows, keys = [], []
    engine = compiled_search(model, topology.tree, gamma, own, key_weight)
    for block, lists in blocks:
        if engine is None:
            excluded_BX = None if block.eligible.excluded is None else sorted_excluded_nodes(topology, block.eligible.excluded)
            added = None if lists is None else Added.of(lists, key_weight, topology)
            row_BM, key_BM = search_states(model, topology, block.state_BLS, beam_size, m, gamma, own, excluded_BX, added)
            rows.append(row_BM.cpu().numpy())
            keys.append(key_BM.cpu().numpy())
        else:
            found = engine.search(_tree_query(block, lists, beam_size, m))
            rows.append(found.rows_BTM[:, 0])
            keys.append(found.keys_BTM[:, 0])
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
    own: Own,
    beam_size: int,
    m: int,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """int64[B, M] item rows and float32[B, M] ranks of held-out queries, without a memory."""
    blocks = ((block, None) for block in encoded(config, topology, model, pairs))
    return search_encoded(model, topology, blocks, gamma, own, beam_size, m)


def compiled_search(model: NodeScorer, tree: Tree, gamma: float, own: Own, key_weight: float) -> DenseSearch | None:
    """The search of a model's rows as they are, not copied; close it. None where its scorer or its rows are none that the loops know.

    key_weight  λ of a memory; 0 without one
    """
    scorer = _scorer_of(model)
    if scorer is None or model.row_table is not None or model.node_rows.device.type != "cpu":
        return None
    rows_ND = model.node_rows.detach().numpy()
    return DenseSearch(tree, rows_ND, scorer, gamma, own == "log_activation", key_weight, torch.get_num_threads())


def _scorer_of(model: NodeScorer) -> ScorerWeights | None:
    head = model.head
    if isinstance(head, ProductHead):
        return ScorerWeights()
    if not isinstance(head, MlpHead):
        return None
    first = _array(head.node_part.weight.T)
    linear = [layer for layer in head.layers if isinstance(layer, nn.Linear)]
    weights = [first, *(_array(layer.weight.T) for layer in linear)]
    biases = [np.zeros(first.shape[1], np.float32), *(_array(layer.bias) for layer in linear)]
    slope_of_layer = [slope.weight.item() for slope in head.slopes if isinstance(slope, SharedPReLU)]
    slopes = [np.full(len(bias), slope, np.float32) for bias, slope in zip(biases, slope_of_layer, strict=True)]
    layers = tuple(Layer(*arrays) for arrays in zip(weights, biases, slopes, strict=True))
    return ScorerWeights(layers, _array(head.out.weight[0]), head.out.bias.item())


def _array(weights: Tensor) -> NDArray[np.float32]:
    return weights.detach().float().numpy()
