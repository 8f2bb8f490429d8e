"""A service on a real socket, inside the test's process, and raw connections to it."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espalier.bundle import Bundle
from espalier.search import Engine
from service.__main__ import listen
from service.app import create_app
from service.models.loading import EngineSource
from service.processes.server import Server
from service.settings import Settings
from tests.service.fake_engine import FakeEngine
from tests.service.running import PATIENT, Json
from tests.waiting import until

PATIENCE_S = 20.0


@dataclass
class Listening:
    """A service that listens; `engines` by model name; `admin`: the address of operators, if they have one."""

    address: tuple[str, int]
    server: Server
    app: Any
    engines: dict[str, FakeEngine] = field(default_factory=dict)
    admin: tuple[str, int] = ("", 0)

    @contextmanager
    def connected(
        self, receive_buffer: int = 0, tls: ssl.SSLContext | None = None, address: tuple[str, int] | None = None
    ) -> Iterator[Wire]:
        """A connection. A small receive buffer makes a client that does not read felt early. address: None for that of customers."""
        raw = socket.socket()
        if receive_buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.settimeout(PATIENCE_S)
        raw.connect(address or self.address)
        with raw if tls is None else tls.wrap_socket(raw, server_hostname="localhost") as made:
            yield Wire(made)

    def ask(self, request: bytes, tls: ssl.SSLContext | None = None, address: tuple[str, int] | None = None) -> Reply:
        """One request on a connection of its own."""
        with self.connected(0, tls, address) as wire:
            return wire.ask(request)

    def refused(self, reason: str) -> float:
        """How many connections were refused for a reason."""
        name = f'espalier_refused_connections_total{{reason="{reason}"}} '
        text = self.app.state.service.metrics.render().decode()
        return float(next(line for line in text.splitlines() if line.startswith(name)).removeprefix(name))


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Json:
        document: Json = json.loads(self.body)
        return document

    @property
    def problem(self) -> Json:
        assert self.headers["content-type"] == "application/problem+json"
        assert self.document["status"] == self.status
        return self.document


class Wire:
    """A client that sends bytes, and reads answers one after the other."""

    def __init__(self, raw: socket.socket) -> None:
        self.raw, self.rest = raw, b""

    def send(self, data: bytes) -> None:
        self.raw.sendall(data)

    def ask(self, request: bytes) -> Reply:
        """Send, and read the next answer."""
        self.send(request)
        return self.reply()

    def reply(self) -> Reply:
        """The next answer. Raises EOFError where the connection ends before it."""
        while b"\r\n\r\n" not in self.rest:
            self.more()
        head, _, self.rest = self.rest.partition(b"\r\n\r\n")
        status_line, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        size = int(headers.get("content-length", 0))
        while len(self.rest) < size:
            self.more()
        body, self.rest = self.rest[:size], self.rest[size:]
        return Reply(int(status_line.split()[1]), headers, body)

    def ended(self) -> bool:
        """Whether the other side has closed, or reset, the connection; waits until it has."""
        try:
            while received := self.raw.recv(1 << 16):
                self.rest += received
        except ConnectionResetError:
            pass
        return True

    def more(self) -> None:
        """Read more into `rest`. Raises EOFError where the connection ends."""
        received = self.raw.recv(1 << 16)
        if not received:
            raise EOFError(f"the connection ended after {self.rest!r}")
        self.rest += received


@contextmanager
def listening(models: Path, engine: Callable[[Bundle], Engine] | None = None, **settings: Any) -> Iterator[Listening]:
    """A service with fake engines, or those that are given."""
    engines: dict[str, FakeEngine] = {}

    def open_fake(bundle: Bundle, device: str, name: str | None, threads: int, precision: str) -> Engine:
        if engine is not None:
            return engine(bundle)
        return engines.setdefault(bundle.manifest.name, FakeEngine(bundle.tree.item_count, bundle.tree.leaf_of_item))

    chosen = Settings(models=models, **PATIENT | {"drain_s": 1, "max_inline_us": 0} | settings)
    app = create_app(chosen, EngineSource(open_fake))
    server = Server(app, chosen)
    with ExitStack() as sockets:
        bound, *others = (sockets.enter_context(listen("127.0.0.1", 0)) for _ in range(1 + (chosen.admin_address is not None)))
        thread = threading.Thread(target=server.serve_on, args=(bound, *others), name="service")
        thread.start()
        try:
            until(lambda: server.started and app.state.service.registry.wait_until_loaded(0))
            at = [listening.getsockname() for listening in (bound, *others)]
            yield Listening(at[0], server, app, engines, at[-1])
        finally:
            for fake in engines.values():
                fake.go.set()
            server.leave()
            thread.join(PATIENCE_S)


def get(path: str, *headers: str) -> bytes:
    """A GET request."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: test", *headers, "", ""]).encode()


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A POST request of JSON."""
    lines = [f"POST {path} HTTP/1.1", "Host: test", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def retrieval(**body: Any) -> bytes:
    """A request of `books`."""
    return post("/retrieve", json.dumps({"model": "books", "queries": [{"history": ["item-1"]}], "m": 2} | body).encode())


def direct(running: Listening, path: str) -> Any:
    """The application that answers a POST to a path instead of the framework."""
    layer = running.app.middleware_stack
    while not hasattr(layer, "direct"):
        layer = layer.app
    return layer.direct["POST", path].application
