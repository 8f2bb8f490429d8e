"""POST /models/{name}/items: many writes in one request, one a line. Each line of the answer is the outcome of a write, in the same order.

An ASGI application of its own, because it reads and writes at the same time. Knows lines. Does not know how operations are stored.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson
from starlette.types import Receive, Scope, Send

from espalier.errors import EspalierError
from espalier.items import MAX_ID_BYTES

from ..errors import Denied, QueueFull, ServiceError
from ..http.api_keys import may_use
from ..http.dependencies import Service
from ..http.item_bodies import ItemReader
from ..http.live_routes import WriteRoute, status_of
from ..http.memory_budget import Budget, Reservation
from ..http.middleware import RequestInfo, problem_of
from ..http.request_bodies import LINES_TYPES, check_head, parse_body, read_entries
from ..http.retrieve_route import read_and_write, reserve, send_body
from ..live.catalogue import LiveCatalogue
from ..live.catalogue_types import Delete, ItemOutcome, Put
from ..watch.audit import origin

GROUP_LINES = 256
"""Most lines of one commit. At most as many wait for the next commit; until then no more are read."""
GROUP_S = 0.005
"""Time for which the first line of a commit waits for more lines."""


class Line(NamedTuple):
    """A line of the request.

    id         of its item; None if the id cannot be read
    operation  the line's operation, or the error in the line
    size       bytes that it takes of the budget
    began      when it was read
    """

    id: str | None
    operation: Put | Delete | Exception
    size: int
    began: float


class BulkRoute(WriteRoute):
    """See the file's docstring. At most `max_bulk` requests are read at a time."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.audit, self._slots = service.audit, Budget(self.settings.max_bulk, 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        info: RequestInfo = scope[RequestInfo.KEY]
        info.key = self.keys.check("write", info.authorization)
        info.model = scope["path_params"]["name"]
        self.keys.admit(info.key, info.model, "write")
        catalogue = self.catalogue(info.model)
        check_head(scope, info.content_type, LINES_TYPES)
        reader = self.reader(info.model)
        with Reservation(self._slots) as slot, Reservation(self.bodies) as partial_line, Reservation(self.bodies) as line_memory:
            if not slot.take(1):
                self.refused(info.model, QueueFull.status)
                raise QueueFull(f"{self._slots.units} bulk requests are being read already (ESPALIER_MAX_BULK).", 1)
            bulk = _Bulk(self, scope, reader, catalogue, slot, line_memory)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/x-ndjson")]})
            try:
                read = read_entries(receive, self.settings, partial_line, bulk.line_of, bulk.queue, bulk.check_key)
                await read_and_write(read, bulk.write(send), info)
            finally:
                await bulk.wait_for_commit()
                self.audit.bulk(info.model, origin(scope, info.request_id.decode(), info.key_name), bulk.statuses)


class _Bulk:
    """The lines of one request, from reading through commits to answers.

    slot         given back before the end of the answer, because the client may then send its next bulk
    line_memory  counts the bytes of the lines that have not been answered
    queue        the lines that wait for a commit
    statuses     number of lines by status of their answers
    """

    def __init__(
        self,
        route: BulkRoute,
        scope: Scope,
        reader: ItemReader,
        catalogue: LiveCatalogue,
        slot: Reservation,
        line_memory: Reservation,
    ) -> None:
        self._route, self._scope, self._reader, self._catalogue, self._slot = route, scope, reader, catalogue, slot
        self._info: RequestInfo = scope[RequestInfo.KEY]
        self._line_memory = line_memory
        self.queue: asyncio.Queue[Line | None] = asyncio.Queue(GROUP_LINES)
        self.statuses: Counter[int] = Counter()
        self._commit_future: asyncio.Future[Sequence[ItemOutcome | EspalierError]] | None = None

    async def write(self, send: Send) -> None:
        """Commit the lines in groups and send their outcomes, as long as the client reads them."""
        more = True
        while more:
            lines, more = await self._group()
            answers = await self._commit(lines)
            self._line_memory.give(sum(line.size for line in lines))
            if answers and not await send_body(send, self._scope, b"".join(answers), self._route.settings.stream_idle_s, more=True):
                return
        self._slot.give(1)
        await send({"type": "http.response.body", "body": b""})

    async def wait_for_commit(self) -> None:
        """Wait for the current commit. The catalogue finishes it even if the client has gone, and until then the request keeps its slot."""
        if self._commit_future is not None:
            await asyncio.wait((self._commit_future,))

    def check_key(self) -> None:
        """The key may have changed, expired or been removed since the last line. Raises Denied."""
        self._info.key = self._route.keys.check_again("write", self._info.authorization, self._info.key)
        may_use(self._info.key, self._info.model, "write")

    async def line_of(self, content: bytes | ServiceError) -> Line:
        """A parsed line, once there is memory for it."""
        began = time.perf_counter()
        if isinstance(content, ServiceError):
            if isinstance(content, Denied):
                self._route.audit.denied(self._scope, self._info.request_id.decode(), content)
            return Line(None, content, 0, began)
        try:
            await reserve(self._line_memory, len(content), self._route.settings.max_body_bytes, self._scope)
        except QueueFull as error:
            return Line(None, error, 0, began)
        try:
            operation = await parse_body(content, self._reader.line)
        except EspalierError as error:
            return Line(_id_of(content), error, len(content), began)
        return Line(operation.id, operation, len(content), began)

    async def _group(self) -> tuple[list[Line], bool]:
        """(lines of the next commit, whether more lines may follow)."""
        lines: list[Line] = []
        commit_at = None
        while len(lines) < GROUP_LINES:
            try:
                line = self.queue.get_nowait()
            except asyncio.QueueEmpty:
                try:
                    async with asyncio.timeout_at(commit_at):
                        line = await self.queue.get()
                except TimeoutError:
                    break
            if line is None:
                return lines, False
            lines.append(line)
            commit_at = commit_at or asyncio.get_running_loop().time() + GROUP_S
        return lines, True

    async def _commit(self, lines: list[Line]) -> list[bytes]:
        """Commit the operations of some lines. Returns the JSON of each line's outcome."""
        operations = [line.operation for line in lines if not isinstance(line.operation, Exception)]
        outcomes: Sequence[ItemOutcome | EspalierError] = ()
        if operations:
            try:
                self._commit_future = asyncio.ensure_future(self._catalogue.bulk(operations))
                outcomes = await asyncio.shield(self._commit_future)
            except EspalierError as error:
                outcomes = [error] * len(operations)
        remaining_outcomes = iter(outcomes)
        return [self._answer(line, line.operation if isinstance(line.operation, Exception) else next(remaining_outcomes)) for line in lines]

    def _answer(self, line: Line, outcome: ItemOutcome | Exception) -> bytes:
        if isinstance(outcome, ItemOutcome):
            answer: dict[str, Any] = {"id": line.id, "status": status_of(outcome), "sequence": outcome.sequence, "outcome": outcome.outcome}
            if outcome.unknown:
                answer["unknown"] = outcome.unknown
            self._route.visible(self._info.model, outcome, line.began)
        else:
            answer = {"id": line.id} | problem_of(outcome, self._info)[0]
            self._route.refused(self._info.model, answer["status"])
        self.statuses[answer["status"]] += 1
        return orjson.dumps(answer, option=orjson.OPT_APPEND_NEWLINE)


def _id_of(content: bytes) -> str | None:
    """The id of a faulty line, so that the client knows its item; None if it has none."""
    try:
        document = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    item_id = document.get("id") if isinstance(document, dict) else None
    return item_id if isinstance(item_id, str) and len(item_id) <= MAX_ID_BYTES else None
