"""A server in place of a service: what it answers is up to the test."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from loadtest.target import Json, Target
from tests.http_servers import Received, answering


class Request(NamedTuple):
    """What came in. number: of the request, from 0; authorization: the header, empty without one."""

    number: int
    method: str
    path: str
    authorization: str
    body: bytes

    @property
    def document(self) -> Json:
        found: Json = json.loads(self.body)
        return found


@contextmanager
def stub(answer: Callable[[Request], tuple[int, object] | None]) -> Iterator[Target]:
    """A server that answers with this status and this document (text as it is); None closes the connection instead."""
    numbers = itertools.count()

    def as_bytes(received: Received) -> tuple[int, bytes] | None:
        authorization = received.headers.get("Authorization", "")
        answered = answer(Request(next(numbers), received.method, received.path, authorization, received.body))
        if answered is None:
            return None
        status, document = answered
        return status, (document if isinstance(document, str) else json.dumps(document)).encode()

    with answering(as_bytes) as address:
        yield Target("127.0.0.1", int(address.rpartition(":")[2]))


MODEL: Json = {"name": "books", "version": 1, "state": "ready", "query": {"kind": "history"}, "tree": {"items": 10}}
MODEL |= {"search": {"max_beam_size": 64, "max_m": 64}, "versions": [{"version": 1, "state": "ready"}]}


@contextmanager
def made_up(retrieve: Callable[[Json], tuple[int, Json]]) -> Iterator[str]:
    """The address of a service with a model of ten items, and the test's own answers to POST /retrieve."""

    def answer(request: Request) -> tuple[int, object]:
        if request.method == "POST":
            return retrieve(request.document)
        return 200, {"models": [MODEL]} if request.path == "/models" else MODEL

    with stub(answer) as target:
        yield str(target)


def results(count: int, complete: bool = True) -> Json:
    """An answer with so many items."""
    return {"results": [{"items": [{}] * count, "complete": complete}]}
