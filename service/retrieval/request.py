"""Preparation of a request: check it against its model and the limits, then encode it as arrays.

Knows the fields of a request and the model's manifest. Does not know queues or answers.

Legend: B queries, E excluded items.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from espalier.arrays import Int64
from espalier.errors import MISSING, InvalidQuery
from espalier.items import Items
from espalier.live.overlay import PARENT, LiveLeaves
from espalier.manifest import LARGEST
from espalier.masks.eligibility import widened_beam
from espalier.masks.filters import Filter
from espalier.queries import (
    KIND_NAMES,
    FeaturesKind,
    HistoryKind,
    QueryBatch,
    VectorKind,
    encode_features,
    encode_histories,
    encode_texts,
    encode_vectors,
    pad_histories,
)
from espalier.rerank.features import CallerFeatures
from espalier.search import NodeMask, SearchParams, padded

from ..live.views import View
from ..models.loading import LoadedModel
from ..retrieval.schemas import Query, RetrieveRequest
from ..settings import Settings

_NO_ROWS = np.empty(0, np.int64)


class CheckedRequest(NamedTuple):
    """A request that fits its model and the limits.

    m, beam_size   as requested, or the model's defaults
    timeout_ms     as requested, or the service's default; counted from the arrival of the request's head
    depth          candidates to re-rank; 0 for none
    answer_values  most values that the answer may have
    traced         whether the search is traced, because the request asks for an explanation
    """

    request: RetrieveRequest
    model: LoadedModel
    m: int
    beam_size: int
    timeout_ms: float
    depth: int
    answer_values: int
    traced: bool


@dataclass(frozen=True)
class EncodedRequest:
    """The arrays of a request.

    params           beam size (widened if a filter leaves few items) and number of candidates (max(m, depth))
    excluded         item rows that each query excludes; −1 for an unknown id
    unknown          the unknown ids of each query
    caller_features  ranker features in each query; empty if nothing is re-ranked
    """

    queries: QueryBatch
    params: SearchParams
    excluded: list[Int64]
    unknown: list[list[str]]
    caller_features: list[CallerFeatures]


def check(request: RetrieveRequest, model: LoadedModel, settings: Settings) -> CheckedRequest:
    """Check a request before any work is done for it and before it counts as load. Raises InvalidQuery."""
    search, items = model.bundle.manifest.search, model.live.items
    m, beam_size = request.m or search.m, request.beam_size or search.beam_size
    timeout_ms = settings.timeout_ms if request.timeout_ms is None else request.timeout_ms
    _check_limit("timeout_ms", timeout_ms, settings.max_timeout_ms)
    _check_limit("m", m, search.max_m)
    _check_limit("beam_size", beam_size, search.max_beam_size)
    _check_limit("queries", len(request.queries), settings.max_queries, "queries")
    traced = request.explain or bool(request.explain_items)
    if traced:
        _check_limit("queries", len(request.queries), settings.max_explained, "queries with explain")
        _check_limit("explain_items", len(request.explain_items), settings.max_explained, "ids")
    if request.explain_nodes and not traced:
        raise InvalidQuery("explain_nodes", True, "false, because neither `explain` nor `explain_items` is given")
    if request.fields:
        _check_limit("fields", len(request.fields), len(items.fields), "columns")
        for i, field in enumerate(request.fields):
            if field not in items.fields:
                raise InvalidQuery(f"fields[{i}]", field, f"one of {', '.join(items.fields)}")
    depth = 0 if request.rerank is None else _checked_depth(request.rerank.depth, model)
    for i, query in enumerate(request.queries):
        _check_query(i, query, model, settings)
    values = _answer_values(request, len(items), max(m, depth), settings)
    if request.explain_nodes:
        values += _node_values(request, model, beam_size, settings, settings.max_answer_values - values)
    return CheckedRequest(request, model, m, beam_size, timeout_ms, depth, values, traced)


def parsed_filter(filter: Mapping[str, object], exclude_filter: Mapping[str, object], model: LoadedModel, settings: Settings) -> Filter:
    """A checked filter from its JSON. Raises InvalidQuery."""
    for name, conditions in (("filter", filter), ("exclude_filter", exclude_filter)):
        count = sum(len(values) if isinstance(values, list) else 1 for values in conditions.values())
        _check_limit(name, count, settings.max_filter_values, "values")
    return model.filters.parse(filter, exclude_filter)


def input_values(request: RetrieveRequest) -> int:
    """Number of ids, numbers and characters in the queries of a request."""
    return sum(
        [
            len(query.history)
            + len(query.exclude)
            + len(query.vector)
            + len(query.text)
            + len(query.item_features)
            + (0 if query.features is None else len(query.features.indices))
            for query in request.queries
        ]
    )


def encode(checked: CheckedRequest, view: View, widen: float, mask: NodeMask | None) -> EncodedRequest:
    """The arrays of a request.

    view   the request's view of the live catalogue
    widen  largest factor by which the beam may grow if `mask` leaves few items eligible
    Raises InvalidQuery if a vector has the wrong width, or values are too large for the model's weights.
    """
    model, queries, items = checked.model, checked.request.queries, view.items
    beam_size = checked.beam_size
    eligible = view.eligible(mask)
    if eligible is not None:
        beam_size = min(widened_beam(beam_size, eligible, view.count, widen), model.bundle.manifest.search.max_beam_size)
    batch, seen_rows = _encode_queries(queries, model, items)
    history_rows = seen_rows  # without the live items that are unknown in histories; those may still be excluded
    if isinstance(batch.kind, HistoryKind) and not view.overlay.is_empty and not model.live.counts_in_histories:
        history_rows = [np.where(rows < view.overlay.items, rows, -1) for rows in seen_rows]
        batch = pad_histories(batch.kind, history_rows)
    excluded, unknown, caller_features = [], [], []
    for b, query in enumerate(queries):
        exclude_rows = items.rows_of(query.exclude) if query.exclude else _NO_ROWS
        ids = _unknown_ids(query.history, history_rows[b]) + _unknown_ids(query.exclude, exclude_rows)
        if checked.depth:
            rows = items.rows_of(list(query.item_features)) if query.item_features else _NO_ROWS
            caller_features.append(_caller_features(query, rows))
            ids += _unknown_ids(list(query.item_features), rows)
        excluded.append(np.concatenate([seen_rows[b], exclude_rows]) if query.exclude_seen else exclude_rows)
        unknown.append(list(dict.fromkeys(ids)))
    exclude_BE = padded(excluded) if any(map(len, excluded)) else None  # an unknown id's row, −1, equals NO_ITEM, the padding
    params = SearchParams.uniform(len(queries), beam_size, max(checked.m, checked.depth), exclude_BE, trace=checked.traced, mask=mask)
    return EncodedRequest(batch, params, excluded, unknown, caller_features)


def _encode_queries(queries: Sequence[Query], model: LoadedModel, items: Items) -> tuple[QueryBatch, Sequence[Int64]]:
    """(batch, item rows of each query's history). The rows are empty for queries without histories."""
    kind, bundle = model.bundle.manifest.query, model.bundle
    if isinstance(kind, HistoryKind):
        return encode_histories(kind, items, [query.history for query in queries])
    if isinstance(kind, VectorKind):
        batch = encode_vectors(kind, [query.vector for query in queries])
    elif isinstance(kind, FeaturesKind):
        batch = encode_features(kind, [(query.features.indices, query.features.values) for query in queries if query.features is not None])
        for tree, chunks in bundle.trees:
            chunks.check_sizes(batch.features, bundle.manifest.ranking, tree.height)
    else:
        batch = encode_texts(kind, bundle.vectoriser, [query.text for query in queries])
    return batch, [_NO_ROWS] * len(queries)


def _check_query(i: int, query: Query, model: LoadedModel, settings: Settings) -> None:
    kind = model.bundle.manifest.query.kind
    query_kinds = query.model_fields_set.intersection(KIND_NAMES) - ({"features"} if query.features is None else set())
    if query_kinds != {kind}:
        if not query_kinds:
            raise InvalidQuery(f"queries[{i}].{kind}", MISSING, f"a query of the kind {kind}, which this model takes")
        raise InvalidQuery(f"queries[{i}]", " and ".join(sorted(query_kinds)), f"{kind}, the query kind of this model")
    _check_limit(f"queries[{i}].history", len(query.history), settings.max_history, "ids")
    _check_limit(f"queries[{i}].exclude", len(query.exclude), settings.max_history, "ids")
    _check_limit(f"queries[{i}].text", len(query.text), settings.max_text, "characters")
    if query.features is not None:
        _check_limit(f"queries[{i}].features.indices", len(query.features.indices), settings.max_features, "features")
    if query.exclude_seen and kind != "history":
        raise InvalidQuery(f"queries[{i}].exclude_seen", True, f"false, because a query of kind {kind} has no history")
    if query.rank_features or query.item_features:
        _check_caller_features(f"queries[{i}]", query, model)


def _checked_depth(requested: int | None, model: LoadedModel) -> int:
    """Number of candidates to re-rank. Raises InvalidQuery."""
    if model.reranker is None:
        raise InvalidQuery("rerank", True if requested is None else {"depth": requested}, "false, because this model has no ranker")
    if (requested or 0) > model.reranker.info.max_depth:
        raise InvalidQuery("rerank.depth", requested, f"at most {model.reranker.info.max_depth}")
    return requested or model.reranker.info.depth


def _check_caller_features(field: str, query: Query, model: LoadedModel) -> None:
    """Raise InvalidQuery unless the ranker knows the features in a query."""
    reranker, max_items = model.reranker, model.bundle.manifest.search.max_m
    if reranker is None:
        raise InvalidQuery(field, "features for a ranker", "none, because this model has no ranker")
    _check_numbers(f"{field}.rank_features", query.rank_features, [*reranker.features.caller_query])
    if len(query.item_features) > max_items:
        raise InvalidQuery(f"{field}.item_features", len(query.item_features), f"at most {max_items} items")
    for item_id, numbers in query.item_features.items():
        _check_numbers(f"{field}.item_features.{item_id}", numbers, [*reranker.features.caller_item])


def _check_numbers(field: str, numbers: Mapping[str, float], names: Sequence[str]) -> None:
    for name, value in numbers.items():
        if name not in names:
            expected = f"one of {', '.join(names)}" if names else "no feature: the ranker takes none here"
            raise InvalidQuery(f"{field}.{name}", value, expected)
        if abs(value) > LARGEST:
            raise InvalidQuery(f"{field}.{name}", value, "a 32-bit number")


def _answer_values(request: RetrieveRequest, items: int, candidates: int, settings: Settings) -> int:
    """Most values that the answer can have. Raises InvalidQuery if they exceed the limit."""
    m, fields = min(candidates, items), len(request.fields)
    values = len(request.queries) * m * (2 + fields)
    if values > settings.max_answer_values:
        raise InvalidQuery(
            "m",
            candidates,
            f"fewer items, queries or fields: {len(request.queries)} queries × {m} items × {2 + fields} values (id, score and fields) "
            f"are {values} values, and an answer holds at most {settings.max_answer_values}",
        )
    return values


def _node_values(request: RetrieveRequest, model: LoadedModel, beam_size: int, settings: Settings, room: int) -> int:
    """Most values of explained nodes, with the widest beam that a filter may cause. Each shard keeps a whole beam.

    room  values that the answer has left; raises InvalidQuery if the nodes need more
    """
    beam_size = min(math.ceil(beam_size * settings.widen), model.bundle.manifest.search.max_beam_size)
    parents = beam_size * (model.searched_shards or 1)
    levels = [(single.tree, level) for single in model.bundle.alone for level in range(1, single.tree.height + 1)]
    nodes = sum(min(parents * tree.max_children[level - 1], tree.level_size(level)) for tree, level in levels)
    overlay = model.live.view(request.live).overlay
    nodes += 0 if overlay.is_empty else sum(_most_live(leaves, parents) for leaves in overlay.trees)
    values = 2 * len(request.queries) * nodes
    if values > room:
        raise InvalidQuery(
            "explain_nodes",
            True,
            f"false, a smaller beam or fewer queries: {len(request.queries)} queries × {nodes} nodes × 2 values are {values}, and the "
            f"answer has room for {room}",
        )
    return values


def _most_live(leaves: LiveLeaves, parents: int) -> int:
    """The largest number of live leaves under so many nodes."""
    _, counts = np.unique(leaves.column(PARENT, leaves.open), return_counts=True)
    return int(np.sort(counts)[-parents:].sum())


def _check_limit(field: str, value: float, limit: float, noun: str = "") -> None:
    if value > limit:
        raise InvalidQuery(field, value, f"at most {limit:g} {noun}".rstrip())


def _caller_features(query: Query, rows: Int64) -> CallerFeatures:
    """The ranker features in a query. rows: item rows of its `item_features`; −1 for an unknown id."""
    features_of_rows = zip(rows.tolist(), query.item_features.values(), strict=True)
    return CallerFeatures(query.rank_features, {row: numbers for row, numbers in features_of_rows if row >= 0})


def _unknown_ids(ids: list[str], rows: Int64) -> list[str]:
    if not len(rows) or rows.min() >= 0:
        return []
    return [item_id for item_id, row in zip(ids, rows.tolist(), strict=False) if row < 0]
