"""A server of http.server in a thread, in place of another host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import TCPServer

POLL_S = 0.01
"""Within it a server notices that it shall end; the library's half a second would be waited for in every test."""


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
