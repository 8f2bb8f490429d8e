"""The two routes that the framework does not see: POST /retrieve, because its layers would cost more than the work itself, and
POST /retrieve/stream, because it reads and writes at the same time.

Both are ASGI applications that raise what goes wrong; the Edge (middleware.py) answers it. routes.py documents them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from types import TracebackType

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from service.bodies import check_type, read_body, read_lines
from service.errors import ClientGone, DeadlinePassed, QueueFull, ServiceError, SlowBody, describe, internal_problem, parse
from service.middleware import JSON_TYPES, Seen, log_failure
from service.monitoring import Metrics
from service.registry import Registry
from service.retrieve import Retrieved, check, retrieve
from service.schemas import RetrieveRequest
from service.security import Keys
from service.settings import Settings

log = logging.getLogger(__name__)

LINES_TYPES = ("application/x-ndjson", "application/jsonl", "application/json-lines")
INLINE_BYTES = 1 << 16
"""Bodies up to this size are parsed on the event loop; larger ones would keep other requests waiting, and go to a thread."""
WATCH_AFTER_S = 0.002
"""A request that waits for longer than this is watched for a client that hangs up. Watching costs as much as parsing the body."""


class Retrieve:
    """POST /retrieve."""

    def __init__(self, settings: Settings, registry: Registry, keys: Keys, metrics: Metrics) -> None:
        self.settings, self.registry, self.keys, self.metrics = settings, registry, keys, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen: Seen = scope[Seen.KEY]
        self.keys.check("retrieve", seen.authorization)
        check_type(seen.content_type, JSON_TYPES)
        content = await read_body(receive, self.settings.body_timeout_s)
        request = await parsed(content)
        async with _WhileConnected(receive):
            retrieved = await answer(request, self.settings, self.registry, self.metrics, seen, seen.began)
        timing = ", ".join([f"{stage};dur={ms}" for stage, ms in retrieved.stages_ms.items()])
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(retrieved.body)),
            (b"server-timing", timing.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": retrieved.body})


class Stream:
    """POST /retrieve/stream: each line in is a body of POST /retrieve, each line out its answer or its problem, in the same order.

    At most `stream_window` lines are read ahead of the answers: a client that does not read, and an engine that is behind, hold the
    client's sending back. A stream waits for room in the queue, where a single request would be refused.
    """

    def __init__(self, settings: Settings, registry: Registry, keys: Keys, metrics: Metrics) -> None:
        self.settings, self.registry, self.keys, self.metrics = settings, registry, keys, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen: Seen = scope[Seen.KEY]
        self.keys.check("retrieve", seen.authorization)
        check_type(seen.content_type, LINES_TYPES)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/x-ndjson")]})
        waiting: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(self.settings.stream_window)
        tasks: set[asyncio.Task[bytes]] = set()
        reader = asyncio.create_task(self._read(receive, seen, waiting, tasks))
        writer = asyncio.create_task(_write(send, waiting, self.settings.stream_idle_s))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
            else:
                reader.result()  # it only ends by an exception
        except (ClientDisconnect, TimeoutError):
            log.debug("request %s: the client hung up inside its stream, or does not read it", seen.request_id.decode())
        finally:
            for task in (reader, writer, *tasks):
                task.cancel()
            await asyncio.gather(reader, writer, *tasks, return_exceptions=True)

    async def _read(
        self, receive: Receive, seen: Seen, waiting: asyncio.Queue[asyncio.Task[bytes] | None], tasks: set[asyncio.Task[bytes]]
    ) -> None:
        """Begin to answer each line as it comes; after the last one, None. Then watch for a client that hangs up."""

        async def begin(line: bytes | ServiceError) -> None:
            task = asyncio.create_task(self._answer(line, seen))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await waiting.put(task)

        try:
            async for line in read_lines(receive, self.settings.max_body_bytes, self.settings.stream_idle_s):
                await begin(line)
        except SlowBody as error:
            await begin(error)
        await waiting.put(None)
        while (await receive())["type"] != "http.disconnect":
            pass
        raise ClientDisconnect

    async def _answer(self, line: bytes | ServiceError, seen: Seen) -> bytes:
        """The answer to one line, or its problem document."""
        began = time.perf_counter()
        status, told = 200, Seen(began, seen.request_id)
        try:
            if isinstance(line, ServiceError):
                raise line
            return (await answer(await parsed(line), self.settings, self.registry, self.metrics, told, began, patient=True)).body
        except asyncio.CancelledError:
            status = ClientGone.status
            raise
        except Exception as error:
            described = describe(error)
            if described is None:
                log_failure(seen)
            document = described[0] if described else internal_problem()
            status = document["status"]
            return orjson.dumps(document)
        finally:
            self.metrics.request(told.model, status, None, told.own_deadline)


async def _write(send: Send, waiting: asyncio.Queue[asyncio.Task[bytes] | None], idle_s: float) -> None:
    """Send the answers in the order of the lines. Raises TimeoutError when nobody takes one for so long."""
    while (task := await waiting.get()) is not None:
        line = await task + b"\n"
        async with asyncio.timeout(idle_s):
            await send({"type": "http.response.body", "body": line, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def parsed(content: bytes) -> RetrieveRequest:
    """A body as a request. Raises InvalidRequest."""
    if len(content) <= INLINE_BYTES:
        return parse(RetrieveRequest, content)
    return await asyncio.to_thread(parse, RetrieveRequest, content)


async def answer(
    request: RetrieveRequest,
    settings: Settings,
    registry: Registry,
    metrics: Metrics,
    seen: Seen,
    began: float,
    patient: bool = False,
) -> Retrieved:
    """Answer a request on the model that it means, and note in `seen` what the log and the metrics want to know."""
    timeout_ms = settings.timeout_ms if request.timeout_ms is None else request.timeout_ms
    model = registry.choose(request.model, request.version)
    seen.model, seen.version, seen.queries = model.name, model.version, len(request.queries)
    check(request, model, settings)
    try:
        if not patient:
            model.batcher.check_room(len(request.queries))
        retrieved = await retrieve(request, model, settings, began, began + timeout_ms / 1e3, patient)
    except QueueFull:
        metrics.shed(model.name)
        raise
    except DeadlinePassed:
        seen.own_deadline = timeout_ms < settings.timeout_ms
        raise
    seen.m, seen.beam_size, seen.stages_ms = retrieved.m, retrieved.beam_size, retrieved.stages_ms
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
