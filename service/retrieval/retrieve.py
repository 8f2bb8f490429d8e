"""One request: ids and vectors become arrays, the engine searches, item rows become JSON.

Knows the three steps and how long each took. Does not know HTTP or how requests share an engine call.

Legend: B queries, E excluded items, M results.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from espalier.errors import InvalidQuery
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
)
from espalier.rerank.features import Sent
from espalier.search import NO_ITEM, NodeMask, SearchParams, SearchResult
from service.batching.batcher import Answer
from service.errors import DeadlinePassed
from service.models.registry import LoadedModel
from service.retrieval.explain import Wanted, explain
from service.retrieval.schemas import Query, RetrieveRequest
from service.retrieval.second_stage import Ordered, check_rerank, depth_of, ordered, sent_with
from service.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")
INLINE_VALUES = 1024
"""Ids, numbers and characters up to this many are handled on the event loop; more would keep other requests waiting, and go to a thread."""
BLOCK_ROWS = 4096
"""Items that are turned into JSON at a time; in between the deadline is looked at."""


@dataclass(frozen=True)
class Retrieved:
    """The body of the answer, the milliseconds of its stages, and m and the beam that were searched with."""

    body: bytes
    stages_ms: dict[str, float]
    m: int
    beam_size: int


@dataclass(frozen=True)
class Encoded:
    """A request as the engine takes it.

    m          items that are to come back; the search gives more of them where a ranker follows
    beam_size  what it asks for, widened where a filter leaves few items
    excluded   item rows that each query excludes, −1 for unknown ids; `unknown` are the ids that the catalogue does not have
    sent       features that come with each query; empty where no ranker follows
    """

    queries: QueryBatch
    params: SearchParams
    m: int
    beam_size: int
    excluded: list[NDArray[np.int64]]
    unknown: list[list[str]]
    sent: list[Sent]


async def retrieve(
    request: RetrieveRequest, model: LoadedModel, settings: Settings, began: float, deadline: float, patient: bool = False
) -> Retrieved:
    """Answer one request.

    began, deadline  points of time.perf_counter(); what the engine has not begun by the deadline never reaches it, and an answer that is
                     not whole by then is none
    patient          wait for room in the queue instead of being refused
    The request has been checked (`check`). Raises InvalidQuery, NotReady, QueueFull, DeadlinePassed, EngineFailed.
    """
    started = time.perf_counter()
    conditions = _conditions(request, model, settings)
    mask = model.filters.standing
    if conditions is not None:
        mask = model.filters.cached(conditions) or await _in_time(deadline, model.filters.mask, conditions)
    if sum(map(_size, request.queries)) <= INLINE_VALUES:
        encoded = encode(request, model, settings, mask)
    else:
        encoded = await _in_time(deadline, encode, request, model, settings, mask)
    if encoded.params.trace:
        await _in_time(deadline, model.engine.prepare, encoded.params)
    submitted = time.perf_counter()
    answer = await model.batcher.search(encoded.queries, encoded.params, deadline, patient)
    answered = time.perf_counter()
    _refuse_infinite(encoded.queries, answer.result)
    depth, small = depth_of(request, model), answer.result.item_rows_BM.size <= INLINE_VALUES
    stage = (request, model, encoded.queries, encoded.sent, answer.result, encoded.m, depth)
    final = ordered(*stage) if small or not depth else await _in_time(deadline, ordered, *stage)
    reranked = time.perf_counter()
    if small and not encoded.params.trace:
        results = results_json(request, model, conditions, encoded, answer, final, deadline)
    else:
        results = await _in_time(deadline, results_json, request, model, conditions, encoded, answer, final, deadline)
    done = time.perf_counter()
    if done > deadline:
        raise DeadlinePassed(LATE)

    queue_s = max(answered - submitted - answer.engine_s, 0.0)
    stages_s = (queue_s, submitted - started, answer.engine_s, done - reranked, *([reranked - answered] if depth else []))
    batch = len(encoded.queries)
    model.metrics.retrieved(
        stages_s,
        answer.engine_s / answer.batch,
        answer.beam_size,
        queries=batch,
        incomplete=batch - int(np.count_nonzero(final.complete_B)),
        degraded=batch if answer.degraded else 0,
    )
    queue_ms, encode_ms, search_ms, serialise_ms, *rerank_ms = (_ms(seconds) for seconds in stages_s)
    stages_ms = {"queue": queue_ms, "encode": encode_ms, "search": search_ms} | ({"rerank": rerank_ms[0]} if depth else {})
    stages_ms |= {"serialise": serialise_ms, "total": _ms(done - began)}
    timing: dict[str, float] = {"rerank_ms": 0.0} | {f"{stage}_ms": value for stage, value in stages_ms.items()}
    timing["ms_per_query"], timing["batch"] = _ms(answer.engine_s / answer.batch), answer.batch
    document = {
        "model": model.name,
        "version": model.version,
        "engine": model.engine.name,
        "results": orjson.Fragment(results),
        "timing": timing,
    }
    return Retrieved(orjson.dumps(document), stages_ms, encoded.m, answer.beam_size)


def check(request: RetrieveRequest, model: LoadedModel, settings: Settings) -> None:
    """Raise InvalidQuery unless a request fits its model and its limits: before it costs anything, or counts as load."""
    search, kind, fields = model.bundle.manifest.search, model.bundle.manifest.query, model.bundle.items.fields
    if request.timeout_ms is not None:
        _at_most("timeout_ms", request.timeout_ms, settings.max_timeout_ms)
    _at_most("m", request.m or search.m, search.max_m)
    _at_most("beam_size", request.beam_size or search.beam_size, search.max_beam_size)
    _at_most("queries", len(request.queries), settings.max_queries, "queries")
    if request.explain or request.explain_items:
        _at_most("queries", len(request.queries), settings.max_explained, "queries with explain")
        _at_most("explain_items", len(request.explain_items), settings.max_explained, "ids")
    _at_most("fields", len(request.fields), len(fields), "columns")
    for i, field in enumerate(request.fields):
        if field not in fields:
            raise InvalidQuery(f"fields[{i}]", field, f"one of {', '.join(fields)}")
    for i, query in enumerate(request.queries):
        _check_query(i, query, kind.kind, settings)
    check_rerank(request, model)


def values_of(request: RetrieveRequest, model: LoadedModel, settings: Settings) -> int:
    """The most values that the answer can hold. Raises InvalidQuery where that is more than an answer may."""
    wanted = max(request.m or model.bundle.manifest.search.m, depth_of(request, model))
    m, fields = min(wanted, len(model.bundle.items)), len(request.fields)
    values = len(request.queries) * m * (2 + fields)
    if values > settings.max_answer_values:
        raise InvalidQuery(
            "m",
            wanted,
            f"fewer items, queries or fields: {len(request.queries)} queries × {m} items × {2 + fields} values (id, score and fields) "
            f"are {values} values, and an answer holds at most {settings.max_answer_values}",
        )
    return values


def encode(request: RetrieveRequest, model: LoadedModel, settings: Settings, mask: NodeMask | None) -> Encoded:
    """Make arrays of a request. Raises InvalidQuery where a vector is none, or values are too large for the model's weights."""
    items, manifest, queries = model.bundle.items, model.bundle.manifest, request.queries
    search, kind = manifest.search, manifest.query
    m, beam_size, depth = request.m or search.m, request.beam_size or search.beam_size, depth_of(request, model)
    traced = request.explain or bool(request.explain_items)
    if mask is not None:
        beam_size = min(widened_beam(beam_size, mask.items, len(items), settings.widen), search.max_beam_size)

    seen = [_NO_ROWS] * len(queries)
    if isinstance(kind, HistoryKind):
        batch, seen = encode_histories(kind, items, [query.history for query in queries])
    elif isinstance(kind, VectorKind):
        batch = encode_vectors(kind, [query.vector for query in queries])
    elif isinstance(kind, FeaturesKind):
        batch = encode_features(kind, [(query.features.indices, query.features.values) for query in queries if query.features is not None])
        model.bundle.chunks.check_sizes(batch.features, manifest.ranking, model.bundle.tree.height)
    else:
        batch = encode_texts(kind, model.bundle.vectoriser, [query.text for query in queries])
    excluded = [items.rows_of(query.exclude) if query.exclude else _NO_ROWS for query in queries]
    unknown = [_unknown(query.history, seen[b]) + _unknown(query.exclude, excluded[b]) for b, query in enumerate(queries)]
    sent = []
    for b, query in enumerate(queries if depth else ()):
        rows = items.rows_of(list(query.item_features)) if query.item_features else _NO_ROWS
        sent.append(sent_with(query, rows))
        unknown[b] += _unknown(list(query.item_features), rows)
    excluded = [np.concatenate([seen[b], excluded[b]]) if query.exclude_seen else excluded[b] for b, query in enumerate(queries)]
    params = SearchParams.uniform(len(queries), beam_size, max(m, depth), _exclusions(excluded), trace=traced, mask=mask)
    return Encoded(batch, params, m, beam_size, excluded, [list(dict.fromkeys(ids)) for ids in unknown], sent)


def _refuse_infinite(queries: QueryBatch, result: SearchResult) -> None:
    """Raise InvalidQuery where what the model makes of a vector is not finite: only the search finds that out."""
    if result.finite_B is not None and not result.finite_B.all():
        b = int(np.flatnonzero(~result.finite_B)[0])
        largest = float(queries.array[b][np.argmax(np.abs(queries.array[b]))])
        raise InvalidQuery(f"queries[{b}].vector", largest, "numbers of which the model makes finite scores")


def results_json(
    request: RetrieveRequest,
    model: LoadedModel,
    conditions: Filter | None,
    encoded: Encoded,
    answer: Answer,
    final: Ordered,
    deadline: float = float("inf"),
) -> bytes:
    """The JSON list of results. Raises DeadlinePassed, which is looked at between blocks of BLOCK_ROWS items."""
    items, count_B = model.bundle.items, final.count_B
    wanted = Wanted.of(request.explain_items, model, conditions) if encoded.params.trace else None
    results: list[bytes] = []
    for begin_b, end_b in _blocks(count_B):
        if time.perf_counter() > deadline:
            raise DeadlinePassed(LATE)
        rows = final.rows_BM[begin_b, : count_B[begin_b]]
        if end_b > begin_b + 1:
            rows = np.concatenate([final.rows_BM[b, : count_B[b]] for b in range(begin_b, end_b)])
        ids = items.ids_of(rows)
        columns = [items.values(field, rows) for field in request.fields]
        end = 0
        for b in range(begin_b, end_b):
            begin, end = end, end + int(count_B[b])
            own = _items(ids[begin:end], final.scores_BM[b], [column[begin:end] for column in columns], request.fields)
            if final.reranked is not None:
                own = [{**item, "rerank_score": score} for item, score in zip(own, final.reranked.score_BM[b], strict=False)]
            entry: dict[str, Any] = {
                "items": own,
                "complete": bool(final.complete_B[b]),
                "beam_size": answer.beam_size,
                "degraded": answer.degraded,
                "unknown": encoded.unknown[b],
            }
            if wanted is not None:
                entry["explain"] = explain(model, encoded.queries, answer.result, b, wanted, encoded.excluded[b], final, encoded.sent)
            # float32 scores are written as short as they are
            results.append(orjson.dumps(entry, default=str, option=orjson.OPT_SERIALIZE_NUMPY))
    return b"[" + b",".join(results) + b"]"


def _blocks(count_B: NDArray[np.int64]) -> list[tuple[int, int]]:
    """The queries in groups of at most BLOCK_ROWS items, or of one query: first of each, and the one behind its last."""
    if len(count_B) == 1:
        return [(0, 1)]
    blocks, begin, rows = [], 0, 0
    for b, count in enumerate(count_B.tolist()):
        if b > begin and rows + count > BLOCK_ROWS:
            blocks.append((begin, b))
            begin, rows = b, 0
        rows += count
    return [*blocks, (begin, len(count_B))]


def _items(ids: list[str], scores_M: NDArray[np.float32], columns: list[list[Any]], fields: list[str]) -> list[dict[str, Any]]:
    if not columns:
        return [{"id": item_id, "score": score} for item_id, score in zip(ids, scores_M, strict=False)]
    values = zip(*columns, strict=True)
    return [
        {"id": item_id, "score": score, "fields": dict(zip(fields, row, strict=True))}
        for item_id, score, row in zip(ids, scores_M, values, strict=False)
    ]


def _conditions(request: RetrieveRequest, model: LoadedModel, settings: Settings) -> Filter | None:
    """The request's filter, None where it has none."""
    if not request.filter and not request.exclude_filter:
        return None
    for name, conditions in (("filter", request.filter), ("exclude_filter", request.exclude_filter)):
        _at_most(name, _value_count(conditions), settings.max_filter_values, "values")
    return model.filters.parse(request.filter, request.exclude_filter)


def _value_count(conditions: Mapping[str, Any]) -> int:
    return sum(len(values) if isinstance(values, list) else 1 for values in conditions.values())


async def _in_time(deadline: float, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a thread makes of work that would hold up the event loop. Raises DeadlinePassed."""
    try:
        async with asyncio.timeout(max(deadline - time.perf_counter(), 0)):
            return await asyncio.to_thread(work, *args, **kwargs)
    except TimeoutError:
        raise DeadlinePassed(LATE) from None


def _at_most(field: str, value: float, limit: float, noun: str = "") -> None:
    if value > limit:
        raise InvalidQuery(field, value, f"at most {limit:g} {noun}".rstrip())


def _size(query: Query) -> int:
    features = len(query.item_features) + (0 if query.features is None else len(query.features.indices))
    return len(query.history) + len(query.exclude) + len(query.vector) + len(query.text) + features


def _check_query(i: int, query: Query, kind: str, settings: Settings) -> None:
    given = query.model_fields_set.intersection(KIND_NAMES) - ({"features"} if query.features is None else set())
    if given != {kind}:
        found = " and ".join(sorted(given)) or f"none of {', '.join(KIND_NAMES)}"
        raise InvalidQuery(f"queries[{i}]", found, f"{kind!r}, the query kind of this model")
    _at_most(f"queries[{i}].history", len(query.history), settings.max_history, "ids")
    _at_most(f"queries[{i}].exclude", len(query.exclude), settings.max_history, "ids")
    _at_most(f"queries[{i}].text", len(query.text), settings.max_text, "characters")
    if query.features is not None:
        _at_most(f"queries[{i}].features.indices", len(query.features.indices), settings.max_features, "features")
    if query.exclude_seen and kind != "history":
        raise InvalidQuery(f"queries[{i}].exclude_seen", True, f"false, because a query of kind {kind} tells nothing of what was seen")


def _unknown(ids: list[str], rows: NDArray[np.int64]) -> list[str]:
    if not len(rows) or rows.min() >= 0:
        return []
    return [item_id for item_id, row in zip(ids, rows.tolist(), strict=False) if row < 0]


def _exclusions(rows: list[NDArray[np.int64]]) -> NDArray[np.int64] | None:
    """int64[B, E], or None when nothing is excluded. The row of an unknown id, −1, is NO_ITEM: padding."""
    width = max(map(len, rows))
    if width == 0:
        return None
    exclude_BE = np.full((len(rows), width), NO_ITEM, np.int64)
    for row, excluded in zip(exclude_BE, rows, strict=True):
        row[: len(excluded)] = excluded
    return exclude_BE


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


_NO_ROWS = np.empty(0, np.int64)
LATE = "The deadline passed before the answer was there."
