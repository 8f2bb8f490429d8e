"""A router's search of a shard, from the body of the query to the body of the answer.

Knows messages, versions and their queues. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, ParamSpec, TypeVar

import orjson

from espalier.errors import EspalierError, InvalidInput
from espalier.shards.messages import ShardAnswer, ShardQuery, decode_query, encode_answer

from ..batching.priority import ANSWER_TOO_LATE
from ..batching.request_parts import Answer
from ..errors import DeadlinePassed, Gone, NotReady, QueueFull, ServiceError, UnknownMasks
from ..models.loading import LoadedModel
from ..models.registry import Registry
from ..models.shard_version import ShardVersion
from ..shards.local_query import check, is_small, translate
from ..watch.metrics import STAGES

P = ParamSpec("P")
T = TypeVar("T")
INLINE_BYTES, INLINE_NUMBERS = 1 << 16, 1 << 14
"""Bodies and arrays up to this size are handled on the event loop. A thread handles larger ones: they would delay other searches."""
_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (UnknownMasks, "unknown_masks"),
    (Gone, "not_served"),
    (InvalidInput, "invalid"),
    (QueueFull, "full"),
    (DeadlinePassed, "late"),
    (NotReady, "not_ready"),
)


class SearchOutcome(NamedTuple):
    """The body of an answer. The other fields are for logs and traces."""

    body: bytes
    model: str
    version: int
    queries: int
    m: int
    beam_size: int
    stages_ms: Mapping[str, float]


async def answer_search(registry: Registry, body: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to a router's query, for callers without HTTP. An error of `search` becomes its status."""
    try:
        return 200, (await search(registry, body, time.perf_counter())).body
    except UnknownMasks as error:
        return error.status, orjson.dumps(error.digests)
    except InvalidInput as error:
        return 422, str(error).encode()
    except ServiceError as error:
        return error.status, str(error).encode()


async def search(registry: Registry, body: bytes, began: float) -> SearchOutcome:
    """The answer to a router's query. Cancelling removes its queries from the queue.

    began  of time.perf_counter(): the query's deadline counts from here
    Raises InvalidInput, UnknownMasks, Gone, QueueFull, DeadlinePassed, NotReady, EngineFailed.
    """
    try:
        return await _search(registry, body, began)
    except EspalierError as error:
        reason = next((reason for kind, reason in _REASONS if isinstance(error, kind)), "failed")
        registry.shards.metrics.count("espalier_shard_refused_total", reason)
        raise


async def _search(registry: Registry, body: bytes, began: float) -> SearchOutcome:
    if registry.draining:
        raise NotReady("The service is shutting down.")
    started = time.perf_counter()
    query = await _run(len(body) <= INLINE_BYTES, decode_query, body)
    model, shard = registry.shards.find(query.pin)
    deadline = began + min(query.timeout_ms, registry.shards.settings.max_timeout_ms) / 1e3
    values = check(query, model, shard, registry.shards.settings)
    with registry.shards.room(values):
        model.batcher.check_overload(len(query.queries))
        queries, params = await _run(is_small(query, INLINE_NUMBERS), translate, query, model, shard)
        if query.sent_masks:
            registry.shards.metrics.show("espalier_shard_mask_bytes", shard.masks.bytes, model.name, model.version)
        submitted = time.perf_counter()
        answer = await model.batcher.search(queries, params, deadline)
        answered = time.perf_counter()
        answer_body = await _run(not params.trace and values <= INLINE_NUMBERS, _encode, query, model, shard, answer)
    done = time.perf_counter()
    if done > deadline:
        raise DeadlinePassed(ANSWER_TOO_LATE)
    stages_s = max(answered - submitted - answer.engine_s, 0.0), submitted - started, answer.engine_s, done - answered
    _count(registry, model, answer, stages_s, done - began)
    stages_ms = {stage: round(seconds * 1e3, 4) for stage, seconds in zip(STAGES, stages_s, strict=False)}
    return SearchOutcome(answer_body, model.name, model.version, len(queries), int(query.m_B.max()), answer.beam_size, stages_ms)


def _encode(query: ShardQuery, model: LoadedModel, shard: ShardVersion, answer: Answer) -> bytes:
    result = shard.local.whole(answer.result)
    if not query.frontier:  # another query of the engine call may have asked for one
        result = replace(result, frontiers=())
    return encode_answer(ShardAnswer(query.pin, result, model.engine.name, answer.engine_s * 1e3, answer.batch, query.number))


def _count(registry: Registry, model: LoadedModel, answer: Answer, stages_s: tuple[float, ...], seconds: float) -> None:
    """Count an answered search. stages_s: of the first STAGES; encoding is the work before the queue."""
    complete_B = answer.result.complete_B
    model.metrics.retrieved(
        stages_s,
        answer.engine_s / answer.batch,
        answer.beam_size,
        queries=len(complete_B),
        incomplete=len(complete_B) - int(complete_B.sum()),
    )
    registry.shards.metrics.count("espalier_shard_searches_total", model.name)
    registry.shards.metrics.observe("espalier_shard_search_seconds", seconds, model.name)


async def _run(inline: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of some work, done inline or in a thread."""
    return work(*args, **kwargs) if inline else await asyncio.to_thread(work, *args, **kwargs)
