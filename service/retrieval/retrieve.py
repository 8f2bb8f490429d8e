"""The stages of a request: encode, search, second stage, serialise; with the seconds of each.

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

from espalier.arrays import Float32
from espalier.masks.filters import Filter
from espalier.search import Coverage, check_finite

from ..batching.priority import ANSWER_TOO_LATE, Priority
from ..batching.request_parts import Answer
from ..errors import DeadlinePassed, Uncovered
from ..live.views import View
from ..models.loading import LoadedModel
from ..retrieval.explain import RequestedItems, explain
from ..retrieval.request import CheckedRequest, EncodedRequest, encode, input_values, parsed_filter
from ..retrieval.second_stage import Candidates, second_stage
from ..settings import Settings
from ..watch.metrics import STAGES

P = ParamSpec("P")
T = TypeVar("T")
INLINE_VALUES = 1024
"""The event loop itself handles up to this many ids, numbers and characters. More go to a thread, so that other requests do not wait."""
BLOCK_ROWS = 4096
"""Items that are serialised between two checks of the deadline, or all items of one query if they are more."""


@dataclass(frozen=True)
class Retrieved:
    """An answer.

    unknown   the unknown ids of each query
    engine_s  the request's share of the seconds of its engine calls
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

    began, deadline  times of time.perf_counter(). No search begins, and no answer is returned, after the deadline
    priority         how the request waits for the engine; background requests do not count in metrics
    origin           of `SearchContext`
    key              the name of the request's API key
    Raises InvalidQuery, NotReady, QueueFull, DeadlinePassed, EngineFailed, Uncovered.
    """
    started = time.perf_counter()
    request, model = checked.request, checked.model
    view = model.live.view(request.live)
    mask, filter = view.standing, None
    if request.filter or request.exclude_filter:
        filter = parsed_filter(request.filter, request.exclude_filter, model, settings)
        mask = view.cached(filter) or await _run(False, deadline, view.mask, filter)
    encoded = await _run(input_values(request) <= INLINE_VALUES, deadline, encode, checked, view, settings.widen, mask)
    submitted = time.perf_counter()
    needs_all = request.partial == "refuse"
    answer = await model.batcher.search(encoded.queries, encoded.params, deadline, priority, origin, needs_all, key)
    answered = time.perf_counter()
    if answer.result.coverage is not None:
        check_coverage(answer.result.coverage, 1.0 if needs_all else request.min_coverage)
    check_finite(encoded.queries, answer.result)
    answer_view = view if view.is_frozen else model.live.newest  # the answer may have items that were put during the search
    is_small, is_final = answer.result.item_rows_BM.size <= INLINE_VALUES, not checked.depth and request.min_score is None
    stage_arguments = checked, encoded.queries, encoded.caller_features, answer.result, answer_view.candidates
    candidates = await _run(is_small or is_final, deadline, second_stage, *stage_arguments)
    reranked = time.perf_counter()
    is_quick = is_small and not checked.traced
    results = await _run(is_quick, deadline, results_json, checked, answer_view, filter, encoded, answer, candidates, deadline)
    done = time.perf_counter()
    if done > deadline:
        raise DeadlinePassed(ANSWER_TOO_LATE)
    search_s = min(answer.engine_s, answered - submitted)  # calls of one request may overlap, as a router's do
    queue_s = answered - submitted - search_s
    stages_s = (queue_s, submitted - started, search_s, done - reranked, *([reranked - answered] if checked.depth else []))
    if priority is not Priority.BACKGROUND:
        queries = len(encoded.queries)
        model.metrics.retrieved(
            stages_s,
            answer.engine_s / answer.batch,
            answer.beam_size,
            queries=queries,
            incomplete=queries - int(np.count_nonzero(candidates.complete_B)),
            degraded=queries if answer.degraded else 0,
            unknown=sum(map(len, encoded.unknown)),
        )
    body, stages_ms = _document(model, view, results, stages_s, answer, done - began)
    return Retrieved(body, stages_ms, answer.beam_size, encoded.unknown, answer.engine_s / answer.batch * len(encoded.queries))


def _document(
    model: LoadedModel,
    view: View,
    results: bytes,
    stages_s: tuple[float, ...],
    answer: Answer,
    total_s: float,
) -> tuple[bytes, dict[str, float]]:
    """(body of the answer, milliseconds of its stages). stages_s: queue, encode, search, serialise, and rerank if there was one."""
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


def results_json(
    checked: CheckedRequest,
    view: View,
    filter: Filter | None,
    encoded: EncodedRequest,
    answer: Answer,
    candidates: Candidates,
    deadline: float = float("inf"),
) -> bytes:
    """The JSON list of results. Raises DeadlinePassed."""
    items, fields, count_B = view.items, checked.request.fields, candidates.count_B
    requested = RequestedItems(checked, view, filter) if checked.traced else None
    results: list[bytes] = []
    step = max(BLOCK_ROWS // max(candidates.rows_BM.shape[1], 1), 1)
    for begin_b in range(0, len(count_B), step):
        end_b = min(begin_b + step, len(count_B))
        if time.perf_counter() > deadline:
            raise DeadlinePassed(ANSWER_TOO_LATE)
        rows = candidates.rows_BM[begin_b, : count_B[begin_b]]
        if end_b > begin_b + 1:
            rows = np.concatenate([candidates.rows_BM[b, : count_B[b]] for b in range(begin_b, end_b)])
        ids = items.ids_of(rows)
        columns = [items.values(field, rows) for field in fields]
        end = 0
        for b in range(begin_b, end_b):
            begin, end = end, end + int(count_B[b])
            entries = _item_entries(ids[begin:end], candidates.scores_BM[b], [column[begin:end] for column in columns], fields)
            if candidates.reranked is not None:
                entries = [{**item, "rerank_score": score} for item, score in zip(entries, candidates.reranked.score_BM[b], strict=False)]
            # an excluded item may have been unknown when the request was encoded, and put before the search
            excluded_ids = checked.request.queries[b].excluded if encoded.unknown[b] else frozenset()
            allowed_items = [item for item in entries if item["id"] not in excluded_ids]
            entry: dict[str, Any] = {
                "items": allowed_items,
                "complete": bool(candidates.complete_B[b]) and len(allowed_items) == len(entries),
                "beam_size": answer.beam_size,
                "degraded": answer.degraded,
                "unknown": encoded.unknown[b],
            }
            if requested is not None:
                entry["explain"] = explain(checked, view, encoded, answer.result, b, requested, candidates)
            # OPT_SERIALIZE_NUMPY writes float32 scores with as few digits as identify them
            results.append(orjson.dumps(entry, default=str, option=orjson.OPT_SERIALIZE_NUMPY))
    return b"[" + b",".join(results) + b"]"


def _item_entries(ids: list[str], scores_M: Float32, columns: list[list[Any]], fields: list[str]) -> list[dict[str, Any]]:
    if not columns:
        return [{"id": item_id, "score": score} for item_id, score in zip(ids, scores_M, strict=False)]
    values = zip(*columns, strict=True)
    return [
        {"id": item_id, "score": score, "fields": dict(zip(fields, row, strict=True))}
        for item_id, score, row in zip(ids, scores_M, values, strict=False)
    ]


async def _run(is_quick: bool, deadline: float, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work`, which runs in a thread unless it is quick. Raises DeadlinePassed."""
    if is_quick:
        return work(*args, **kwargs)
    try:
        async with asyncio.timeout(max(deadline - time.perf_counter(), 0)):
            return await asyncio.to_thread(work, *args, **kwargs)
    except TimeoutError:
        raise DeadlinePassed(ANSWER_TOO_LATE) from None


def check_coverage(coverage: Coverage, min_coverage: float | None) -> None:
    """Raise Uncovered if no shard answered, or if the shards that did hold less than this share of the items. None: any share is enough."""
    fields = coverage_fields(coverage)
    if not fields["answered"] or fields["items"] < (min_coverage or 0.0):
        missing = ", ".join(map(str, fields["missing"]))
        raise Uncovered(
            f"coverage: got {fields['items']:.4g}, the share of the items on shards that answered, expected at least "
            f"{min_coverage or 0.0:g}, above 0; of {fields['shards']} shards, these gave no answer: {missing}."
        )


def coverage_fields(coverage: Coverage) -> dict[str, Any]:
    """The coverage of a request as JSON fields. A shard counts only if it answered all queries of the request."""
    answered_S = np.logical_and.reduce(coverage.answered_BS)
    items = int(coverage.items_S[answered_S].sum()) / int(coverage.items_S.sum())
    missing = np.flatnonzero(~answered_S).tolist()
    return {"items": round(items, 6), "shards": len(answered_S), "answered": int(answered_S.sum()), "missing": missing}
