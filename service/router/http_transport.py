"""Replicas by HTTP: services that hold shards, at URLs.

`dns+http://NAME:PORT` stands for all addresses of a name, as those of a headless Service of Kubernetes.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from espalier.shards.messages import MEDIA_TYPE, Pin
from service.router.config import DNS, RouterConfig
from service.router.connections import Connections
from service.router.transport import ReplicaFailed, answered, held_of

SEARCH, SHARDS = "/internal/search", "/internal/shards"
MAX_LIST_BYTES = 2 << 20
"""Largest list of a replica's shards: reading one holds up the searches."""
_NOT_IN_HEADERS = re.compile(r"[^\x21-\x7e]")


class HttpTransport:
    """See `Transport`. To be used in one event loop."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._lines = f"Content-Type: {MEDIA_TYPE}\r\n"
        if config.key is not None:
            self._lines += f"Authorization: Bearer {config.key.get_secret_value()}\r\n"
        self._connections: dict[str, Connections] = {}

    async def addresses(self, name: str) -> Sequence[str]:
        """See `Transport`."""
        if not name.startswith(DNS):
            return (name,)
        url = urlsplit(name.removeprefix(DNS))
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(url.hostname, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the latter of a name that cannot be one
            raise ReplicaFailed("connection", f"{name}: {error}") from None
        hosts = sorted({str(address[0]) for *_, address in found})
        return [f"{url.scheme}://{f'[{host}]' if ':' in host else host}:{port}{url.path}" for host in hosts]

    async def send(self, address: str, body: bytes, most: int, timeout_s: float, headers: Mapping[str, str]) -> bytes:
        """See `Transport`."""
        lines = self._lines
        for header, value in headers.items():
            lines += f"{header}: {_NOT_IN_HEADERS.sub('', value)}\r\n"
        connections = self._to(address)
        return answered(*await _in_time(timeout_s, connections, connections.head("POST", SEARCH, len(body), lines), body, most))

    async def held(self, address: str, timeout_s: float) -> frozenset[Pin]:
        """See `Transport`."""
        connections = self._to(address)
        head = connections.head("GET", SHARDS, 0, self._lines)
        return held_of(answered(*await _in_time(timeout_s, connections, head, b"", MAX_LIST_BYTES)))

    def forget(self, address: str) -> None:
        """See `Transport`."""
        if (connections := self._connections.pop(address, None)) is not None:
            connections.close()

    async def close(self) -> None:
        """See `Transport`."""
        for connections in self._connections.values():
            connections.close()

    def _to(self, address: str) -> Connections:
        found = self._connections.get(address)
        if found is None:
            made = Connections(address, self._config.connections, self._config.connect_timeout_s)
            found = self._connections[address] = made
        return found


async def _in_time(timeout_s: float, connections: Connections, head: bytes, body: bytes, most: int) -> tuple[int, bytes]:
    """An exchange that must end in time. Raises ReplicaFailed."""
    try:
        async with asyncio.timeout(max(timeout_s, 0)):
            return await connections.exchange(head, body, most)
    except TimeoutError:
        raise ReplicaFailed("late", f"no answer within {timeout_s:.3g} s") from None
