"""A router's query to a shard: checks it against the shard and translates it into the shard's own item rows and node numbers.

Knows messages and bundles. Does not know queues.

Legend: B queries, E excluded items, X nodes with memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from espalier.arrays import Float32, Int64
from espalier.engines.encode import check_queries
from espalier.engines.stages import GivenQueries
from espalier.errors import MISSING, InvalidMessage
from espalier.manifest import LARGEST, MAX_STACKED, GraphScorer
from espalier.memory_lists import MemoryLists
from espalier.queries import PADDING, FeaturesKind, HistoryKind, QueryBatch, TextKind
from espalier.search import NO_ITEM, NodeMask, SearchParams
from espalier.shards.messages import ShardQuery
from espalier.tree import Tree

from ..errors import UnknownMasks
from ..models.loading import LoadedModel
from ..models.shard_version import ShardVersion
from ..settings import Settings


def check(query: ShardQuery, model: LoadedModel, shard: ShardVersion, settings: Settings) -> int:
    """The most values that the answer may hold. Raises InvalidMessage if the query exceeds a limit."""
    search, batch = model.bundle.manifest.search, len(query.queries)
    for name, array, limit in (
        ("beam_size", query.beam_size_B, search.max_beam_size),
        ("m", query.m_B, max(search.max_m, MAX_STACKED)),  # a router's stacker reorders the best MAX_STACKED
    ):
        if array.min() < 1 or array.max() > limit:
            raise InvalidMessage(name, int(array.max() if array.max() > limit else array.min()), f"from 1 to {limit}")
    if batch > settings.max_queries:
        raise InvalidMessage("queries", f"{batch} queries", f"at most {settings.max_queries}")
    if query.trace and batch > settings.max_explained:
        raise InvalidMessage("trace", f"{batch} queries", f"at most {settings.max_explained} queries with a trace")
    max_masks = min(batch, max(1, settings.mask_cache_bytes // shard.local.mask_bytes))
    if len(query.sent_masks) > max_masks:
        raise InvalidMessage("sent", f"{len(query.sent_masks)} masks", f"at most {max_masks}")
    values = batch * max(int(query.m_B.max()), int(query.beam_size_B.max()) if query.frontier else 0)
    if values > settings.max_search_values:
        raise InvalidMessage("m", f"{values} results", f"at most {settings.max_search_values} in one answer")
    return values


def translate(query: ShardQuery, model: LoadedModel, shard: ShardVersion) -> tuple[GivenQueries, SearchParams]:
    """The queries and parameters for the engine, of a query that `check` passed. Raises InvalidInput, UnknownMasks if masks are missing."""
    bundle, items = model.bundle, shard.info.items
    exclude_BE = query.exclude_BE
    if exclude_BE is not None:
        if exclude_BE.size and (exclude_BE.min() < NO_ITEM or exclude_BE.max() >= items):
            bad = int(exclude_BE.max() if exclude_BE.max() >= items else exclude_BE.min())
            raise InvalidMessage("exclude", bad, f"item rows from 0 to {items - 1}, or {NO_ITEM} as padding")
        exclude_BE = shard.local.rows(exclude_BE)
    params = SearchParams(query.beam_size_B, query.m_B, exclude_BE, query.trace, _masks(query, shard))
    if isinstance(bundle.manifest.scorer, GraphScorer):
        return _queries_with_states(query, model, shard), params
    queries = _check_kind(query.queries, model)
    for name, arrays in (("states", query.states_BLS), ("memory", query.memory)):
        if arrays is not None:
            raise InvalidMessage(name, "arrays", "none, because the model has linear scorers")
    for tree, chunks in bundle.trees:
        chunks.check_sizes(queries.features, bundle.manifest.ranking, tree.height)
    return GivenQueries(queries.kind, queries.rows, frontier=query.frontier), params


def _queries_with_states(query: ShardQuery, model: LoadedModel, shard: ShardVersion) -> GivenQueries:
    """Queries for graph scorers, with their query states and the memory that the router sent, if any."""
    bundle, queries = model.bundle, _check_kind(query.queries, model)
    if query.states_BLS is None:
        raise InvalidMessage("states", MISSING, "query states, because a shard cannot encode what it does not hold")
    memory = None
    if query.memory is not None:
        if bundle.memory is None:
            raise InvalidMessage("memory", "arrays", "none, because the model has no memory")
        limit = LARGEST / 2 / bundle.memory.key_weight
        if (largest := float(query.memory.values.max(initial=0))) > limit:  # as a Python float: the limit may exceed float32
            raise InvalidMessage("memory.values", largest, f"at most {limit:g}")
        memory = with_levels_above(bundle.tree, shard.local.memory(query.memory))
    rows = queries.rows
    if isinstance(queries.kind, HistoryKind) and (bundle.memory is None or memory is not None):  # the engine does not read them
        rows = np.full(queries.array.shape, PADDING, np.int64)
    given_queries = GivenQueries(queries.kind, rows, query.states_BLS, memory, query.frontier)
    check_queries(bundle, given_queries)
    return given_queries


def _check_kind(queries: QueryBatch, model: LoadedModel) -> QueryBatch:
    """The queries as queries of the model's kind. Raises InvalidMessage if the message has another kind."""
    kind = model.bundle.manifest.query
    wire_kind = FeaturesKind(width=kind.width) if isinstance(kind, FeaturesKind | TextKind) else kind
    if queries.kind != wire_kind:
        raise InvalidMessage("kind", str(queries.kind), str(wire_kind))
    return QueryBatch(kind, queries.rows)


def _masks(query: ShardQuery, shard: ShardVersion) -> tuple[NodeMask | None, ...] | None:
    """Each query's mask. Queries with the same digest share it."""
    if query.masks is None:
        return None
    masks = {digest: shard.masks.get(digest) for digest in query.masks if digest is not None}
    for digest, bits in query.sent_masks.items():
        if masks.get(digest) is None:
            masks[digest] = shard.masks.put(digest, shard.local.mask(bits))
    if None in masks.values():  # ask for all masks that were not sent: another worker, without these, may get the next request
        raise UnknownMasks([digest for digest in masks if digest not in query.sent_masks])
    return tuple(None if digest is None else masks[digest] for digest in query.masks)


def is_small(query: ShardQuery, max_numbers: int) -> bool:
    """Whether a query is checked quickly: few numbers, and no mask to unpack."""
    arrays: list[NDArray[np.generic] | None] = [query.states_BLS, query.exclude_BE]
    numbers = sum(array.size for array in arrays if array is not None) + (0 if query.memory is None else len(query.memory.nodes))
    return not query.sent_masks and numbers <= max_numbers


def with_levels_above(tree: Tree, lists: MemoryLists) -> MemoryLists:
    """Complete memory lists of leaves and of nodes on the level above: every node gets the largest mem below it.

    Entries for nodes of other levels, and for a mem of 0, are dropped.
    """
    batch, nodes = len(lists.offset_B) - 1, tree.node_count
    key_X = np.repeat(np.arange(batch), np.diff(lists.offset_B)) * nodes + lists.nodes  # (query, node) as one number
    is_positive_X = lists.values > 0
    levels: list[tuple[Int64, Float32]] = []
    keys, values = np.empty(0, np.int64), np.empty(0, np.float32)  # of the level below
    for h in range(tree.height, 0, -1):
        in_level_X = is_positive_X & (lists.nodes >= tree.level(h).start) & (lists.nodes < tree.level(h).stop) & (h >= tree.height - 1)
        query, node = np.divmod(keys, nodes)
        all_keys, all_values = np.append(key_X[in_level_X], query * nodes + tree.parent[node]), np.append(lists.values[in_level_X], values)
        keys, key_index = np.unique(all_keys, return_inverse=True)
        values = np.zeros(len(keys), np.float32)
        np.maximum.at(values, key_index, all_values)
        levels.append((keys, values))
    key = np.concatenate([keys for keys, _ in levels])
    order = np.argsort(key)
    query, node = np.divmod(key[order], nodes)
    offset_B = np.append(0, np.cumsum(np.bincount(query, minlength=batch))).astype(np.int64)
    return MemoryLists(offset_B, node, np.concatenate([values for _, values in levels])[order])
