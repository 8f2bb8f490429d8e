"""The transport by HTTP/1.1: persistent connections with one exchange at a time, and only the features that shard services use.

A router sends every query to every shard, so that an exchange must cost microseconds; general clients take half a millisecond. Bodies have
a Content-Length in both directions. Chunked answers are refused; redirects, cookies and compression are not supported.

`dns+http://NAME:PORT` stands for all addresses of a name, such as those of a headless Service of Kubernetes.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

from espalier.shards.messages import MEDIA_TYPE, Pin

from ..router.config import DNS, RouterConfig
from ..router.transport import ReplicaFailed, answer_body, parse_shard_list
from ..tls import Certificates, calling

MAX_HEAD_BYTES = 1 << 14
"""Largest head of an answer."""
IDLE_S = 30.0
"""A connection that was idle for longer is not used again: the server may be closing it."""
_BEGIN = b"HTTP/1."
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)[ \r]")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,12})[ \t]*\r\n", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection:[ \t]*close[ \t]*\r\n", re.IGNORECASE)
SEARCH, SHARDS = "/internal/search", "/internal/shards"
MAX_LIST_BYTES = 2 << 20
"""Largest list of a replica's shards. Reading it delays searches."""
_NOT_IN_HEADERS = re.compile(r"[^\x21-\x7e]")


class _Broken(Exception):
    """The connection ended. answered: whether part of the answer had arrived."""

    def __init__(self, answered: bool) -> None:
        super().__init__()
        self.answered = answered


class Connection(asyncio.Protocol):
    """One connection. closed: it takes no more exchanges."""

    def __init__(self) -> None:
        self.closed, self.used_at = False, 0.0
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._received = bytearray()
        self._begin, self._end, self._status = 0, 0, 0  # of the body, once the head has arrived
        self._max_bytes = 0

    async def exchange(self, head: bytes, body: bytes, max_bytes: int) -> tuple[int, bytes]:
        """Send a request; returns the status and the body of its answer. Cancelling ends the connection. Raises _Broken, ReplicaFailed.

        max_bytes  of the answer's body
        """
        if self.closed or self._transport is None:
            raise _Broken(answered=False)
        self._answer = asyncio.get_running_loop().create_future()
        self._received, self._end, self._max_bytes = bytearray(), 0, max_bytes
        self._transport.write(head + body)
        try:
            return await self._answer
        except BaseException:
            self.close()
            raise
        finally:
            self._answer = None
            self.used_at = time.monotonic()

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(_Broken(answered=bool(self._received)))

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():  # an answer without a request
            self.close()
            return
        self._received += data
        try:
            if not self._end:
                self._read_head()
        except ReplicaFailed as error:
            self._answer.set_exception(error)
            return
        if self._end and len(self._received) >= self._end:
            if len(self._received) > self._end:
                self.closed = True
            self._answer.set_result((self._status, bytes(memoryview(self._received)[self._begin : self._end])))

    def _read_head(self) -> None:
        """Parse the head once it has arrived: the status, and where the body begins and ends. Raises ReplicaFailed."""
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            if len(self._received) > MAX_HEAD_BYTES:
                raise ReplicaFailed("garbage", f"the head of an answer has more than {MAX_HEAD_BYTES} bytes")
            if not _BEGIN.startswith(self._received[: len(_BEGIN)]):  # the end of a head may never come
                raise ReplicaFailed("garbage", f"an HTTP/1.1 answer was expected: {bytes(self._received[:100])!r}")
            return
        head = bytes(self._received[: end + 2])
        status, length = _STATUS.match(head), _LENGTH.search(head)
        if status is None or length is None or int(length[1]) > self._max_bytes:
            limit = self._max_bytes
            raise ReplicaFailed("garbage", f"an HTTP/1.1 answer with a Content-Length of at most {limit} was expected: {head[:100]!r}")
        self._status, self._begin = int(status[1]), end + 4
        self._end = self._begin + int(length[1])
        self.closed = self.closed or _CLOSES.search(head) is not None


class Connections:
    """The connections to one address, http://HOST:PORT/PATH or https://.

    limit  most searches under way. Polls have no limit: a busy replica still answers them
    name   the name that the certificate of the address must have; None: the host. It may change
    """

    def __init__(self, address: str, limit: int, connect_timeout_s: float, certificates: Certificates) -> None:
        url = urlsplit(address)
        self._host, self._certificates = url.hostname or "", certificates if url.scheme == "https" else None
        self.name: str | None = None
        self._port = url.port or (80 if self._certificates is None else 443)
        self._path, self._host_header = url.path.rstrip("/"), url.netloc
        self._limit, self._connect_timeout_s = limit, connect_timeout_s
        self._idle: deque[Connection] = deque()
        self._searches = 0

    def head(self, method: str, path: str, size: int, lines: str) -> bytes:
        """The head of a request. lines: other headers, each with its line end."""
        return f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._host_header}\r\nContent-Length: {size}\r\n{lines}\r\n".encode(
            "latin-1"
        )

    async def search(self, head: bytes, body: bytes, max_bytes: int) -> tuple[int, bytes]:
        """An exchange that counts towards the limit. Raises ReplicaFailed."""
        if self._searches >= self._limit:
            raise ReplicaFailed("full", f"{self._limit} exchanges are under way")
        self._searches += 1
        try:
            return await self.exchange(head, body, max_bytes)
        finally:
            self._searches -= 1

    async def exchange(self, head: bytes, body: bytes, max_bytes: int) -> tuple[int, bytes]:
        """The status and the body of an answer. Raises ReplicaFailed.

        If an idle connection ends without a byte of the answer, the server closed it before the request arrived: the request is sent again.
        """
        while True:
            connection, is_new = await self._connect()
            try:
                answer = await connection.exchange(head, body, max_bytes)
            except _Broken as error:
                if is_new or error.answered:
                    raise ReplicaFailed("connection", "the connection broke") from None
                continue
            if connection.closed:
                connection.close()
            else:
                self._idle.append(connection)
            return answer

    async def _connect(self) -> tuple[Connection, bool]:
        """A connection, and whether it is new. Raises ReplicaFailed."""
        while self._idle:
            connection = self._idle.pop()  # the one that was used most recently
            if not connection.closed and time.monotonic() - connection.used_at < IDLE_S:
                return connection, False
            connection.close()
        try:
            loop = asyncio.get_running_loop()
            context = None if self._certificates is None else self._certificates.current()  # whose files may take long to read
            name = None if context is None else self.name or self._host
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=context, server_hostname=name)
        except TimeoutError:
            raise ReplicaFailed("late", f"no connection within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            raise ReplicaFailed("connection", str(error.strerror or error)) from None
        except UnicodeError as error:  # the text is no valid name
            raise ReplicaFailed("connection", f"{self._host}: {error}") from None
        return connection, True

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()


class HttpTransport:
    """See `Transport`. For one event loop. certificates: for addresses with https; None: the system's CAs."""

    def __init__(self, config: RouterConfig, certificates: Certificates | None = None) -> None:
        self._config, self._certificates = config, certificates or calling(None, None, None)
        self._lines = f"Content-Type: {MEDIA_TYPE}\r\n"
        if config.key is not None:
            self._lines += f"Authorization: Bearer {config.key.get_secret_value()}\r\n"
        self._connections: dict[str, Connections] = {}
        self._listed: dict[str, tuple[str | None, list[str]]] = {}  # what `addresses` found for each name; last, what changed last
        self._names: dict[str, str | None] = {}  # address → the host of the last name in `_listed` that has it

    async def addresses(self, name: str) -> Sequence[str]:
        if not name.startswith(DNS):
            return (name,)
        url = urlsplit(name.removeprefix(DNS))
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            records = await asyncio.get_running_loop().getaddrinfo(url.hostname, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: the text is no valid name
            raise ReplicaFailed("connection", f"{name}: {error}") from None
        hosts = sorted({str(address[0]) for *_, address in records})
        addresses = [f"{url.scheme}://{f'[{host}]' if ':' in host else host}:{port}{url.path}" for host in hosts]
        if self._listed.get(name) != (listed := (url.hostname, addresses)):
            self._listed.pop(name, None)
            self._listed[name] = listed
            self._names |= {address: host for host, group in self._listed.values() for address in group}
        return addresses

    async def send(self, address: str, body: bytes, max_bytes: int, timeout_s: float, headers: Mapping[str, str]) -> bytes:
        lines = self._lines
        for header, value in headers.items():
            lines += f"{header}: {_NOT_IN_HEADERS.sub('', value)}\r\n"
        connections = self._connections_to(address)
        head = connections.head("POST", SEARCH, len(body), lines)
        return answer_body(*await _within(timeout_s, connections.search(head, body, max_bytes)))

    async def served_shards(self, address: str, timeout_s: float) -> frozenset[Pin]:
        connections = self._connections_to(address)
        head = connections.head("GET", SHARDS, 0, self._lines)
        return parse_shard_list(answer_body(*await _within(timeout_s, connections.exchange(head, b"", MAX_LIST_BYTES))))

    def forget(self, address: str) -> None:
        self._names.pop(address, None)
        if (connections := self._connections.pop(address, None)) is not None:
            connections.close()

    async def close(self) -> None:
        for connections in self._connections.values():
            connections.close()

    def _connections_to(self, address: str) -> Connections:
        if address not in self._connections:
            limits = self._config.connections, self._config.connect_timeout_s
            self._connections[address] = Connections(address, *limits, self._certificates)
        self._connections[address].name = self._names.get(address)  # another one, if another name has the address now
        return self._connections[address]


async def _within(timeout_s: float, exchange: Coroutine[Any, Any, tuple[int, bytes]]) -> tuple[int, bytes]:
    """An exchange within a time limit. Raises ReplicaFailed."""
    try:
        async with asyncio.timeout(max(timeout_s, 0)):
            return await exchange
    except TimeoutError:
        raise ReplicaFailed("late", f"no answer within {timeout_s:.3g} s") from None
