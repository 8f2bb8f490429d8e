"""POST /retrieve, as an ASGI application of its own, because the framework's layers would cost more than the work itself.

It raises errors, and middleware.py answers them. routes.py documents it. stream_route.py answers each of its lines in the same way. With
`Espalier-Priority: background` a request waits behind all others (priority.py) and does not count in customers' metrics.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Collection, Coroutine
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from espalier.errors import EspalierError, InvalidInput

from ..batching.priority import RUNNING, WAITING, Priority, Turns, priority_of
from ..errors import Behind, ClientGone, DeadlinePassed, KeyLimit, QueueFull, Uncovered
from ..http.api_keys import may_use
from ..http.connection import CONNECTION
from ..http.dependencies import Service
from ..http.key_limits import HeldRefusals
from ..http.memory_budget import Budget, Reservation
from ..http.middleware import RequestInfo
from ..http.request_bodies import JSON_TYPES, check_head, parse_body, read_body, validate
from ..models.loading import LoadedModel
from ..problems import document_of
from ..retrieval.request import CheckedRequest, check
from ..retrieval.retrieve import Retrieved, retrieve
from ..retrieval.schemas import RetrieveRequest
from ..retrieval.trial import Shadows, is_tried
from ..watch.metrics import VersionOutcome
from ..watch.tracing import trace_id

log = logging.getLogger(__name__)

WATCH_AFTER_S = 0.002
"""After this time, a waiting request is watched for a client that hangs up. Watching costs as much as parsing the body."""
PIECE_BYTES = 1 << 16
"""Answers are passed to the connection in pieces of this size, the next one when the client has read the last one."""
MIN_BYTES_PER_S = 1 << 16
"""A client that reads an answer more slowly than this, after ESPALIER_WRITE_TIMEOUT_S, is cut off."""
FREE_BYTES, FREE_VALUES = 1 << 16, 4096
"""Bytes of a body and values of an answer that every request may have, however much other requests hold."""
BODIES_BYTES = 32 << 20
"""Most bytes of all larger bodies that are being read or parsed."""
ANSWERS = 4
"""Most answers of the largest size that one route holds at a time, until their clients have read them."""


def origin_of(info: RequestInfo) -> tuple[tuple[str, str], ...]:
    """The headers that identify a request on other machines. A request without a trace gets one, so that shards' spans belong to it."""
    if trace_id(info.traceparent) is None:
        info.traceparent = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01".encode()
    values = (("X-Request-Id", info.request_id), ("traceparent", info.traceparent or b""))
    return tuple((name, value.decode("latin-1")) for name, value in values)


class RetrievalRoute:
    """The common part of both retrieval routes, with the memory budgets that the requests of one route share."""

    def __init__(self, service: Service) -> None:
        self.settings, self.registry, self.keys, self.metrics = service.settings, service.registry, service.keys, service.metrics
        self.audit, self._unknown_ids, self._samples = service.audit, service.unknown_ids, service.samples
        self.bodies = Budget(max(BODIES_BYTES, self.settings.max_body_bytes), FREE_BYTES)
        self.answers = Budget(ANSWERS * self.settings.max_answer_values, FREE_VALUES)
        self._shadows = Shadows(self.settings)

    def check(self, request: RetrieveRequest, info: RequestInfo) -> CheckedRequest:
        """Choose the version for a request, note it in `info`, and check the request against it. Raises the errors of both steps."""
        if request.model is not None:
            may_use(info.key, request.model, "retrieve")
        model = self.registry.choose_whole(request.model, request.version, None if info.key is None else info.key.models)
        info.model, info.version, info.queries = model.name, model.version, len(request.queries)
        may_use(info.key, model.name, "retrieve")
        if request.version is None and (trial := self.registry.candidate(model.name)) is not None:
            candidate_model, candidate = trial
            if is_tried(candidate, model.name, info.key_name, info.user, info.group):
                with suppress(EspalierError):  # then the default version answers, which has other limits and fields
                    checked = check(request, candidate_model, self.settings)
                    info.version = candidate_model.version
                    return checked
        return check(request, model, self.settings)

    def count_request(self, info: RequestInfo) -> None:
        """Count a request of its key, if it has one. Raises KeyLimit."""
        if info.key is None:
            return
        try:
            self.keys.limits.take(info.key)
        except KeyLimit:
            info.by_client = True
            self.metrics.key_request(info.key.name, "limited")
            raise
        self.metrics.key_request(info.key.name, "admitted")

    async def answer(self, checked: CheckedRequest, info: RequestInfo, began: float, priority: Priority = Priority.NORMAL) -> Retrieved:
        """Answer a checked request, count it, and note the values for the log and the metrics in `info`."""
        counts = priority is not Priority.BACKGROUND
        try:
            retrieved = await self._answer(checked, info, began, priority)
        except InvalidInput:
            default = self._checked_by_default(checked)
            if default is None:
                raise
            info.version = default.model.version
            return await self.answer(default, info, began, priority)
        except Exception as error:
            if counts and (outcome := _outcome_of(error)) is not None:
                checked.model.metrics.request(outcome, time.perf_counter() - began)
            raise
        if counts:
            checked.model.metrics.request("answered", time.perf_counter() - began)
        if counts and checked.request.version is None:
            self._compare(checked, retrieved)
        return retrieved

    def _checked_by_default(self, checked: CheckedRequest) -> CheckedRequest | None:
        """A request that a candidate refused, checked against the default version. None if no candidate did, or if its answer is larger."""
        default = self.registry.choose_whole(checked.model.name, None)
        if checked.request.version is not None or default is checked.model:
            return None
        default_request = check(checked.request, default, self.settings)
        return default_request if default_request.answer_values <= checked.answer_values else None

    def _compare(self, checked: CheckedRequest, retrieved: Retrieved) -> None:
        """Draw whether the request is a shadow request; if so, the candidate answers it, too."""
        if (trial := self.registry.candidate(checked.model.name)) is not None:
            candidate_model, candidate = trial
            if candidate_model is not checked.model and random.random() < candidate.shadow:
                self._shadows.begin(checked, retrieved, candidate_model)

    async def _answer(self, checked: CheckedRequest, info: RequestInfo, began: float, priority: Priority) -> Retrieved:
        settings, model, timeout_ms = self.settings, checked.model, checked.timeout_ms
        expected_s = actual_s = 0.0  # engine seconds; a failed search may have begun, so it costs the expected seconds
        if info.key is not None and info.key.cost is not None:
            expected_s = actual_s = model.batcher.expected_s(len(checked.request.queries), checked.beam_size)
            self.keys.limits.spend(info.key, expected_s)
        try:
            if priority is Priority.NORMAL:
                model.batcher.check_overload(len(checked.request.queries), info.key_name or "")
            deadline = began + timeout_ms / 1e3
            if checked.request.min_sequence:
                await self._wait_for_sequence(checked.model, checked.request.min_sequence, deadline)
            origin = origin_of(info) if model.batcher.limits.remote else ()
            retrieved = await retrieve(checked, settings, began, deadline, priority, origin, info.key_name or "")
            actual_s = retrieved.engine_s
        except QueueFull:
            actual_s = 0.0
            self.metrics.count("espalier_shed_total", model.name)
            raise
        except (DeadlinePassed, Uncovered):
            info.by_client = timeout_ms < settings.timeout_ms
            raise
        except Behind as error:
            actual_s = 0.0
            info.by_client = timeout_ms < settings.timeout_ms or not error.committed
            raise
        finally:
            if info.key is not None and info.key.cost is not None:
                self.keys.limits.settle(info.key, expected_s, actual_s)
        info.m, info.beam_size, info.stages_ms = checked.m, retrieved.beam_size, retrieved.stages_ms
        if priority is not Priority.BACKGROUND:
            if any(retrieved.unknown):
                self._unknown_ids.note(model.name, retrieved.unknown)
            if self._samples.most:
                self._samples.note(model.name, model.version, checked.request.queries)
        return retrieved

    async def _wait_for_sequence(self, model: LoadedModel, sequence: int, deadline: float) -> None:
        """Wait until this worker has applied an operation of the live catalogue. Raises Behind, NotWritable."""
        catalogue = self.registry.catalogue(model.name)
        if not await catalogue.reached(model.version, sequence, deadline):
            applied, committed = catalogue.applied(model.version), sequence <= await catalogue.committed()
            raise Behind(f"min_sequence: got {sequence}, and by the deadline this worker has the operations up to {applied}.", committed)


def _outcome_of(error: Exception) -> VersionOutcome | None:
    """How an error counts for the version that raised it; None if the request caused it."""
    described = document_of(error)
    status = 500 if described is None else described[0]["status"]
    if status == 429:
        return "refused"
    if status == 504:
        return "late"
    return "failed" if status >= 500 else None


class RetrieveRoute(RetrievalRoute):
    """POST /retrieve. Answers of background requests have a budget of their own, so that they take no memory from customers' answers."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.background_answers = Budget(self.settings.max_answer_values, FREE_VALUES)
        self._turns, self._refusals = Turns("background requests", RUNNING, WAITING), HeldRefusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        info: RequestInfo = scope[RequestInfo.KEY]
        info.key = self.keys.check("retrieve", info.authorization)
        try:
            self.count_request(info)
            await self._respond(scope, receive, send, info)
        except (KeyLimit, QueueFull) as refusal:
            if isinstance(refusal, KeyLimit) or refusal.crowds:
                refusal.__traceback__ = None  # it holds the request's body
                if not await self._refusals.wait(info.key_name or "", scope):  # held back, unless too many are
                    refusal.headers += (("Connection", "close"),)
            raise

    async def _respond(self, scope: Scope, receive: Receive, send: Send, info: RequestInfo) -> None:
        check_head(scope, info.content_type, JSON_TYPES)
        background = info.priority is not None and priority_of(info.priority) is Priority.BACKGROUND
        if not background:
            self._check_overload(info)
        answers = self.background_answers if background else self.answers
        with Reservation(self.bodies) as body_memory, Reservation(answers) as answer_memory:  # a parsed body is larger than the body
            has_arrived = CONNECTION in scope and scope[CONNECTION].complete
            body = await read_body(receive, None if has_arrived else self.settings.body_timeout_s, body_memory)
            request = await parse_body(body, partial(validate, RetrieveRequest))
            async with CancelOnDisconnect(receive):
                checked = self.check(request, info)
                if not answer_memory.take(checked.answer_values):
                    if not background:
                        self.metrics.count("espalier_shed_total", info.model)
                    raise QueueFull("Too many large answers are being made or sent.", 1)
                retrieved = await (self._answer_in_background(checked, info) if background else self.answer(checked, info, info.began))
            timing = ", ".join([f"{stage};dur={ms}" for stage, ms in retrieved.stages_ms.items()])
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(retrieved.body)),
                (b"server-timing", timing.encode()),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            is_sent = await send_body(send, scope, retrieved.body, self.settings.write_timeout_s)
        if not is_sent:
            raise ClientGone("The client does not read its answer.")

    async def _answer_in_background(self, checked: CheckedRequest, info: RequestInfo) -> Retrieved:
        """Wait for the turn of a background request, then answer it."""
        await self._turns.enter(info.began + checked.timeout_ms / 1e3)
        try:
            return await self.answer(checked, info, info.began, Priority.BACKGROUND)
        finally:
            self._turns.leave()

    def _check_overload(self, info: RequestInfo) -> None:
        """Raise QueueFull before the body is parsed, if only one version serves and it is overloaded."""
        model = self.registry.only()
        if model is None:
            return
        try:
            model.batcher.check_overload(1, info.key_name or "")
        except QueueFull:
            info.model = model.name
            self.metrics.count("espalier_shed_total", model.name)
            raise


async def reserve(memory: Reservation, units: int, most: int, scope: Scope) -> int:
    """Wait until `memory` has room for more units of a request in lines, and return their number.

    most  most units of one request, so that others get their share
    Raises ClientDisconnect, and QueueFull if too many requests wait.
    """
    if not await memory.wait(units, most, partial(_client_has_gone, scope)):
        if _client_has_gone(scope):
            raise ClientDisconnect
        raise QueueFull("Too many requests in lines wait for room.", 1)
    return units


def _client_has_gone(scope: Scope) -> bool:
    return CONNECTION in scope and scope[CONNECTION].is_gone


async def send_body(send: Send, scope: Scope, body: bytes, timeout_s: float, more: bool = False) -> bool:
    """Send a body, or with `more` a part of one, as fast as the client reads it.

    Returns False if the client has gone, or if it is slower than `timeout_s` and MIN_BYTES_PER_S allow; then the connection is cut off.
    (It does not raise: a task that ends with an exception from asyncio.timeout forms a reference cycle, which would keep the body alive.)
    """
    if _client_has_gone(scope):
        scope[CONNECTION].abandon_answer()
        return False
    if len(body) <= PIECE_BYTES and not more:
        await send({"type": "http.response.body", "body": body})
        return True
    try:
        async with asyncio.timeout(timeout_s + len(body) / MIN_BYTES_PER_S):
            for begin in range(0, len(body), PIECE_BYTES):
                piece, end = body[begin : begin + PIECE_BYTES], begin + PIECE_BYTES >= len(body)
                await send({"type": "http.response.body", "body": piece, "more_body": more or not end})
    except TimeoutError:
        if CONNECTION in scope:
            scope[CONNECTION].cut_off()
        return False
    return True


async def read_and_write(
    read: Coroutine[Any, Any, None], write: Coroutine[Any, Any, None], info: RequestInfo, tasks: Collection[asyncio.Future[Any]] = ()
) -> None:
    """Run both sides of an answer in lines, until `write` ends or one of them fails. Raises the error of the failed side.

    ClientDisconnect is not a failure: the client hung up. tasks: tasks that they have begun, which are cancelled at the end.
    """
    sides = asyncio.create_task(write), asyncio.create_task(read)
    try:
        await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
    finally:
        all_tasks = (*sides, *tasks)
        for task in all_tasks:
            task.cancel()
        await asyncio.gather(*all_tasks, return_exceptions=True)
        failures = [error for error in [side.exception() for side in sides if not side.cancelled()] if error is not None]
        del sides, all_tasks, task  # the exceptions in them hold this frame
    if failures and isinstance(failures[0], ClientDisconnect):
        log.debug("request %s: the client hung up inside its stream", info.request_id.decode())
    elif failures:
        raise failures.pop(0)


class CancelOnDisconnect:
    """A context manager that cancels its block when the client hangs up, and then raises ClientGone."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._cancelled = False
        self._hung_up: asyncio.Future[Message] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._watch)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()
        task, self._task = self._task, None
        if self._hung_up is not None:
            self._hung_up.cancel()
        if self._cancelled and task is not None and task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientGone("The client hung up before the answer.") from error

    def _watch(self) -> None:
        self._hung_up = asyncio.ensure_future(self._receive())
        self._hung_up.add_done_callback(self._cancel)

    def _cancel(self, hung_up: asyncio.Future[Message]) -> None:
        if self._task is not None and not hung_up.cancelled():
            self._cancelled = self._task.cancel()
