"""One request from its arrays to the JSON of its answer: search, second stage, serialisation, and how long each took.

Knows the stages of a retrieval. Does not know HTTP or how requests share an engine call.

Legend: B queries, M candidates.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from espalier.errors import InvalidQuery
from espalier.masks.filters import Filter
from espalier.queries import QueryBatch
from espalier.search import Coverage

from ..batching.priority import Priority
from ..batching.request_parts import Answer
from ..errors import DeadlinePassed, Uncovered
from ..live.views import View
from ..models.loading import LoadedModel
from ..retrieval.explain import RequestedItems, explain
from ..retrieval.request import CheckedRequest, EncodedRequest, conditions_of, encode, input_values
from ..retrieval.second_stage import Candidates, second_stage
from ..settings import Settings
from ..watch.metrics import STAGES

P = ParamSpec("P")
T = TypeVar("T")
INLINE_VALUES = 1024
"""Ids, numbers and characters up to this many are handled on the event loop. More would keep other requests waiting, and go to a thread."""
BLOCK_ROWS = 4096
"""Items that are turned into JSON at a time, or those of one query. The deadline is checked between blocks."""
LATE = "The deadline passed before the answer was there."


@dataclass(frozen=True)
class Retrieved:
    """The body of the answer, the milliseconds of its stages, the beam that was searched with, the unknown ids of each query, and the share
    of its queries in the engine seconds of their calls.
    """

    body: bytes
    stages_ms: dict[str, float]
    beam_size: int
    unknown: Sequence[Sequence[str]]
    engine_s: float


async def retrieve(
    checked: CheckedRequest,
    settings: Settings,
    began: float,
    deadline: float,
    priority: Priority = Priority.NORMAL,
    origin: tuple[tuple[str, str], ...] = (),
    key: str = "",
) -> Retrieved:
    """Answer one request.

    began, deadline  points of time.perf_counter(). A search that has not begun by the deadline never does; a later answer is not given
    priority         how it waits for the engine; metrics leave background requests out
    origin           of `SearchContext`
    key              the name of its API key
    Raises InvalidQuery, NotReady, QueueFull, DeadlinePassed, EngineFailed, Uncovered.
    """
    started = time.perf_counter()
    request, model = checked.request, checked.model
    view = model.live.view(request.live)
    mask, conditions = view.standing, conditions_of(request, model, settings)
    if conditions is not None:
        mask = view.cached(conditions) or await _run(False, deadline, view.mask, conditions)
    encoded = await _run(input_values(request) <= INLINE_VALUES, deadline, encode, checked, view, settings.widen, mask)
    submitted = time.perf_counter()
    whole = request.partial == "refuse"
    answer = await model.batcher.search(encoded.queries, encoded.params, deadline, priority, origin, whole, key)
    answered = time.perf_counter()
    if answer.result.coverage is not None:
        check_coverage(answer.result.coverage, 1.0 if whole else request.min_coverage)
    if answer.result.finite_B is not None:
        _check_finite(encoded.queries, answer.result.finite_B)
    found, small = Candidates.of(answer.result), answer.result.item_rows_BM.size <= INLINE_VALUES
    if checked.depth or request.min_score is not None:
        found = await _run(small, deadline, second_stage, checked, encoded.queries, encoded.caller_features, answer.result)
    reranked = time.perf_counter()
    seen = view if view.is_frozen else model.live.newest()  # the engine may have found what came after the request
    at_once = small and not checked.traced
    results = await _run(at_once, deadline, results_json, checked, seen, conditions, encoded, answer, found, deadline)
    done = time.perf_counter()
    if done > deadline:
        raise DeadlinePassed(LATE)
    queue_s = max(answered - submitted - answer.engine_s, 0.0)
    stages_s = (queue_s, submitted - started, answer.engine_s, done - reranked, *([reranked - answered] if checked.depth else []))
    if priority is not Priority.BACKGROUND:
        _count(model, stages_s, answer, found, encoded.unknown)
    body, stages_ms = _answer(model, view, results, stages_s, answer, done - began)
    return Retrieved(body, stages_ms, answer.beam_size, encoded.unknown, answer.engine_s / answer.batch * len(encoded.queries))


def _count(model: LoadedModel, stages_s: tuple[float, ...], answer: Answer, found: Candidates, unknown: Sequence[Sequence[str]]) -> None:
    queries = len(found.count_B)
    model.metrics.retrieved(
        stages_s,
        answer.engine_s / answer.batch,
        answer.beam_size,
        queries=queries,
        incomplete=queries - int(np.count_nonzero(found.complete_B)),
        degraded=queries if answer.degraded else 0,
        unknown=sum(map(len, unknown)),
    )


def _answer(
    model: LoadedModel,
    view: View,
    results: bytes,
    stages_s: tuple[float, ...],
    answer: Answer,
    total_s: float,
) -> tuple[bytes, dict[str, float]]:
    """The whole answer, and the milliseconds of its stages. stages_s: queue, encode, search, serialise, and rerank where there was one."""
    stages_ms = {stage: round(seconds * 1e3, 4) for stage, seconds in zip(STAGES, stages_s, strict=False)}
    stages_ms["total"] = round(total_s * 1e3, 4)
    timing = {"rerank_ms": 0.0} | {f"{stage}_ms": ms for stage, ms in stages_ms.items()}
    timing |= {"ms_per_query": round(answer.engine_s / answer.batch * 1e3, 4), "batch": answer.batch}
    document = {
        "model": model.name,
        "version": model.version,
        "engine": model.engine.name,
        "results": orjson.Fragment(results),
        "timing": timing,
    }
    if view.sequence is not None:
        document["sequence"] = view.sequence
    if answer.result.coverage is not None:
        document["coverage"] = coverage_fields(answer.result.coverage)
    return orjson.dumps(document), stages_ms


def _check_finite(queries: QueryBatch, finite_B: NDArray[np.bool_]) -> None:
    """Raise InvalidQuery where the model makes an infinite score of a vector, which only the search finds out."""
    if not finite_B.all():
        b = int(np.flatnonzero(~finite_B)[0])
        largest = float(queries.array[b][np.argmax(np.abs(queries.array[b]))])
        raise InvalidQuery(f"queries[{b}].vector", largest, "numbers of which the model makes finite scores")


def results_json(
    checked: CheckedRequest,
    view: View,
    conditions: Filter | None,
    encoded: EncodedRequest,
    answer: Answer,
    found: Candidates,
    deadline: float = float("inf"),
) -> bytes:
    """The JSON list of results. Raises DeadlinePassed."""
    items, fields, count_B = view.items, checked.request.fields, found.count_B
    requested = RequestedItems(checked, view, conditions) if checked.traced else None
    results: list[bytes] = []
    step = max(BLOCK_ROWS // max(found.rows_BM.shape[1], 1), 1)
    for begin_b in range(0, len(count_B), step):
        end_b = min(begin_b + step, len(count_B))
        if time.perf_counter() > deadline:
            raise DeadlinePassed(LATE)
        rows = found.rows_BM[begin_b, : count_B[begin_b]]
        if end_b > begin_b + 1:
            rows = np.concatenate([found.rows_BM[b, : count_B[b]] for b in range(begin_b, end_b)])
        ids = items.ids_of(rows)
        columns = [items.values(field, rows) for field in fields]
        end = 0
        for b in range(begin_b, end_b):
            begin, end = end, end + int(count_B[b])
            own = _items(ids[begin:end], found.scores_BM[b], [column[begin:end] for column in columns], fields)
            if found.reranked is not None:
                own = [{**item, "rerank_score": score} for item, score in zip(own, found.reranked.score_BM[b], strict=False)]
            named = checked.request.queries[b].excluded if encoded.unknown[b] else frozenset()
            kept = [item for item in own if item["id"] not in named]  # unknown to the request, and put before the search
            entry: dict[str, Any] = {
                "items": kept,
                "complete": bool(found.complete_B[b]) and len(kept) == len(own),
                "beam_size": answer.beam_size,
                "degraded": answer.degraded,
                "unknown": encoded.unknown[b],
            }
            if requested is not None:
                entry["explain"] = explain(checked, view, encoded, answer.result, b, requested, found)
            # OPT_SERIALIZE_NUMPY writes float32 scores with as few digits as identify them
            results.append(orjson.dumps(entry, default=str, option=orjson.OPT_SERIALIZE_NUMPY))
    return b"[" + b",".join(results) + b"]"


def _items(ids: list[str], scores_M: NDArray[np.float32], columns: list[list[Any]], fields: list[str]) -> list[dict[str, Any]]:
    if not columns:
        return [{"id": item_id, "score": score} for item_id, score in zip(ids, scores_M, strict=False)]
    values = zip(*columns, strict=True)
    return [
        {"id": item_id, "score": score, "fields": dict(zip(fields, row, strict=True))}
        for item_id, score, row in zip(ids, scores_M, values, strict=False)
    ]


async def _run(at_once: bool, deadline: float, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of work, which is done in a thread if it would hold up the event loop. Raises DeadlinePassed."""
    if at_once:
        return work(*args, **kwargs)
    try:
        async with asyncio.timeout(max(deadline - time.perf_counter(), 0)):
            return await asyncio.to_thread(work, *args, **kwargs)
    except TimeoutError:
        raise DeadlinePassed(LATE) from None


def check_coverage(coverage: Coverage, least: float | None) -> None:
    """Raise Uncovered where shards with less than `least` of the items answered a query, or none did. least: None: any share will do."""
    described = coverage_fields(coverage)
    if not described["answered"] or described["items"] < (least or 0.0):
        missing = ", ".join(map(str, described["missing"]))
        raise Uncovered(
            f"coverage: got {described['items']:.4g}, the share of the items on shards that answered, expected at least {least or 0.0:g}, "
            f"above 0; of {described['shards']} shards, these did not answer in time: {missing}."
        )


def coverage_fields(coverage: Coverage) -> dict[str, Any]:
    """The coverage of a request: a shard counts where it answered all of its queries."""
    if coverage.answered_BS.all():
        shards = coverage.answered_BS.shape[1]
        return {"items": 1.0, "shards": shards, "answered": shards, "missing": []}
    answered_S = np.logical_and.reduce(coverage.answered_BS)
    items = int(coverage.items_S[answered_S].sum()) / int(coverage.items_S.sum())
    missing = np.flatnonzero(~answered_S).tolist()
    return {"items": round(items, 6), "shards": len(answered_S), "answered": int(answered_S.sum()), "missing": missing}
