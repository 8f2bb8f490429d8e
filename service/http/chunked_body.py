"""Where a chunked body ends (RFC 9112, section 7.1), without looking at what is in it.

Knows chunk sizes. What a chunk holds, and whether it is well-formed, is the parser's.
"""

from __future__ import annotations

import re

MAX_LINE = 1024
"""Bytes of a chunk's size with its extensions, and of all trailers."""
SMALL_CHUNKS, SMALL_BYTES = 4096, 32
"""Chunks of a body that may be of any size, and the mean size that all of them must have: a chunk costs time, however small it is."""

_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}(?=[;\t \r\n])")


class MalformedChunk(Exception):
    """What should be a chunk's size is none, or too long."""


class ChunkedBody:
    """Follows one body through the bytes as they arrive.

    done   whether its last byte has been taken
    """

    def __init__(self) -> None:
        self.done = False
        self._left = 0  # of the current chunk, with the line end behind it
        self._line = b""  # the beginning of a size, or of trailers
        self._trailers = False
        self._chunks, self._bytes = 0, 0

    def take(self, data: bytes | bytearray) -> int:
        """How many bytes of `data`, which follow those taken before, are the body's. Raises MalformedChunk."""
        at, size = 0, len(data)
        while at < size and not self.done:
            if self._left:
                step = min(self._left, size - at)
                self._left -= step
                at += step
                continue
            end = data.find(b"\n", at, at + MAX_LINE + 1)
            self._line += data[at : size if end < 0 else end + 1]
            if len(self._line) > MAX_LINE:
                raise MalformedChunk(f"A chunk's size and extensions, or the trailers, have more than {MAX_LINE} bytes.")
            if end < 0:
                return size
            at = end + 1
            self._end_of_line()
        return at

    def _end_of_line(self) -> None:
        if self._trailers:
            self.done = self._line.endswith((b"\n\r\n", b"\n\n")) or self._line in (b"\r\n", b"\n")
            return
        found = _SIZE.match(self._line)
        if found is None:
            raise MalformedChunk("A chunk's size is no hexadecimal number.")
        self._left = int(found.group(), 16)
        self._line = b""
        self._chunks += 1
        self._bytes += self._left
        if self._chunks > SMALL_CHUNKS + self._bytes // SMALL_BYTES:
            raise MalformedChunk(f"The body has {self._chunks} chunks of less than {SMALL_BYTES} bytes on average.")
        if self._left:
            self._left += 2  # its line end
        else:
            self._trailers = True
