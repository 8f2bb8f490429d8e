"""POST /models/{name}/items: many writes in one request, a line each; each line out says what became of one, in the same order.

An ASGI application of its own, because it reads and writes at the same time. Knows lines. Does not know how operations are stored.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from espalier.errors import EspalierError
from espalier.items import MAX_ID_BYTES

from ..errors import BodyTooLarge, Busy, QueueFull, SlowBody
from ..http.connection import CONNECTION
from ..http.dependencies import Service
from ..http.direct import item_path
from ..http.item_bodies import ItemReader
from ..http.live_routes import WriteRoute, status_of
from ..http.memory_budget import Budget, Held
from ..http.middleware import RequestInfo, problem_of
from ..http.request_bodies import LINES_TYPES, check_type, parsed, read_lines
from ..http.retrieve_route import read_and_write, send_body, until_hung_up
from ..live.catalogue import LiveCatalogue
from ..live.catalogue_types import Delete, Outcome, Put
from ..watch.audit import origin

GROUP_LINES = 256
"""Most lines of one commit. As many wait for it, and no more are read."""
GROUP_S = 0.005
"""How long the first line of a commit waits for others."""
TURN_LINES = 16
"""Lines of one request that are parsed before others have their turn."""


class Line(NamedTuple):
    """A line that was read.

    id     of its item; None where that cannot be read
    what   its operation, or why it has none
    size   bytes that it holds of the budget
    began  when it was read
    """

    id: str | None
    what: Put | Delete | Exception
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
        check_type(info.content_type, LINES_TYPES)
        info.model, _ = item_path(scope)
        self.keys.admit(info.key, info.model, "write")
        catalogue, reader = self.catalogue(info.model), self.reader(info.model)
        with Held(self._slots) as slot:
            if not slot.take(1):
                self.refused(info.model, QueueFull.status)
                raise QueueFull(f"{self._slots.units} bulk requests are being read already (ESPALIER_MAX_BULK).", 1)
            await self._answer(_Bulk(self, scope, reader, catalogue, slot), info, receive, send)

    async def _answer(self, bulk: _Bulk, info: RequestInfo, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/x-ndjson")]})
        try:
            await read_and_write(bulk.read(receive), bulk.write(send), info)
        finally:
            await bulk.committed()
            bulk.close()
            self.audit.bulk(info.model, origin(bulk.scope, info.request_id.decode(), info.key_name), bulk.statuses)


class _Bulk:
    """The lines of one request: read, committed in groups, answered.

    slot      given back before the end of the answer, at which its client may send the next bulk
    statuses  how many lines were answered with each
    """

    def __init__(self, route: BulkRoute, scope: Scope, reader: ItemReader, catalogue: LiveCatalogue, slot: Held) -> None:
        self._route, self.scope, self._reader, self._catalogue, self._slot = route, scope, reader, catalogue, slot
        self._info: RequestInfo = scope[RequestInfo.KEY]
        self._arriving, self._memory = Held(route.bodies), Held(route.bodies)
        self._queue: asyncio.Queue[Line | None] = asyncio.Queue(GROUP_LINES)
        self.statuses: Counter[int] = Counter()
        self._committing: asyncio.Future[Sequence[Outcome | EspalierError]] | None = None

    async def read(self, receive: Receive) -> None:
        """Parse each line as it arrives, then watch for a client that hangs up. Only ends by an exception."""
        settings = self._route.settings
        number = 0
        try:
            async for content in read_lines(receive, settings.max_body_bytes, settings.stream_idle_s, self._arriving):
                await self._queue.put(await self._line(content))
                number += 1
                if number % TURN_LINES == 0:
                    await asyncio.sleep(0)
        except (SlowBody, Busy) as error:
            await self._queue.put(Line(None, error, 0, time.perf_counter()))
        await self._queue.put(None)
        await until_hung_up(receive)

    async def write(self, send: Send) -> None:
        """Commit the lines in groups and send what became of them, as long as the client takes it."""
        more = True
        while more:
            lines, more = await self._group()
            answers = await self._committed(lines)
            self._memory.give(sum(line.size for line in lines))
            if answers and not await send_body(send, self.scope, b"".join(answers), self._route.settings.stream_idle_s, more=True):
                return
        self._slot.give(1)
        await send({"type": "http.response.body", "body": b""})

    async def committed(self) -> None:
        """Wait for what was handed to the catalogue, which finishes it although the client has gone: till then it counts as a bulk."""
        if self._committing is not None:
            await asyncio.wait((self._committing,))

    def close(self) -> None:
        """Give back the memory of lines that were not answered."""
        self._arriving.__exit__()
        self._memory.__exit__()

    async def _line(self, content: bytes | BodyTooLarge) -> Line:
        began = time.perf_counter()
        if isinstance(content, BodyTooLarge):
            return Line(None, content, 0, began)
        most = self._route.settings.max_body_bytes
        if not await self._memory.wait(len(content), most, self._gone):
            if self._gone():
                raise ClientDisconnect
            return Line(None, QueueFull("Too many bulk requests wait for room.", 1), 0, began)
        try:
            operation = await parsed(content, self._reader.line)
        except EspalierError as error:
            return Line(_id_of(content), error, len(content), began)
        return Line(operation.id, operation, len(content), began)

    async def _group(self) -> tuple[list[Line], bool]:
        """The lines of the next commit, and whether more may follow."""
        lines: list[Line] = []
        until = None
        while len(lines) < GROUP_LINES:
            try:
                line = self._queue.get_nowait()
            except asyncio.QueueEmpty:
                try:
                    async with asyncio.timeout_at(until):
                        line = await self._queue.get()
                except TimeoutError:
                    break
            if line is None:
                return lines, False
            lines.append(line)
            until = until or asyncio.get_running_loop().time() + GROUP_S
        return lines, True

    async def _committed(self, lines: list[Line]) -> list[bytes]:
        """What became of each line, as JSON."""
        operations = [line.what for line in lines if not isinstance(line.what, Exception)]
        outcomes: Sequence[Outcome | EspalierError] = ()
        if operations:
            try:
                self._committing = asyncio.ensure_future(self._catalogue.bulk(operations))
                outcomes = await asyncio.shield(self._committing)
            except EspalierError as error:
                outcomes = [error] * len(operations)
        found = iter(outcomes)
        return [self._answer(line, line.what if isinstance(line.what, Exception) else next(found)) for line in lines]

    def _answer(self, line: Line, outcome: Outcome | Exception) -> bytes:
        if isinstance(outcome, Outcome):
            answer: dict[str, Any] = {"id": line.id, "status": status_of(outcome), "sequence": outcome.sequence, "outcome": outcome.outcome}
            if outcome.unknown:
                answer["unknown"] = outcome.unknown
            self._route.visible(self._info.model, outcome, line.began)
        else:
            answer = {"id": line.id} | problem_of(outcome, self._info)[0]
            self._route.refused(self._info.model, answer["status"])
        self.statuses[answer["status"]] += 1
        return orjson.dumps(answer, option=orjson.OPT_APPEND_NEWLINE)

    def _gone(self) -> bool:
        return CONNECTION in self.scope and self.scope[CONNECTION].gone


def _id_of(content: bytes) -> str | None:
    """The id of a line that is wrong otherwise, so that its sender knows which item it was."""
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    item_id = found.get("id") if isinstance(found, dict) else None
    return item_id if isinstance(item_id, str) and len(item_id) <= MAX_ID_BYTES else None
