"""JSON bodies of any size: small ones are parsed on the event loop, large ones in a thread. Knows bytes, not what they mean."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from espalier.errors import InvalidInput
from service.errors import InvalidRequest

T = TypeVar("T")

INLINE_BYTES = 1 << 16
"""Bodies up to this size are parsed on the event loop. Larger ones would keep other requests waiting, and go to a thread."""
MAX_NESTED = 1 << 16
"""Objects and lists in a body. Each takes some hundred bytes and a microsecond, however short its text is."""

_parser = ThreadPoolExecutor(1, thread_name_prefix="parser")


async def parsed(content: bytes, parse: Callable[[bytes], T]) -> T:
    """What `parse` makes of a body. Raises what it raises, and InvalidRequest.

    Large bodies are parsed one after the other: the parser keeps the interpreter while it works, and its result is larger than the body.
    """
    if len(content) <= INLINE_BYTES:
        return parse(content)
    if (nested := content.count(b"{") + content.count(b"[")) > MAX_NESTED:
        raise InvalidRequest([InvalidInput("body", f"{nested} objects and lists", f"at most {MAX_NESTED}")])
    return await asyncio.get_running_loop().run_in_executor(_parser, parse, content)
