"""Texts of a stranger: whatever a document holds, it is an answer or an error of the client."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier_client import (
    Answer,
    Client,
    ClientError,
    Query,
    Retry,
    Unavailable,
)
from tests.client.rude_server import KINDS, answer, asking, behaving, call, response, saying


@KINDS
def test_a_refusal_fits_into_a_line_of_a_log(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "espalier_client")
    problem = {"title": "a\nb\x1b[31m", "detail": "x" * 500_000, "errors": [{"field": "\r\n", "value": "\ud800", "expected": "y" * 9000}]}
    content = json.dumps(problem).encode()
    with behaving(saying(response(content, 503, "application/problem+json", f"X-Request-Id: {'i' * 5000}"))) as server:
        patient = Retry(retries=1, backoff_s=0)
        with pytest.raises(Unavailable) as raised:
            call(kind, server.address, "retrieve", [Query()], retry=patient)
    error = raised.value
    assert (error.title, error.errors[0].field, error.errors[0].value) == ("a b [31m", "  ", " ")
    assert str(error).isprintable()
    assert error.request_id is not None
    assert max(len(str(error)), len(error.errors[0].expected), len(error.request_id)) < 2500
    (logged,) = [record.getMessage() for record in caplog.records if record.name == "espalier_client"]
    assert logged.isprintable()
    assert len(logged) < 2500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["items", "id", "score", "results", "timing", "status", "title", "errors", "ready", "reasons", "versions", "fields"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@given(
    document=JSON, path=st.lists(st.integers(0, 9), max_size=4), status=st.sampled_from([200, 422, 429, 500, 503]), problem=st.booleans()
)
def test_any_document_is_an_answer_or_an_error_of_the_client(document: Any, path: Sequence[int], status: int, problem: bool) -> None:
    """A right document in which one value, wherever it is, has become another."""
    right: Any = {"type": "x", "title": "x", "status": 429, "errors": [{"field": "a", "value": "b", "expected": "c"}]}
    right = right if problem else answer("a", "b") | {"ready": True, "reasons": [], "ids": [], "removed": 1, "unknown": [], "items": []}
    content = json.dumps(replaced(right, path, document)).encode()
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=content))
    with Client("http://service", transport=transport, retry=Retry(retries=0)) as client:
        asked: list[Callable[[], Any]] = [
            lambda: client.retrieve([Query()]),
            lambda: list(client.retrieve_stream(asking("a"))),
            *(
                client.models,
                client.ready,
                lambda: client.removed("a"),
                lambda: client.set_removed("a", []),
                lambda: client.complete("a", ""),
            ),
        ]
        for ask in asked:
            with suppress(ClientError):  # any other error ends the test
                assert ask() is not None


def replaced(document: Any, path: Sequence[int], value: Any) -> Any:
    """A copy of a document with another value at a place; a path that leads further than the document ends there."""
    if not path or not isinstance(document, dict | list) or not document:
        return value
    if isinstance(document, list):
        at = path[0] % len(document)
        return [replaced(one, path[1:], value) if n == at else one for n, one in enumerate(document)]
    name = list(document)[path[0] % len(document)]
    return document | {name: replaced(document[name], path[1:], value)}


def test_an_answer_is_still_an_answer() -> None:
    with behaving(saying(response(json.dumps(answer("a", "b")).encode()))) as server:
        got = call("Client", server.address, "retrieve", [Query()])
    assert isinstance(got, Answer)
    assert [item.id for item in got.results[0].items] == ["a", "b"]
