"""Object stores for tests: an S3 server in this process, a proxy before it that fails as told, and what is published."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from moto.server import ThreadedMotoServer

from benchmarks.random_bundles import make_bundle
from espalier.tree import complete_tree

BUCKET = "models"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "not-shown-anywhere", "AWS_REGION": "us-east-1"}


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of an S3 server with an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        make_bucket(host, port)
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def two_versions(folder: Path) -> Path:
    """The versions 1 and 2 of a small model, in its folder below this one."""
    rng = np.random.default_rng(0)
    for version in (1, 2):
        make_bundle(folder, rng, complete_tree(rng.permutation(32), 2), name="books", version=version)
    return folder / "books"


def make_bucket(host: str, port: int) -> None:
    """An empty bucket, in place of what there was."""
    connection = http.client.HTTPConnection(host, port)
    for method, path in (("POST", "/moto-api/reset"), ("PUT", f"/{BUCKET}")):
        connection.request(method, path, headers={"Content-Length": "0"})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
    connection.close()


class CuttingProxy:
    """Passes connections on to a server, and ends some of them in the midst of an answer.

    cut_after  bytes of answers after which a connection may end; None: none does
    every      of the connections that get so far, the first of so many ends there
    cuts       connections that were ended so
    """

    def __init__(self, host: str, port: int) -> None:
        self._server = host, port
        self.cut_after: int | None = None
        self.every, self.cuts, self._long = 1, 0, 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._server)
                threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        passed, is_long = 0, False
        with suppress(OSError):
            while data := source.recv(1 << 12):
                target.sendall(data)
                passed += len(data)
                if is_answer and not is_long and self.cut_after is not None and passed > self.cut_after:
                    is_long = True
                    self._long += 1
                    if self._long % self.every == 1 % self.every:
                        self.cuts += 1
                        break
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
