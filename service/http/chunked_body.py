"""Finds the end of a chunked body (RFC 9112, section 7.1) without reading its content.

Knows chunk sizes. Does not know the content of chunks, nor whether it is well-formed: the parser does.
"""

from __future__ import annotations

import re

MAX_LINE = 1024
"""Most bytes of a chunk's size with its extensions, and of all trailers together."""
SMALL_CHUNKS, SMALL_BYTES = 4096, 32
"""A body with more than SMALL_CHUNKS chunks must have at least SMALL_BYTES bytes for each further one: even small chunks take time."""

_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}(?=[;\t \r\n])")


class MalformedChunk(Exception):
    """The size line of a chunk is not a number, or too long; or the body has too many small chunks."""


class ChunkedBody:
    """Follows one body as its bytes arrive.

    done  whether its last byte has been taken
    """

    def __init__(self) -> None:
        self.done = False
        self._chunk_left = 0  # bytes left of the current chunk, including the line end after it
        self._line = b""  # the beginning of a size, or of trailers
        self._trailers = False
        self._chunks, self._bytes = 0, 0

    def take(self, data: bytes | bytearray) -> int:
        """The number of leading bytes of `data`, the next received bytes, that belong to the body. Raises MalformedChunk."""
        at, size = 0, len(data)
        while at < size and not self.done:
            if self._chunk_left:
                step = min(self._chunk_left, size - at)
                self._chunk_left -= step
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
        size_match = _SIZE.match(self._line)
        if size_match is None:
            raise MalformedChunk("A chunk's size is no hexadecimal number.")
        self._chunk_left = int(size_match.group(), 16)
        self._line = b""
        self._chunks += 1
        self._bytes += self._chunk_left
        if self._chunks > SMALL_CHUNKS + self._bytes // SMALL_BYTES:
            raise MalformedChunk(f"The body has {self._chunks} chunks of less than {SMALL_BYTES} bytes on average.")
        if self._chunk_left:
            self._chunk_left += 2  # its line end
        else:
            self._trailers = True
