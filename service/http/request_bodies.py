"""Request bodies as they arrive: read whole, within a time and a size, or line by line. JSON of any size, parsed.

Small bodies are parsed on the event loop, large ones in a thread. Knows ASGI messages and bytes. Does not know their meaning.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from espalier.errors import InvalidInput

from ..errors import BodyTooLarge, Busy, InvalidRequest, NotJson, ServiceError, SlowBody
from ..http.memory_budget import Held
from ..problems import invalid_body

JSON_TYPES = ("application/json",)
LINES_TYPES = ("application/x-ndjson", "application/jsonl", "application/json-lines")


TURN_LINES = 1024
"""Lines of one piece of a body that are looked at before other requests have their turn: most may be empty."""
T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
INLINE_BYTES = 1 << 16
"""Bodies up to this size are parsed on the event loop. Larger ones would keep other requests waiting, and go to a thread."""
MAX_NESTED = 1 << 16
"""Objects and lists in a body. Each takes some hundred bytes and a microsecond, however short its text is."""
_parser = ThreadPoolExecutor(1, thread_name_prefix="parser")


def check_type(media_type: bytes, accepted: Sequence[str]) -> None:
    """Raise NotJson unless a content type is one of `accepted`."""
    given = media_type.partition(b";")[0].strip().lower().decode("latin-1")
    if given not in accepted:
        raise NotJson(f"Expected the content type {' or '.join(accepted)}, got {given or 'none'}.")


async def read_body(receive: Receive, timeout_s: float | None, memory: Held) -> bytes:
    """A whole body; its bytes are counted in `memory`. timeout_s: None where the body has arrived already, which saves a timer.

    Raises SlowBody after `timeout_s`, ClientDisconnect when the client hangs up before the end, Busy when the budget has no room.
    """
    if timeout_s is None:
        return await _read(receive, memory)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, memory)
    except TimeoutError:
        raise SlowBody(f"The body did not arrive within {timeout_s:g} s.") from None


async def _read(receive: Receive, memory: Held) -> bytes:
    chunks = bytearray()
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


async def read_lines(receive: Receive, longest: int, timeout_s: float, memory: Held) -> AsyncIterator[bytes | ServiceError]:
    """The non-empty lines of a body as they arrive, without their line ends.

    longest    bytes of a line; a longer one is read to its end and comes as BodyTooLarge
    timeout_s  between two pieces of the body; then SlowBody comes last
    memory     counts the bytes of a line that has not arrived whole; when its budget has no room, Busy comes last
    Raises ClientDisconnect.
    """
    start = bytearray()  # of the line that has not arrived whole
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
        *whole, rest = message.get("body", b"").split(b"\n")
        for number, line in enumerate(whole, 1):
            if number % TURN_LINES == 0:
                await asyncio.sleep(0)
            if too_long or len(start) + len(line) > longest:
                yield _too_long(longest)
            elif stripped := bytes(start + line).strip():
                yield stripped
            memory.give(len(start))
            start.clear()
            too_long = False
        if too_long or len(start) + len(rest) > longest:
            memory.give(len(start))
            start.clear()
            too_long = True
        elif not memory.take(len(rest)):
            yield _too_many_bodies()
            return
        else:
            start += rest
    if too_long:
        yield _too_long(longest)
    elif stripped := bytes(start).strip():
        yield stripped


def _too_long(longest: int) -> BodyTooLarge:
    return BodyTooLarge(f"The line has more than {longest} bytes.")


def _too_many_bodies() -> Busy:
    return Busy("Too many large request bodies are being read.")


async def parsed(content: bytes, parse: Callable[[bytes], T]) -> T:
    """What `parse` makes of a body. Raises what it raises, and InvalidRequest.

    Large bodies are parsed one after the other: the parser keeps the interpreter while it works, and its result is larger than the body.
    """
    if len(content) <= INLINE_BYTES:
        return parse(content)
    if (nested := content.count(b"{") + content.count(b"[")) > MAX_NESTED:
        raise InvalidRequest([InvalidInput("body", f"{nested} objects and lists", f"at most {MAX_NESTED}")])
    return await asyncio.get_running_loop().run_in_executor(_parser, parse, content)


def validated(kind: type[Body], content: bytes) -> Body:
    """A body as a `kind`. Raises InvalidRequest.

    Straight from the bytes: that refuses what JSON refuses, names the field of a NaN, and takes a third of parsing first.
    """
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise invalid_body(error, kind) from error
