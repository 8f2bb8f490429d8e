"""Requests whose framing is wrong or ambiguous, other protocols, and requests that are odd and right.

Where two readers could disagree about where a request ends, what follows it may be taken for another request by one of them (request
smuggling). So a wrong message is refused, the connection ends, and nothing that follows is answered. RFC 9112 says which are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.http.chunked_body import MAX_LINE
from tests.service.listening import Listening, get, listening

ASK = b'{"model": "books", "queries": [{"history": []}], "m": 1}'
LIVEZ = get("/livez")
_HOST = b"Host: localhost\r\n"
_POST = b"POST /retrieve HTTP/1.1\r\n" + _HOST + b"Content-Type: application/json\r\n"
_CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n\r\n"
_CHUNK = b"%x\r\n" % len(ASK) + ASK + b"\r\n"


def _get(headers: bytes = b"", line: bytes = b"GET /livez HTTP/1.1") -> bytes:
    return line + b"\r\n" + _HOST + headers + b"\r\n"


def _sized(*lengths: bytes, body: bytes = ASK, extra: bytes = b"") -> bytes:
    return _POST + extra + b"".join(b"Content-Length: %s\r\n" % length for length in lengths) + b"\r\n" + body


_N = b"%d" % len(ASK)

WRONG: dict[str, bytes] = {
    # where a body ends
    "a length and chunks": _sized(_N, extra=b"Transfer-Encoding: chunked\r\n"),
    "chunks and a length": _POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + _CHUNK + b"0\r\n\r\n",
    "two lengths": _sized(_N, b"0"),
    "two lengths in one line": _sized(_N + b", 0"),
    "a negative length": _sized(b"-1"),
    "a length with a plus": _sized(b"+" + _N),
    "a length in hexadecimal": _sized(b"0x%x" % len(ASK)),
    "a length in letters": _sized(b"ten"),
    "an empty length": _sized(b""),
    "a length with a blank inside": _sized(b"5 6"),
    "a length of 2^64": _sized(b"18446744073709551616"),
    "a length of 2^64 and the right one": _sized(b"%d" % (2**64 + len(ASK))),
    "a length of a thousand digits": _sized(b"9" * 1000),
    "an unknown coding": _POST + b"Transfer-Encoding: xchunked\r\n\r\n" + _CHUNK + b"0\r\n\r\n",
    "chunked not last": _POST + b"Transfer-Encoding: chunked, identity\r\n\r\n" + _CHUNK + b"0\r\n\r\n",
    "a hidden coding": _POST + b"Transfer-Encoding: \x0bchunked\r\nContent-Length: 3\r\n\r\n" + _CHUNK + b"0\r\n\r\n",
    "a coding before a blank and a colon": _POST + b"Transfer-Encoding : chunked\r\n\r\n" + _CHUNK + b"0\r\n\r\n",
    # chunks
    "a chunk of 2^64": _CHUNKED + b"10000000000000000\r\n" + ASK,
    "a chunk of 2^64 and the right size": _CHUNKED + b"%x\r\n" % (2**64 + len(ASK)) + ASK + b"\r\n0\r\n\r\n",
    "a negative chunk": _CHUNKED + b"-1\r\n" + ASK,
    "a chunk without a size": _CHUNKED + b"\r\n" + ASK,
    "a chunk size in letters": _CHUNKED + b"xyz\r\n" + ASK,
    "a chunk size with 0x": _CHUNKED + b"0x%x\r\n" % len(ASK) + ASK + b"\r\n0\r\n\r\n",
    "a chunk longer than its size": _CHUNKED + b"3\r\n" + ASK + b"\r\n0\r\n\r\n",
    "a chunk without its end": _CHUNKED + b"%x\r\n" % len(ASK) + ASK + b"0\r\n\r\n",
    "a chunk extension without end": _CHUNKED + b"1;" + b"e" * 2 * MAX_LINE,
    # headers
    "a folded header": _get(b"X-Folded: one\r\n two\r\n"),
    "a header without a colon": _get(b"Nothing\r\n"),
    "a header without a name": _get(b": nothing\r\n"),
    "a blank before the colon": _get(b"X-Blank : one\r\n"),
    "a blank before the first header": b"GET /livez HTTP/1.1\r\n " + _HOST + b"\r\n",
    "NUL in a header": _get(b"X-Nul: a\0b\r\n"),
    "NUL in a name": _get(b"X-\0: a\r\n"),
    "a bare carriage return in a header": _get(b"X-Cr: a\rb\r\n"),
    "a control character in a name": _get(b"X-\x01: a\r\n"),
    "no host": b"GET /livez HTTP/1.1\r\n\r\n",
    "two hosts": _get(b"Host: example.com\r\n"),
    # request lines
    "NUL in the address": _get(line=b"GET /livez\0 HTTP/1.1"),
    "a blank in the address": _get(line=b"GET /livez x HTTP/1.1"),
    "an unknown method": _get(line=b"STEAL /livez HTTP/1.1"),
    "a method in small letters": _get(line=b"get /livez HTTP/1.1"),
    "no method": _get(line=b"/livez HTTP/1.1"),
    "HTTP/9.9": _get(line=b"GET /livez HTTP/9.9"),
    "HTTP/1.10": _get(line=b"GET /livez HTTP/1.10"),
    "http/1.1": _get(line=b"GET /livez http/1.1"),
    "HTTP/0.9": b"GET /livez\r\n",
    # others
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x12\4\0\0\0\0\0",
    "TLS": bytes.fromhex("16030100 c8010000 c4030300 00000000") + bytes(200),
    "SSH": b"SSH-2.0-OpenSSH_9.9\r\n",
    "SMTP": b"EHLO localhost\r\n",
    "noise": bytes(range(128, 256)) * 10,
}
"""Each is refused, the connection ends, and what follows is not answered."""

RIGHT: dict[str, tuple[bytes, list[int]]] = {
    "a body where none is meant": (_get(b"Content-Length: 5\r\n") + b"hello" + LIVEZ, [200, 200]),
    "a length with zeros before it": (_sized(b"000" + _N) + LIVEZ, [200, 200]),
    "chunks with extensions": (_CHUNKED + b"%x;a=b\r\n" % len(ASK) + ASK + b"\r\n0;c\r\n\r\n" + LIVEZ, [200, 200]),
    "chunks with trailers": (_CHUNKED + _CHUNK + b"0\r\nX-Trailer: y\r\n\r\n" + LIVEZ, [200, 200]),
    "chunks of one byte": (_CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in ASK) + b"0\r\n\r\n" + LIVEZ, [200, 200]),
    "a wish for HTTP/2": (_get(b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"), [200]),
    "lines before the request": (b"\r\n\r\n" + LIVEZ, [200]),
    "a coding in capitals": (_POST + b"Transfer-Encoding: Chunked\r\n\r\n" + _CHUNK + b"0\r\n\r\n", [200]),
    "HTTP/1.0": (_get(line=b"GET /livez HTTP/1.0"), [200]),
    "an empty header": (_get(b"X-Empty:\r\n"), [200]),
    "letters that are no ASCII": (_get(b"X-Letters: \xc3\xa4\xff\r\n"), [200]),
}
"""Each is answered with these statuses, in this order."""


@pytest.fixture(scope="module")
def service(models: Path) -> Iterator[Listening]:
    with listening(models) as running:
        yield running


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_message_is_refused_and_ends_the_connection(service: Listening, name: str) -> None:
    before = service.refused("malformed")
    with service.connected() as wire:
        reply = wire.ask(WRONG[name] + LIVEZ)
        assert reply.problem["status"] == 400
        assert wire.ended()
        assert wire.rest == b""
    assert service.refused("malformed") == before + 1


@pytest.mark.parametrize("name", RIGHT)
def test_an_odd_message_is_answered(service: Listening, name: str) -> None:
    data, statuses = RIGHT[name]
    with service.connected() as wire:
        wire.send(data)
        assert [wire.reply().status for _ in statuses] == statuses
