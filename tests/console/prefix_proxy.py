"""A reverse proxy that serves another server below a path prefix, as an ingress does: it strips the prefix and passes everything on.

Knows HTTP/1.1 upstream. Answers with HTTP/1.0, so that the end of a stream is the end of its connection.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host"}


@contextmanager
def behind_prefix(port: int, prefix: str) -> Iterator[str]:
    """The address of the prefix, with its slash; `port` is the server's on this machine. Anything outside the prefix is 404."""

    class Handler(BaseHTTPRequestHandler):
        def pass_on(self) -> None:
            if not self.path.startswith(f"{prefix}/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
            upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            with closing(upstream), suppress(BrokenPipeError, ConnectionResetError):  # a browser may lose interest
                upstream.request(self.command, self.path.removeprefix(prefix), body or None, headers)
                answer = upstream.getresponse()
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in HOP_BY_HOP:
                        self.send_header(name, value)
                self.end_headers()
                while part := answer.read1(1 << 16):
                    self.wfile.write(part)

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = pass_on

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="proxy")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{prefix}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
