"""A server of http.server in a thread, in place of another host; ports for servers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import NamedTuple

POLL_S = 0.01
"""Within it a server notices that it shall end; the library's half a second would be waited for in every test."""


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that the system gives to nobody else meanwhile, for servers that end and begin: it is bound, and nobody listens on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that servers, which set it too, may bind it
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


@contextmanager
def listening(server: TCPServer) -> Iterator[str]:
    """A server that serves in a thread; gives its address."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(POLL_S,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class Received(NamedTuple):
    """A request. headers: without regard to case."""

    method: str
    path: str
    headers: Message[str, str]
    body: bytes


class _Server(ThreadingHTTPServer):
    request_queue_size = 128


@contextmanager
def answering(answer: Callable[[Received], tuple[int, bytes] | None], port: int = 0, keep_alive: bool = True) -> Iterator[str]:
    """A server that answers each request with a status and a body; None closes the connection instead. Gives its address.

    keep_alive  else a connection has one request, and the end waits for the requests under way
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1" if keep_alive else "HTTP/1.0", True

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answered = answer(Received(self.command, self.path, self.headers, body))
            if answered is None:
                self.close_connection = True
                return
            status, content = answered
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_DELETE = do_POST = do_PUT = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing."""

    server = _Server(("127.0.0.1", port), Handler)
    server.daemon_threads = keep_alive
    with listening(server) as address:
        yield address
