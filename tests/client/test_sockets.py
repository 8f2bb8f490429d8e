"""Clients over real sockets: connections that end, and back-pressure."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from espalier_client import (
    AsyncClient,
    Client,
    Readiness,
    Retry,
)
from tests.client.stub import Stub, answer_to, asking, dump, ids, serving


def run_async(url: str, use: Callable[[AsyncClient], Any], **options: Any) -> Any:
    async def run() -> Any:
        async with AsyncClient(url, **options) as client:
            return await use(client)

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
def test_a_connection_that_the_service_closed_while_it_was_idle_is_replaced(kind: str) -> None:
    """The second request goes out on the kept connection, which the service closes without an answer."""
    content = json.dumps({"ready": True, "reasons": []}).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)
    served: list[int] = []

    def serve(listener: socket.socket) -> None:
        for connection_number in range(2):
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as requests:
                while requests.readline().strip():
                    while requests.readline().strip():
                        pass
                    served.append(connection_number)
                    if len(served) == 2:
                        break
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        retry = Retry(backoff_s=0)
        if kind == "Client":
            with Client(url, retry=retry) as client:
                answers = [client.ready(), client.ready()]
        else:

            async def twice(client: AsyncClient) -> list[Readiness]:
                return [await client.ready(), await client.ready()]

            answers = run_async(url, twice, retry=retry)
        thread.join()
    assert answers == [Readiness(True, ())] * 2
    assert served == [0, 0, 1]


class Eager(BaseHTTPRequestHandler):
    """Answers each line at once with a large one, and reads no further before that is taken."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        left = int(self.headers["Content-Length"])
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while left:
            line = self.rfile.readline()
            left -= len(line)
            answer = answer_to(json.loads(line)) | {"padding": "x" * 20_000}
            content = dump(answer)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
def test_a_long_stream_and_a_service_with_back_pressure_do_not_wait_for_each_other(kind: str) -> None:
    names = [f"{n}-".ljust(4000, "x") for n in range(2500)]  # 10 MB there, 60 MB back: more than the buffers of both sides
    with serving(Stub(), Eager) as url:
        if kind == "Client":
            with Client(url, timeout_s=20) as client:
                assert ids(client.retrieve_stream(asking(*names))) == names
        else:

            async def stream(client: AsyncClient) -> list[str | int]:
                return ids([outcome async for outcome in client.retrieve_stream(asking(*names))])

            assert run_async(url, stream, timeout_s=20) == names
