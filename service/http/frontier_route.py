"""POST /models/{name}/frontier: recall and time of some beam sizes on held-out queries, with a line for each as soon as it is measured.

An ASGI application of its own, because it must end when its client goes; routes.py documents it. The queries are searched behind those of
customers. They search only the bundle, without live items and removals, as at export.

Legend: B queries, M results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
import orjson
from pydantic import Field
from starlette.types import Receive, Scope, Send

from espalier.arrays import Float64
from espalier.checks.heldout import HeldOut, read_heldout
from espalier.errors import InvalidQuery, spelled
from espalier.metrics import precision_recall_f
from espalier.search import SearchParams

from ..batching.priority import Priority
from ..errors import Conflict, NotReady, QueueFull
from ..http.dependencies import Service
from ..http.memory_budget import Budget, Reservation
from ..http.middleware import RequestInfo, problem_of
from ..http.request_bodies import JSON_TYPES, check_head, parse_body, read_body, until_hung_up, validate
from ..http.retrieve_route import read_and_write, send_body
from ..models.loading import LoadedModel
from ..retrieval.schemas import StrictBody

MAX_BEAMS = 32
MAX_QUERIES = 1000
DEFAULT_QUERIES = 256
"""Number of held-out queries if the request does not say; the probe replays as many."""
NORMAL_95 = 1.959964
"""95 % of a normal distribution lie within this many standard deviations of its mean."""

BeamSize = Annotated[int, Field(ge=1)]


class FrontierRequest(StrictBody):
    """The beams to measure."""

    beam_size: list[BeamSize] = Field(min_length=1, max_length=MAX_BEAMS, description="The beams, in the order of the answers.")
    m: int | None = Field(None, ge=1, description="Recall@m; without it the model's default.")
    version: int | None = Field(None, ge=1, description="Version of the model; without it the default.")
    queries: int = Field(DEFAULT_QUERIES, ge=1, le=MAX_QUERIES, description="Most held-out queries, evenly spaced among all.")


class FrontierRoute:
    """See the file's docstring. One request is answered at a time, because a second would only slow both down.

    bodies  the memory budget that the requests share
    """

    def __init__(self, service: Service) -> None:
        self.settings, self.registry, self.keys = service.settings, service.registry, service.keys
        self.bodies = Budget(self.settings.max_body_bytes, 0)
        self._slots = Budget(1, 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        info: RequestInfo = scope[RequestInfo.KEY]
        info.key, info.model = self.keys.check("private", info.authorization), scope["path_params"]["name"]
        self.keys.admit(info.key, info.model, "admin")
        self.registry.check_whole(info.model)
        check_head(scope, info.content_type, JSON_TYPES)
        with Reservation(self.bodies) as memory:
            request = await parse_body(await read_body(receive, self.settings.body_timeout_s, memory), partial(validate, FrontierRequest))
        model = self.registry.choose_whole(info.model, request.version)
        info.version = model.version
        m = _checked_m(request, model)
        with Reservation(self._slots) as slot:
            if not slot.take(1):
                raise QueueFull("A frontier is being measured already.", 1)
            held_out = await asyncio.to_thread(read_heldout, model.bundle, request.queries)
            if not len(held_out.queries):
                raise Conflict(f"Version {model.version} of {spelled(model.name)} has no held-out queries.")
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/x-ndjson")]})
            writing = self._write(scope, send, request, m, model, held_out, slot)
            del model, held_out  # an exception holds this frame, which would hold the version
            await read_and_write(until_hung_up(receive), writing, info)

    async def _write(
        self, scope: Scope, send: Send, request: FrontierRequest, m: int, model: LoadedModel, held_out: HeldOut, slot: Reservation
    ) -> None:
        """Write a line for each beam. If a beam cannot be measured, write a problem document as the last line.

        slot  given back before the last line, because the client may then send its next request
        """
        for count, beam_size in enumerate(request.beam_size, 1):
            failed = False
            try:
                line = orjson.dumps(await measure(model, held_out, beam_size, m, partial(self._is_serving, model)))
            except Exception as error:
                line, failed = orjson.dumps(problem_of(error, scope[RequestInfo.KEY])[0]), True
            if failed or count == len(request.beam_size):
                slot.give(1)
            if not await send_body(send, scope, line + b"\n", self.settings.write_timeout_s, more=True):
                return
            if failed:
                break
        await send({"type": "http.response.body", "body": b""})

    def _is_serving(self, model: LoadedModel) -> bool:
        entry = self.registry.entries.get(model.name)
        return entry is not None and entry.ready.get(model.version) is model


def _checked_m(request: FrontierRequest, model: LoadedModel) -> int:
    """The m of a request. Raises InvalidQuery if m or a beam exceeds the model's limits."""
    search = model.bundle.manifest.search
    for i, beam_size in enumerate(request.beam_size):
        if beam_size > search.max_beam_size:
            raise InvalidQuery(f"beam_size[{i}]", beam_size, f"at most {search.max_beam_size}")
    m = request.m or search.m
    if m > search.max_m:
        raise InvalidQuery("m", m, f"at most {search.max_m}")
    return m


async def measure(model: LoadedModel, held_out: HeldOut, beam_size: int, m: int, is_serving: Callable[[], bool]) -> dict[str, Any]:
    """The recall and time of one beam on `held_out`, as routes.py describes it. Each query waits until the engine has no other work.

    The first queries are searched twice: the first call with a beam is slower than later ones, so its time does not count.

    is_serving  whether the version still serves
    Raises NotReady, EngineFailed.
    """
    batcher, batch = model.batcher, model.batcher.limits.background_batch
    recalls, engine_s = list[Float64](), 0.0
    for call, begin in enumerate([0, *range(0, len(held_out.queries), batch)]):
        if not is_serving():
            raise NotReady(f"Version {model.version} of {spelled(model.name)} serves no longer.")
        rows = np.arange(begin, min(begin + batch, len(held_out.queries)))
        params = SearchParams.uniform(len(rows), beam_size, m, mask=model.filters.every_item)
        answer = await batcher.search(held_out.queries.take(rows), params, priority=Priority.BACKGROUND)
        if call == 0:
            continue
        relevant = held_out.relevant[begin : begin + len(rows)]
        recalls.append(precision_recall_f(answer.result.item_rows_BM, relevant, m)[1])
        engine_s += answer.engine_s * len(rows) / answer.batch
    recall_B = np.concatenate(recalls)
    return {
        "beam_size": beam_size,
        "m": m,
        "recall": round(float(recall_B.mean()), 6),
        "recall_ci": interval(recall_B),
        "ms_per_query": round(engine_s * 1e3 / len(recall_B), 4),
        "queries": len(recall_B),
        "default": beam_size == model.bundle.manifest.search.beam_size,
    }


def interval(recall_B: Float64) -> tuple[float, float]:
    """The 95 % interval of a mean by the normal approximation, within [0, 1]; for a single query, all of [0, 1]."""
    if len(recall_B) < 2:
        return 0.0, 1.0
    half_width = NORMAL_95 * float(recall_B.std(ddof=1)) / len(recall_B) ** 0.5
    mean = float(recall_B.mean())
    return round(max(mean - half_width, 0.0), 6), round(min(mean + half_width, 1.0), 6)
