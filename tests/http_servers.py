"""A server of http.server in a thread, in place of another host; ports for servers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import TCPServer

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
