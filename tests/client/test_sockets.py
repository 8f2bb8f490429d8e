"""Clients over real sockets: a connection that ends, and back-pressure."""

from __future__ import annotations

import http.client
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase

from espalier_client import Readiness
from tests.client.stub import Driver, answer_to, asking, ids

Behaviour = Callable[[BufferedIOBase, Callable[[bytes], object]], None]


@contextmanager
def behaving(behave: Behaviour) -> Iterator[str]:
    """The address of a server that does this with each connection: what comes in, and how something goes out."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # the client has gone
                behave(self.rfile, self.wfile.write)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def read_head(stream: BufferedIOBase) -> int | None:
    """The length of the body of the next request; None where there is none."""
    return int(http.client.parse_headers(stream).get("Content-Length", "0")) if stream.readline() else None


def test_a_connection_that_the_service_closed_while_it_was_idle_is_replaced(driver: Driver) -> None:
    """The second request goes out on the kept connection, which the service closes without an answer."""
    requests = []

    def behave(stream: BufferedIOBase, send: Callable[[bytes], object]) -> None:
        while read_head(stream) is not None:
            requests.append(stream)
            if len(requests) == 2:
                return
            ready = b'{"ready": true, "reasons": []}'
            send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(ready), ready))

    with behaving(behave) as address:
        driver.open(None, url=address)
        assert [driver.ready(), driver.ready()] == [Readiness(True, ())] * 2
        driver.close()
    first, second, third = requests
    assert first is second is not third


def test_a_long_stream_and_a_service_with_back_pressure_do_not_wait_for_each_other(driver: Driver) -> None:
    """The service answers each line at once with a large one, and reads no further before that is taken."""
    names = [f"{n}-".ljust(4000, "x") for n in range(800)]
    padding = "x" * 20_000  # 3 MB there, 20 MB back: more than the buffers of both sides

    def behave(stream: BufferedIOBase, send: Callable[[bytes], object]) -> None:
        while length := read_head(stream):
            send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while length:
                line = stream.readline()
                length -= len(line)
                content = json.dumps(answer_to(json.loads(line)) | {"padding": padding}).encode() + b"\n"
                send(b"%x\r\n%s\r\n" % (len(content), content))
            send(b"0\r\n\r\n")

    with behaving(behave) as address:
        assert ids(driver.open(None, url=address, timeout_s=60).retrieve_stream(asking(*names))) == names
        driver.close()
