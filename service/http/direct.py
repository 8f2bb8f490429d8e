"""The two routes that the framework does not see: POST /retrieve, because its layers would cost more than the work itself, and
POST /retrieve/stream, because it reads and writes at the same time.

Both are ASGI applications that raise what goes wrong; the Edge (middleware.py) answers it. routes.py documents them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from espalier.errors import InvalidInput
from service.errors import (
    Busy,
    ClientGone,
    DeadlinePassed,
    InvalidRequest,
    QueueFull,
    ServiceError,
    SlowBody,
    describe,
    internal_problem,
    parse,
)
from service.http.api_keys import Keys
from service.http.connection import CONNECTION
from service.http.memory_budget import Budget, Held
from service.http.middleware import JSON_TYPES, RequestInfo, log_failure
from service.http.request_bodies import check_type, read_body, read_lines
from service.models.registry import LoadedModel, Registry
from service.retrieval.retrieve import Retrieved, check, retrieve, values_of
from service.retrieval.schemas import RetrieveRequest
from service.settings import Settings
from service.watch.metrics import Metrics

log = logging.getLogger(__name__)

LINES_TYPES = ("application/x-ndjson", "application/jsonl", "application/json-lines")
INLINE_BYTES = 1 << 16
"""Bodies up to this size are parsed on the event loop; larger ones would keep other requests waiting, and go to a thread."""
WATCH_AFTER_S = 0.002
"""A request that waits for longer than this is watched for a client that hangs up. Watching costs as much as parsing the body."""
PIECE_BYTES = 1 << 16
"""Answers are handed to the connection in pieces of this size, the next one when the last one has been taken."""
SLOWEST_BYTES_PER_S = 1 << 16
"""A client that takes an answer more slowly than this, after ESPALIER_WRITE_TIMEOUT_S, is cut off."""
MAX_PARTS = 1 << 16
"""Objects and lists in a body. Each takes some hundred bytes and a microsecond, however short it is written."""
FREE_BYTES, FREE_VALUES = 1 << 16, 4096
"""Of a body and of an answer: what every request may have, whatever others hold."""
BODIES_BYTES = 32 << 20
"""Bytes of all larger bodies that are being read or parsed."""
ANSWERS = 4
"""Answers of the largest size that may be under way, and as many in streams: made, or not yet taken by their client."""

_parser = ThreadPoolExecutor(1, thread_name_prefix="parser")


class Retrieve:
    """POST /retrieve."""

    def __init__(self, settings: Settings, registry: Registry, keys: Keys, metrics: Metrics) -> None:
        self.settings, self.registry, self.keys, self.metrics = settings, registry, keys, metrics
        self.bodies = Budget(max(BODIES_BYTES, settings.max_body_bytes), FREE_BYTES)
        self.answers = Budget(ANSWERS * settings.max_answer_values, FREE_VALUES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        info: RequestInfo = scope[RequestInfo.KEY]
        self.keys.check("retrieve", info.authorization)
        check_type(info.content_type, JSON_TYPES)
        self._check_room(info)
        with self.bodies.holding() as read, self.answers.holding() as room:  # what is made of a body is larger than the body
            whole = CONNECTION in scope and scope[CONNECTION].complete
            request = await parsed(await read_body(receive, None if whole else self.settings.body_timeout_s, read))
            async with _WhileConnected(receive):
                model = chosen(request, self.settings, self.registry, info)
                if not room.take(values_of(request, model, self.settings)):
                    self.metrics.shed(model.name)
                    raise QueueFull("Too many large answers are under way.", 1)
                retrieved = await answer(request, model, self.settings, self.metrics, info, info.began)
            timing = ", ".join([f"{stage};dur={ms}" for stage, ms in retrieved.stages_ms.items()])
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(retrieved.body)),
                (b"server-timing", timing.encode()),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            taken = await send_body(send, scope, retrieved.body, self.settings.write_timeout_s)
        if not taken:
            raise ClientGone("The client does not take its answer.")

    def _check_room(self, info: RequestInfo) -> None:
        """Raise QueueFull before the body is even parsed, where it can only mean one version, and that one is overloaded."""
        only = self.registry.only()
        if only is None or not only.batcher.overloaded:
            return
        try:
            only.batcher.check_room(1)
        except QueueFull:
            info.model = only.name
            self.metrics.shed(only.name)
            raise


class Stream:
    """POST /retrieve/stream: each line in is a body of POST /retrieve, each line out its answer or its problem, in the same order.

    At most `stream_window` lines are read ahead of the answers, and no more than their answers have room for: a client that does not read,
    and an engine that is behind, hold the client's sending back. A stream waits for room in the queue, where a single request would be
    refused.
    """

    def __init__(self, settings: Settings, registry: Registry, keys: Keys, metrics: Metrics) -> None:
        self.settings, self.registry, self.keys, self.metrics = settings, registry, keys, metrics
        self.bodies = Budget(max(BODIES_BYTES, settings.max_body_bytes), FREE_BYTES)
        self.answers = Budget(ANSWERS * settings.max_answer_values, FREE_VALUES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        info: RequestInfo = scope[RequestInfo.KEY]
        self.keys.check("retrieve", info.authorization)
        check_type(info.content_type, LINES_TYPES)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/x-ndjson")]})
        with self.bodies.holding() as arriving, self.bodies.holding() as read, self.answers.holding() as room:
            lines = _Lines(self, info, scope, arriving, read, room)
            reader = asyncio.create_task(lines.read(receive))
            writer = asyncio.create_task(lines.write(send))
            try:
                await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _cancelled(reader, writer, *lines.tasks)
                failure = _failure(writer) or _failure(reader)  # the reader only ends by an exception
            del reader, writer, lines  # their exceptions hold this frame
        if isinstance(failure, ClientDisconnect):
            log.debug("request %s: the client hung up inside its stream", info.request_id.decode())
        elif failure is not None:
            raise failure

    def chosen(self, request: RetrieveRequest, info: RequestInfo) -> tuple[LoadedModel, int]:
        """The model of a line, and the values of its answer. Raises what `chosen` and `values_of` do."""
        model = chosen(request, self.settings, self.registry, info)
        return model, values_of(request, model, self.settings)


class _Lines:
    """The lines of one stream on their way: read, answered, written.

    arriving  bytes of the line that is not whole yet
    read      bytes of the lines that have not been answered, room: values of their answers
    tasks     the answers, until they are written or given up
    """

    def __init__(self, stream: Stream, info: RequestInfo, scope: Scope, arriving: Held, read: Held, room: Held) -> None:
        self._stream, self._seen, self._scope = stream, info, scope
        self._arriving, self._read, self._room = arriving, read, room
        self._waiting: asyncio.Queue[tuple[asyncio.Future[bytes], int, int] | None] = asyncio.Queue(stream.settings.stream_window)
        self.tasks: set[asyncio.Future[bytes]] = set()

    async def read(self, receive: Receive) -> None:
        """Begin to answer each line as it comes; after the last one, None. Then watch for a client that hangs up."""
        settings = self._stream.settings
        try:
            async for line in read_lines(receive, settings.max_body_bytes, settings.stream_idle_s, self._arriving):
                await self._begin(line)
        except (SlowBody, Busy) as error:
            await self._begin(error)
        await self._waiting.put(None)
        while (await receive())["type"] != "http.disconnect":
            pass
        raise ClientDisconnect

    async def write(self, send: Send) -> None:
        """Send the answers in the order of the lines, as long as they are taken."""
        while (next_one := await self._waiting.get()) is not None:
            task, size, values = next_one
            line = await task + b"\n"
            self.tasks.discard(task)
            self._read.give(size)
            if not await send_body(send, self._scope, line, self._stream.settings.stream_idle_s, more=True):
                return
            self._room.give(values)
        await send({"type": "http.response.body", "body": b""})

    async def _begin(self, line: bytes | ServiceError) -> None:
        """Begin to answer a line, once there is room for it and its answer."""
        told, size, values = RequestInfo(time.perf_counter(), self._seen.request_id), 0, 0
        if isinstance(line, ServiceError):
            task = self._refused(line, told)
        else:
            try:
                size = await self._wait_for(self._read, len(line), self._stream.settings.max_body_bytes)
                request = await parsed(line)
                model, wanted = self._stream.chosen(request, told)
                values = await self._wait_for(self._room, wanted, self._stream.settings.max_answer_values)
                task = asyncio.create_task(self._answer(request, model, told))
            except ClientDisconnect:
                raise
            except Exception as error:
                task = self._refused(error, told)
        self.tasks.add(task)
        await self._waiting.put((task, size, values))

    async def _wait_for(self, held: Held, units: int, most: int) -> int:
        """Hold so many units more, and give their number. One stream never holds more than `most`, and leaves the rest to others."""
        if not await held.wait(units, most, self._gone):
            if self._gone():
                raise ClientDisconnect
            raise QueueFull("Too many streams wait for room.", 1)
        return units

    def _gone(self) -> bool:
        return CONNECTION in self._scope and self._scope[CONNECTION].gone

    async def _answer(self, request: RetrieveRequest, model: LoadedModel, told: RequestInfo) -> bytes:
        """The answer to one line, or its problem document."""
        status = 200
        try:
            began = time.perf_counter()
            return (await answer(request, model, self._stream.settings, self._stream.metrics, told, began, patient=True)).body
        except asyncio.CancelledError:
            status = ClientGone.status
            raise
        except Exception as error:
            document = _problem(error, told)
            status = document["status"]
            return orjson.dumps(document)
        finally:
            self._stream.metrics.request(told.model, status, None, told.own_deadline)

    def _refused(self, error: Exception, told: RequestInfo) -> asyncio.Future[bytes]:
        """The problem document of a line that never was a request."""
        document = _problem(error, told)
        self._stream.metrics.request(told.model, document["status"], None)
        refused: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        refused.set_result(orjson.dumps(document))
        return refused


def _problem(error: Exception, told: RequestInfo) -> dict[str, Any]:
    described = describe(error)
    if described is None:
        log_failure(told)
    return described[0] if described else internal_problem()


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    return None if task.cancelled() else task.exception()


async def send_body(send: Send, scope: Scope, body: bytes, timeout_s: float, more: bool = False) -> bool:
    """Send a body, or with `more` a part of one, as fast as the client takes it.

    False where the client has gone. False, and the connection is cut off, when that takes longer than `timeout_s` and
    SLOWEST_BYTES_PER_S allow. (An exception would say so as well, but a task that ends with one that came from asyncio.timeout is part of a
    reference cycle, and so is what it has sent.)
    """
    if CONNECTION in scope and scope[CONNECTION].gone:
        return False
    if len(body) <= PIECE_BYTES and not more:
        await send({"type": "http.response.body", "body": body})
        return True
    try:
        async with asyncio.timeout(timeout_s + len(body) / SLOWEST_BYTES_PER_S):
            for begin in range(0, len(body), PIECE_BYTES):
                piece, end = body[begin : begin + PIECE_BYTES], begin + PIECE_BYTES >= len(body)
                await send({"type": "http.response.body", "body": piece, "more_body": more or not end})
    except TimeoutError:
        if CONNECTION in scope:
            scope[CONNECTION].cut_off()
        return False
    return True


async def parsed(content: bytes) -> RetrieveRequest:
    """A body as a request. Raises InvalidRequest.

    Large ones one after the other: the parser keeps the interpreter while it works, and what it makes of a body is larger than the body.
    """
    if len(content) <= INLINE_BYTES:
        return parse(RetrieveRequest, content)
    if (parts := content.count(b"{") + content.count(b"[")) > MAX_PARTS:
        raise InvalidRequest([InvalidInput("body", f"{parts} objects and lists", f"at most {MAX_PARTS}")])
    return await asyncio.get_running_loop().run_in_executor(_parser, parse, RetrieveRequest, content)


def chosen(request: RetrieveRequest, settings: Settings, registry: Registry, info: RequestInfo) -> LoadedModel:
    """The model that a request means, by which it is then checked; noted in `info` for the log and the metrics."""
    model = registry.choose(request.model, request.version)
    info.model, info.version, info.queries = model.name, model.version, len(request.queries)
    check(request, model, settings)
    return model


async def answer(
    request: RetrieveRequest,
    model: LoadedModel,
    settings: Settings,
    metrics: Metrics,
    info: RequestInfo,
    began: float,
    patient: bool = False,
) -> Retrieved:
    """Answer a request that has been checked, and note in `info` what the log and the metrics want to know."""
    timeout_ms = settings.timeout_ms if request.timeout_ms is None else request.timeout_ms
    try:
        if not patient:
            model.batcher.check_room(len(request.queries))
        retrieved = await retrieve(request, model, settings, began, began + timeout_ms / 1e3, patient)
    except QueueFull:
        metrics.shed(model.name)
        raise
    except DeadlinePassed:
        info.own_deadline = timeout_ms < settings.timeout_ms
        raise
    info.m, info.beam_size, info.stages_ms = retrieved.m, retrieved.beam_size, retrieved.stages_ms
    return retrieved


class _WhileConnected:
    """Cancels what runs inside when the client hangs up, and raises ClientGone instead."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._cancelled = False
        self._hung_up: asyncio.Future[Message] | None = None
        self._begin = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._watch)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._begin.cancel()
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
