"""POST /retrieve/stream: each line of the request is a body of POST /retrieve, and the same line of the answer is its answer or problem.

An ASGI application of its own, because it reads and writes at the same time. routes.py documents it.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import NamedTuple

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ..batching.priority import Priority
from ..errors import ClientGone, Denied, KeyLimit, ServiceError
from ..http.key_limits import MIN_HELD_S
from ..http.memory_budget import Reservation
from ..http.middleware import RequestInfo, problem_of
from ..http.request_bodies import LINES_TYPES, check_head, parse_body, read_entries, validate
from ..http.retrieve_route import RetrievalRoute, read_and_write, reserve, send_body
from ..retrieval.request import CheckedRequest
from ..retrieval.schemas import RetrieveRequest


class StreamRoute(RetrievalRoute):
    """POST /retrieve/stream.

    At most `stream_window` lines are read ahead of the answers, and only as many as have memory for their answers. So a client that does
    not read, or a slow engine, slows down the reading of lines. A stream waits for room in the queue; a single request would be refused.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        info: RequestInfo = scope[RequestInfo.KEY]
        info.key = self.keys.check("retrieve", info.authorization)
        check_head(scope, info.content_type, LINES_TYPES)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/x-ndjson")]})
        with Reservation(self.bodies) as partial_line, Reservation(self.bodies) as line_memory, Reservation(self.answers) as answer_memory:
            lines = _Lines(self, scope, line_memory, answer_memory)
            read = read_entries(receive, self.settings, partial_line, lines.begin, lines.queue, lines.check_key)
            write, tasks = lines.write(send), lines.tasks
            del lines  # an exception holds this frame
            await read_and_write(read, write, info, tasks)

    async def line_answer(self, checked: CheckedRequest, info: RequestInfo) -> bytes:
        """The answer to one line, or its problem document.

        (Not of `_Lines`, which hold the task of this: the task holds the error that cancels it, and that error this frame.)
        """
        status = 200
        try:
            return (await self.answer(checked, info, time.perf_counter(), Priority.PATIENT)).body
        except asyncio.CancelledError:
            status = ClientGone.status
            raise
        except Exception as error:
            document, _ = problem_of(error, info)
            status = document["status"]
            return orjson.dumps(document)
        finally:
            self.metrics.request(info.model, status, None, info.by_client)


class _Pending(NamedTuple):
    """The answer to a line, the bytes of the line and the values of the answer."""

    answer: asyncio.Future[bytes]
    size: int
    values: int


class _Lines:
    """The lines of one stream, from reading to writing.

    line_memory    counts the bytes of the lines that have not been answered
    answer_memory  counts the values of their answers
    queue          the begun answers in the order of the lines
    tasks          the answers that have not been written
    """

    def __init__(self, route: StreamRoute, scope: Scope, line_memory: Reservation, answer_memory: Reservation) -> None:
        self._route, self._settings, self._scope = route, route.settings, scope
        self._info: RequestInfo = scope[RequestInfo.KEY]
        self._line_memory, self._answer_memory = line_memory, answer_memory
        self.queue: asyncio.Queue[_Pending | None] = asyncio.Queue(route.settings.stream_window)
        self.tasks: set[asyncio.Future[bytes]] = set()

    async def write(self, send: Send) -> None:
        """Send the answers in the order of the lines, as long as the client reads them."""
        while (pending := await self.queue.get()) is not None:
            line = await pending.answer + b"\n"
            self.tasks.discard(pending.answer)
            self._line_memory.give(pending.size)
            if not await send_body(send, self._scope, line, self._settings.stream_idle_s, more=True):
                return
            self._answer_memory.give(pending.values)
        await send({"type": "http.response.body", "body": b""})

    def check_key(self) -> None:
        """The key may have changed, expired or been removed since the last line. Raises Denied."""
        self._info.key = self._route.keys.check_again("retrieve", self._info.authorization, self._info.key)

    async def begin(self, line: bytes | ServiceError) -> _Pending:
        """Begin to answer a line, once there is memory for it and its answer."""
        info, size, values = RequestInfo(time.perf_counter(), self._info.request_id), 0, 0
        info.key, info.user, info.group = self._info.key, self._info.user, self._info.group
        if isinstance(line, ServiceError):
            task = self._refusal(line, info)
        else:
            try:
                await self._count(info)
                size = await reserve(self._line_memory, len(line), self._settings.max_body_bytes, self._scope)
                checked = self._route.check(await parse_body(line, partial(validate, RetrieveRequest)), info)
                values = await reserve(self._answer_memory, checked.answer_values, self._settings.max_answer_values, self._scope)
                task = asyncio.create_task(self._route.line_answer(checked, info))
            except ClientDisconnect:
                raise
            except Exception as error:
                task = self._refusal(error, info)
        self.tasks.add(task)
        return _Pending(task, size, values)

    async def _count(self, info: RequestInfo) -> None:
        """Count a line of a key. Raises KeyLimit, later, to slow down a stream that exceeds the limits."""
        try:
            self._route.count_request(info)
        except KeyLimit:
            await asyncio.sleep(MIN_HELD_S)
            raise

    def _refusal(self, error: Exception, info: RequestInfo) -> asyncio.Future[bytes]:
        """The problem document of a line whose search cannot begin, as a finished future."""
        if isinstance(error, Denied):
            self._route.audit.denied(self._scope, info.request_id.decode(), error)
        document, _ = problem_of(error, info)
        self._route.metrics.request(info.model, document["status"], None)
        document_future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        document_future.set_result(orjson.dumps(document))
        return document_future
