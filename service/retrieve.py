"""One request: ids and vectors become arrays, the engine searches, item rows become JSON.

Knows the three steps and how long each took. Does not know HTTP or how requests share an engine call.

Legend: B queries, E excluded items, M results.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np
import orjson
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.errors import InvalidQuery
from espalier.items import ItemTable
from espalier.queries import HistoryKind, QueryBatch, encode_histories, encode_vectors
from espalier.search import NO_ITEM, SearchParams, SearchResult
from service.registry import LoadedModel
from service.schemas import Query, RetrieveRequest
from service.settings import Settings

KINDS = frozenset({"history", "vector"})
INLINE_VALUES = 4096
"""Ids and numbers up to this many are handled on the event loop; more would keep other requests waiting, and go to a thread."""


@dataclass(frozen=True)
class Retrieved:
    """The body of the answer, and the milliseconds of its stages for the Server-Timing header."""

    body: bytes
    stages_ms: dict[str, float]


@dataclass(frozen=True)
class Encoded:
    """A request as the engine takes it; `unknown` lists each query's ids that the catalogue does not have."""

    queries: QueryBatch
    params: SearchParams
    unknown: list[list[str]]
    beam_size: int


async def retrieve(request: RetrieveRequest, model: LoadedModel, settings: Settings, began: float) -> Retrieved:
    """Answer a request. `began` is when it was read (perf_counter). Raises InvalidQuery, NotReady, EngineFailed."""
    started = time.perf_counter()
    values = sum(len(query.history) + len(query.exclude) + len(query.vector) for query in request.queries)
    if values <= INLINE_VALUES:
        encoded = encode(request, model.bundle, settings)
    else:
        encoded = await asyncio.to_thread(encode, request, model.bundle, settings)
    submitted = time.perf_counter()
    answer = await model.batcher.search(encoded.queries, encoded.params)
    answered = time.perf_counter()
    if answer.result.item_rows_BM.size <= INLINE_VALUES:
        results = results_json(request, model.bundle.items, encoded, answer.result)
    else:
        results = await asyncio.to_thread(results_json, request, model.bundle.items, encoded, answer.result)
    done = time.perf_counter()

    queue_s = max(answered - submitted - answer.engine_s, 0.0)
    stages_s = (queue_s, submitted - started, answer.engine_s, done - answered)
    incomplete = len(encoded.queries) - int(np.count_nonzero(answer.result.complete_B))
    model.metrics.retrieved(stages_s, answer.engine_s / answer.batch, encoded.beam_size, incomplete)
    queue_ms, encode_ms, search_ms, serialise_ms = (_ms(seconds) for seconds in stages_s)
    stages_ms = {"queue": queue_ms, "encode": encode_ms, "search": search_ms, "serialise": serialise_ms, "total": _ms(done - began)}
    timing = {f"{stage}_ms": value for stage, value in stages_ms.items()}
    document = {
        "model": model.name,
        "version": model.version,
        "engine": model.engine.name,
        "results": orjson.Fragment(results),
        "timing": timing | {"ms_per_query": _ms(answer.engine_s / answer.batch), "batch": answer.batch},
    }
    return Retrieved(orjson.dumps(document), stages_ms)


def encode(request: RetrieveRequest, bundle: Bundle, settings: Settings) -> Encoded:
    """Check a request against its model and its limits, and make arrays of it. Raises InvalidQuery."""
    manifest, queries = bundle.manifest, request.queries
    search, kind = manifest.search, manifest.query
    m = search.m if request.m is None else request.m
    beam_size = search.beam_size if request.beam_size is None else request.beam_size
    _at_most("m", m, search.max_m)
    _at_most("beam_size", beam_size, search.max_beam_size)
    _at_most("queries", len(queries), settings.max_queries, "queries")
    for i, field in enumerate(request.fields):
        if field not in bundle.items.fields:
            raise InvalidQuery(f"fields[{i}]", field, f"one of {', '.join(bundle.items.fields)}")
    for i, query in enumerate(queries):
        _check_query(i, query, kind.kind, settings.max_history)

    if isinstance(kind, HistoryKind):
        batch, seen = encode_histories(kind, bundle.items, [query.history for query in queries])
    else:
        batch, seen = encode_vectors(kind, [query.vector for query in queries]), [_NO_ROWS] * len(queries)
    excluded = [bundle.items.rows_of(query.exclude) if query.exclude else _NO_ROWS for query in queries]
    unknown = [_unknown(query.history, seen[b]) + _unknown(query.exclude, excluded[b]) for b, query in enumerate(queries)]
    barred = [np.concatenate([seen[b], excluded[b]]) if query.exclude_seen else excluded[b] for b, query in enumerate(queries)]
    params = SearchParams.uniform(len(queries), beam_size, m, _exclusions(barred))
    return Encoded(batch, params, [list(dict.fromkeys(ids)) for ids in unknown], beam_size)


def results_json(request: RetrieveRequest, items: ItemTable, encoded: Encoded, result: SearchResult) -> bytes:
    """The JSON list of results. `min_score` trims here, after the engine decided what is complete."""
    count_B = result.count_B
    if request.min_score is not None:  # best first, so that the items to keep come first
        count_B = np.minimum(count_B, np.count_nonzero(result.scores_BM >= request.min_score, axis=1))
    rows = np.concatenate([rows_M[:count] for rows_M, count in zip(result.item_rows_BM, count_B, strict=True)])
    ids = items.ids_of(rows)
    columns = [items.values(field, rows) for field in request.fields]
    results, end = [], 0
    for b, count in enumerate(count_B.tolist()):
        begin, end = end, end + count
        scored = zip(ids[begin:end], result.scores_BM[b], strict=False)
        if columns:
            values = zip(*(column[begin:end] for column in columns), strict=True)
            listed = [
                {"id": item_id, "score": score, "fields": dict(zip(request.fields, fields, strict=True))}
                for (item_id, score), fields in zip(scored, values, strict=True)
            ]
        else:
            listed = [{"id": item_id, "score": score} for item_id, score in scored]
        results.append(
            {
                "items": listed,
                "complete": bool(result.complete_B[b]),
                "beam_size": encoded.beam_size,
                "unknown": encoded.unknown[b],
            }
        )
    return orjson.dumps(results, default=str, option=orjson.OPT_SERIALIZE_NUMPY)  # writes float32 scores as short as they are


def _at_most(field: str, value: int, limit: int, noun: str = "") -> None:
    if value > limit:
        raise InvalidQuery(field, value, f"at most {limit} {noun}".rstrip())


def _check_query(i: int, query: Query, kind: str, max_history: int) -> None:
    given = query.model_fields_set & KINDS
    if given != {kind}:
        found = " and ".join(sorted(given)) or "neither history nor vector"
        raise InvalidQuery(f"queries[{i}]", found, f"{kind!r}, the query kind of this model")
    _at_most(f"queries[{i}].history", len(query.history), max_history, "ids")
    _at_most(f"queries[{i}].exclude", len(query.exclude), max_history, "ids")
    if query.exclude_seen and kind != "history":
        raise InvalidQuery(f"queries[{i}].exclude_seen", True, "false, because a vector tells nothing of what was seen")


def _unknown(ids: list[str], rows: NDArray[np.int64]) -> list[str]:
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
