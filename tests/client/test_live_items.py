"""Items of the live catalogue through the client: what is sent, what is sent again, and bulks with back-pressure."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

import httpx
import numpy as np
import pytest

from espalier_client import (
    NEVER,
    ClientError,
    Delete,
    ItemOutcome,
    Put,
    RequestFailed,
)
from espalier_client.items import ItemOptions
from espalier_client.stream import BULK_BYTES, BULK_LINES, CHUNK_BYTES
from service.http.item_schemas import ItemRequest
from tests.client.stub import Driver, Json, Pieces, Stub, dump, problem, refuse, written


def streamed(*pieces: bytes | Exception) -> httpx.Response:
    return httpx.Response(200, stream=Pieces(pieces))


def sent(stub: Stub) -> list[list[Json]]:
    """The lines of each request."""
    return [[json.loads(line) for line in request.content.splitlines()] for request in stub.requests]


def done(*ids: str) -> bytes:
    return b"".join(dump(written({"id": id})) for id in ids)


def said(outcomes: Any) -> list[Any]:
    return [outcome.status if isinstance(outcome, RequestFailed) else outcome.id for outcome in outcomes]


def puts(*ids: str) -> list[Put | Delete]:
    return [Put(id) for id in ids]


def test_everything_that_the_service_takes_can_be_sent(driver: Driver) -> None:
    stub = Stub()
    until = datetime(2030, 1, 31, 12, tzinfo=UTC)
    options: Json = {
        "fields": {"title": "New", "tags": ["a"]},
        "events": [("b1", "b2"), (id for id in ("b3",))],
        "like": (id for id in ("b4",)),
        "text": "words",
        "users": ["u1", "u2"],
        "source_version": 7,
        "valid_until": until,
    }
    assert list(options) == list(ItemOptions.__annotations__) == [one.name for one in fields(Put)][1:]
    assert set(options) == set(ItemRequest.model_fields)
    driver.open(stub).put_item("books", "b9", **options)
    assert stub.bodies == [options | {"events": [["b1", "b2"], ["b3"]], "like": ["b4"], "valid_until": "2030-01-31T12:00:00+00:00"}]


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({"fields": {}}, {"fields": {}}),
        ({"fields": {}, "valid_until": NEVER}, {"fields": {}, "valid_until": None}),
        (
            {"events": [np.array([0.5, 2], np.float32), {np.int64(3): np.float32(1.5)}, "words"]},
            {"events": [[0.5, 2.0], {"indices": [3], "values": [1.5]}, "words"]},
        ),
    ],
)
def test_a_put_is_written(driver: Driver, options: Json, sent: Json) -> None:
    """A time of expiry is left or lifted, and events are of every kind."""
    stub = Stub()
    driver.open(stub).put_item("books", "b9", **options)
    assert stub.bodies == [sent]


def test_conditions_are_headers(driver: Driver) -> None:
    stub = Stub()
    driver.open(stub)
    driver.put_item("books", "b9", if_match='"41"')
    driver.put_item("books", "b9", if_none_match="*")
    driver.delete_item("books", "b9", if_match=driver.get_item("books", "b9").etag, source_version=8)
    headers = [(request.headers.get("If-Match"), request.headers.get("If-None-Match")) for request in stub.requests]
    assert headers == [('"41"', None), (None, "*"), (None, None), ('"41"', None)]
    assert stub.requests[-1].url.params["source_version"] == "8"


@pytest.mark.parametrize("failure", [httpx.ReadError("reset"), refuse(503), refuse(429)])
@pytest.mark.parametrize("method", ["put_item", "delete_item"])
def test_a_write_is_sent_again_unless_it_has_a_condition(driver: Driver, method: str, failure: Any) -> None:
    stub = Stub([failure])
    getattr(driver.open(stub), method)("books", "b9")
    assert len(stub.requests) == 2
    driver.close()
    stub = Stub([failure])
    with pytest.raises(ClientError):
        getattr(driver.open(stub), method)("books", "b9", if_match='"41"')
    assert len(stub.requests) == 1


def test_a_bulk_is_sent_in_chunks_and_answered_in_order(driver: Driver) -> None:
    stub = Stub()
    ids = [f"b{n}" for n in range(2 * BULK_LINES + 3)]
    outcomes = list(driver.open(stub).bulk("a b", [*puts(*ids), Delete("b7", source_version=9)]))
    assert outcomes[:2] == [ItemOutcome("b0", "inserted", 0), ItemOutcome("b1", "inserted", 1)]
    assert outcomes[-1] == ItemOutcome("b7", "deleted", 7)
    assert [len(lines) for lines in sent(stub)] == [BULK_LINES, BULK_LINES, 4]
    assert sent(stub)[-1][-1] == {"id": "b7", "delete": True, "source_version": 9}
    assert {request.url.raw_path for request in stub.requests} == {b"/models/a%20b/items"}
    assert {request.headers["Content-Type"] for request in stub.requests} == {"application/x-ndjson"}
    for most, lines in ((BULK_BYTES, BULK_LINES), (CHUNK_BYTES, BULK_LINES + 1)):  # of more lines than it holds, less of a body
        stub.requests.clear()
        list(driver.bulk("books", [Put(f"b{n}", text="x" * (most // 3)) for n in range(5)], chunk_lines=lines))
        assert [len(lines) for lines in sent(stub)] == [2, 2, 1]


def test_a_line_says_when_a_worker_was_behind(driver: Driver) -> None:
    line = written({"id": "b1"}) | {"status": 202, "unknown": ["b9"]}
    [outcome] = driver.open(Stub([streamed(dump(line))])).bulk("books", puts("b1"))
    assert outcome == ItemOutcome("b1", "inserted", 1, False, ("b9",))


def test_after_a_broken_connection_all_that_have_no_outcome_are_sent_again_in_order(driver: Driver) -> None:
    stub = Stub([streamed(done("b1"), httpx.ReadError("reset"))])
    operations = [*puts("b1", "b2"), Delete("b2"), *puts("b2")]
    assert said(driver.open(stub).bulk("books", operations)) == ["b1", "b2", "b2", "b2"]
    assert [[line["id"] for line in lines] for lines in sent(stub)] == [["b1", "b2", "b2", "b2"], ["b2", "b2", "b2"]]


def test_a_refused_write_never_overtakes_a_later_one_of_its_item(driver: Driver) -> None:
    busy = dump({"id": "x"} | problem(503))
    stub = Stub([streamed(busy, busy, done("b1"))])
    operations: list[Put | Delete] = [Put("b1"), Put("b2"), Delete("b1")]
    assert said(driver.open(stub).bulk("books", operations)) == [503, "b2", "b1"]
    assert [[line["id"] for line in lines] for lines in sent(stub)] == [["b1", "b2", "b1"], ["b2"]]
