"""Reading and parsing of request bodies: whole, within limits of time and size, or line by line as they arrive.

Small bodies are parsed on the event loop, large ones in a thread. Knows ASGI messages and bytes. Does not know their meaning.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from espalier.errors import InvalidInput

from ..errors import BodyTooLarge, Busy, Denied, InvalidRequest, NotJson, ServiceError, SlowBody
from ..http.memory_budget import Reservation
from ..problems import invalid_body
from ..settings import Settings

JSON_TYPES = ("application/json",)
LINES_TYPES = ("application/x-ndjson", "application/jsonl", "application/json-lines")
TURN_LINES = 16
"""Lines of one piece of a body that are handled before other requests have their turn. (A piece may have very many empty lines.)"""
T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
INLINE_BYTES = 1 << 16
"""Bodies up to this size are parsed on the event loop. Larger ones go to a thread, so that other requests do not wait."""
MAX_CONTAINERS = 1 << 16
"""Most objects and lists in a large body. Each takes some hundred bytes and a microsecond, however short its text is."""
_parser = ThreadPoolExecutor(1, thread_name_prefix="parser")


def parameters_of(scope: Scope, known: Collection[str]) -> QueryParams:
    """The parameters in the address. Raises InvalidInput for one that the route does not have, and for one that comes twice."""
    given = QueryParams(scope["query_string"])
    for name, count in Counter(name for name, _ in given.multi_items()).items():
        if name not in known:
            raise InvalidInput(name, given[name], f"only the parameters {', '.join(known)}" if known else "no parameters in the address")
        if count > 1:
            raise InvalidInput(name, given.getlist(name), "one value")
    return given


def check_head(scope: Scope, media_type: bytes, accepted: Sequence[str]) -> None:
    """Raise NotJson unless the content type is one of `accepted`, InvalidInput if the address has parameters."""
    parameters_of(scope, ())
    media = media_type.partition(b";")[0].strip().lower().decode("latin-1")
    if media not in accepted:
        raise NotJson(f"Expected the content type {' or '.join(accepted)}, got {media or 'none'}.")


async def read_body(receive: Receive, timeout_s: float | None, memory: Reservation) -> bytes:
    """A whole body; `memory` counts its bytes. timeout_s: None if the body has arrived already, which saves a timer.

    Raises SlowBody after `timeout_s`, ClientDisconnect if the client hangs up before the end, Busy if the budget has no room.
    """
    chunks = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                body: bytes = message.get("body", b"")
                if not memory.take(len(body)):
                    raise _too_many_bodies()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                if not message.get("more_body", False):
                    return bytes(chunks + body) if chunks else body
                chunks += body
    except TimeoutError:
        raise SlowBody(f"The body did not arrive within {timeout_s:g} s.") from None


async def read_lines(receive: Receive, max_bytes: int, timeout_s: float, memory: Reservation) -> AsyncIterator[bytes | ServiceError]:
    """Yield the non-empty lines of a body as they arrive, without their line ends.

    max_bytes  most bytes of a line; a longer line is read to its end and yields BodyTooLarge
    timeout_s  longest time between two pieces of the body; after it, SlowBody is the last to be yielded
    memory     counts the bytes of an incomplete line; if its budget has no room, Busy is the last to be yielded
    Raises ClientDisconnect.
    """
    partial_line = bytearray()
    too_long = False
    more = True
    while more:
        try:
            async with asyncio.timeout(timeout_s):
                message = await receive()
        except TimeoutError:
            yield SlowBody(f"No part of the body arrived within {timeout_s:g} s.")
            return
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        *complete_lines, remainder = message.get("body", b"").split(b"\n")
        for number, line in enumerate(complete_lines, 1):
            if number % TURN_LINES == 0:
                await asyncio.sleep(0)
            if too_long or len(partial_line) + len(line) > max_bytes:
                yield _too_long(max_bytes)
            elif stripped := bytes(partial_line + line).strip():
                yield stripped
            memory.give(len(partial_line))
            partial_line.clear()
            too_long = False
        if too_long or len(partial_line) + len(remainder) > max_bytes:
            memory.give(len(partial_line))
            partial_line.clear()
            too_long = True
        elif not memory.take(len(remainder)):
            yield _too_many_bodies()
            return
        else:
            partial_line += remainder
    if too_long:
        yield _too_long(max_bytes)
    elif stripped := bytes(partial_line).strip():
        yield stripped


async def read_entries(
    receive: Receive,
    settings: Settings,
    memory: Reservation,
    entry_of: Callable[[bytes | ServiceError], Awaitable[T]],
    entries: asyncio.Queue[T | None],
    check_key: Callable[[], None],
) -> None:
    """Put what `entry_of` makes of each line into a queue, and None after the last; then wait for the client to hang up.

    check_key  is called before each line. The Denied that it raises takes the place of the line, which is then the last
    Reads no faster than the queue is emptied. Ends only by an exception: those of `read_lines` and `entry_of`.
    """
    async for line in read_lines(receive, settings.max_body_bytes, settings.stream_idle_s, memory):
        try:
            check_key()
        except Denied as error:
            await entries.put(await entry_of(error.with_traceback(None)))
            break
        await entries.put(await entry_of(line))
    await entries.put(None)
    await until_hung_up(receive)


async def until_hung_up(receive: Receive) -> None:
    """Raise ClientDisconnect when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


def _too_long(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The line has more than {max_bytes} bytes.")


def _too_many_bodies() -> Busy:
    return Busy("Too many large request bodies are being read.")


async def parse_body(content: bytes, parse: Callable[[bytes], T]) -> T:
    """The result of `parse` on a body. Raises the errors of `parse`, and InvalidRequest.

    Large bodies are parsed one after the other: the parser holds the interpreter lock, and its result is larger than the body.
    """
    if len(content) <= INLINE_BYTES:
        return parse(content)
    if (containers := content.count(b"{") + content.count(b"[")) > MAX_CONTAINERS:
        raise InvalidRequest([InvalidInput("body", f"{containers} objects and lists", f"at most {MAX_CONTAINERS}")])
    return await asyncio.get_running_loop().run_in_executor(_parser, parse, content)


def validate(kind: type[Body], content: bytes) -> Body:
    """A body as a `kind`. Raises InvalidRequest.

    pydantic reads the bytes directly: it refuses invalid JSON, names the field of a NaN, and takes a third of the time of parsing first.
    """
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise invalid_body(error, kind) from error
