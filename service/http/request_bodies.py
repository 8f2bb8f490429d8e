"""Request bodies as they arrive: one whole, within a time and a size, or line by line.

Knows ASGI messages and bytes. Does not know what they mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from service.errors import BodyTooLarge, Busy, NotJson, SlowBody
from service.http.memory_budget import Held


async def read_body(receive: Receive, timeout_s: float | None, room: Held) -> bytes:
    """A whole body, whose bytes are held in `room`. timeout_s: None where it has arrived already, and setting a timer would be in vain.

    Raises SlowBody when it takes longer than `timeout_s`, ClientDisconnect when the client hangs up before its end, Busy when the bodies
    that are being read take all the room.
    """
    if timeout_s is None:
        return await _read(receive, room)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, room)
    except TimeoutError:
        raise SlowBody(f"The body did not arrive within {timeout_s:g} s.") from None


async def _read(receive: Receive, room: Held) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    _hold(room, body)
    if message["type"] == "http.request" and not message.get("more_body", False):
        return body
    chunks = bytearray(body)
    while message["type"] == "http.request" and message.get("more_body", False):
        message = await receive()
        body = message.get("body", b"")
        _hold(room, body)
        chunks += body
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return bytes(chunks)


def _hold(room: Held, body: bytes) -> None:
    if not room.take(len(body)):
        raise Busy("Too many large request bodies are being read.")


async def read_lines(receive: Receive, longest: int, timeout_s: float, room: Held) -> AsyncIterator[bytes | BodyTooLarge]:
    """The lines of a body as they arrive, without their ends; empty ones are left out.

    longest    bytes of a line; a longer one is read to its end and comes as BodyTooLarge
    timeout_s  between two pieces of the body
    room       what has arrived of a line that is not whole is held there
    Raises SlowBody, ClientDisconnect, and Busy when what arrives in pieces takes all the room.
    """
    held = bytearray()
    too_long = False
    more = True
    while more:
        message = await _piece(receive, timeout_s)
        more = message.get("more_body", False)
        *whole, rest = message.get("body", b"").split(b"\n")
        for line in whole:
            if too_long or len(held) + len(line) > longest:
                yield _too_long(longest)
            elif stripped := bytes(held + line).strip():
                yield stripped
            room.give(len(held))
            held.clear()
            too_long = False
        if too_long or len(held) + len(rest) > longest:
            room.give(len(held))
            held.clear()
            too_long = True
        else:
            _hold(room, rest)
            held += rest
    if too_long:
        yield _too_long(longest)
    elif stripped := bytes(held).strip():
        yield stripped


def check_type(media_type: bytes, accepted: Sequence[str]) -> None:
    """Raise NotJson unless a content type is one of `accepted`."""
    given = media_type.partition(b";")[0].strip().lower().decode("latin-1")
    if given not in accepted:
        raise NotJson(f"Expected the content type {' or '.join(accepted)}, got {given or 'none'}.")


async def _piece(receive: Receive, timeout_s: float) -> Message:
    try:
        async with asyncio.timeout(timeout_s):
            message = await receive()
    except TimeoutError:
        raise SlowBody(f"No part of the body arrived within {timeout_s:g} s.") from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message


def _too_long(longest: int) -> BodyTooLarge:
    return BodyTooLarge(f"The line has more than {longest} bytes.")
