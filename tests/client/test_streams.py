"""Many requests through one stream: in order, within bounds, and again where lines have no answer."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import espalier_client
from espalier_client import (
    NEVER,
    AsyncClient,
    Client,
    ClientError,
    ConnectionFailed,
    Delete,
    InvalidAnswer,
    ItemOutcome,
    NotAllowed,
    Put,
    Query,
    Request,
    RequestFailed,
    WrongValue,
)
from espalier_client.items import ItemOptions
from espalier_client.stream import BULK_BYTES, BULK_LINES, CHUNK_BYTES, CHUNK_LINES
from service.http.item_schemas import ItemRequest
from tests.client.stub import URL, Driver, Json, Pieces, Stub, answer_to, asking, dump, ids, problem, refuse, written


def test_a_stream_is_answered_in_order_by_requests_of_bounded_size_and_an_empty_one_asks_nothing(driver: Driver) -> None:
    stub = Stub()
    assert list(driver.open(stub).retrieve_stream([])) == []
    assert stub.requests == []
    stub = Stub()
    small = [f"b{n}" for n in range(2 * CHUNK_LINES + 3)]
    assert ids(driver.open(stub).retrieve_stream(asking(*small))) == small
    assert [len(lines) for lines in stub.lines] == [CHUNK_LINES, CHUNK_LINES, 3]
    assert {request.headers["Content-Type"] for request in stub.requests} == {"application/x-ndjson"}

    stub.requests.clear()
    large = [f"{n}-".ljust(CHUNK_BYTES // 3, "x") for n in range(5)]
    assert ids(driver.retrieve_stream(asking(*large))) == large
    assert [len(lines) for lines in stub.lines] == [2, 2, 1]
    assert all(len(request.content) <= CHUNK_BYTES for request in stub.requests)

    stub.requests.clear()
    huge = ["a", "b" * CHUNK_BYTES, "c"]
    assert ids(driver.retrieve_stream(asking(*huge))) == huge
    assert [len(lines) for lines in stub.lines] == [1, 1, 1]


def test_requests_are_read_no_further_than_needed(driver: Driver) -> None:
    read = []

    def requests() -> Iterator[Request]:
        for n in range(1000):
            read.append(n)
            yield Request([Query(history=[f"b{n}"])])

    outcomes = driver.open(Stub()).retrieve_stream(requests(), chunk_lines=4)
    assert read == []
    for n in range(8):
        assert ids([next(outcomes)]) == [f"b{n}"]
        assert len(read) == 4 * (n // 4 + 1)
    outcomes.close()


def test_an_asynchronous_client_takes_asynchronous_requests_and_operations() -> None:
    async def given(sent: Iterable[Any]) -> AsyncIterator[Any]:
        for one in sent:
            await asyncio.sleep(0)
            yield one

    async def outcomes() -> tuple[list[Any], list[Any]]:
        async with AsyncClient(URL, transport=httpx.MockTransport(Stub())) as client:
            answers = [outcome async for outcome in client.retrieve_stream(given(asking("a", "b")))]
            written = [outcome async for outcome in client.bulk("books", given([Put("b1"), Put("b2"), Put("b3")]), chunk_lines=2)]
            return answers, written

    answers, written = asyncio.run(outcomes())
    assert (ids(answers), [outcome.id for outcome in written]) == (["a", "b"], ["b1", "b2", "b3"])


def streamed(*pieces: bytes | Exception) -> httpx.Response:
    return httpx.Response(200, stream=Pieces(pieces), headers={"X-Request-Id": "the-id"})


def whole(status: int, headers: dict[str, str] | None = None) -> httpx.Response:
    """A refusal of a whole stream, whose document has yet to be read."""
    return httpx.Response(status, headers=headers, stream=Pieces([dump(problem(status))]))


def found(id: str) -> bytes:
    return dump(answer_to({"queries": [{"history": [id]}]}))


def test_a_line_that_fails_does_not_end_the_stream(driver: Driver) -> None:
    wrong = [{"field": "m", "value": "0", "expected": "at least 1"}]
    stub = Stub([streamed(found("a"), dump(problem(422, errors=wrong)), dump(problem(504)), found("d"))])
    outcomes = list(driver.open(stub).retrieve_stream(asking("a", "b", "c", "d")))
    assert ids(outcomes) == ["a", 422, 504, "d"]
    failed = outcomes[1]
    assert isinstance(failed, espalier_client.InvalidRequest)
    assert (failed.errors, failed.request_id) == ((WrongValue("m", "0", "at least 1"),), "the-id")
    assert len(stub.requests) == 1


@given(cuts=st.lists(st.integers(0, 2000)), names=st.lists(st.text(min_size=1).map(lambda name: name.encode(errors="replace").decode())))
def test_an_answer_may_be_cut_anywhere_and_hold_any_letter(cuts: list[int], names: list[str]) -> None:
    body = b"".join(map(found, names)).rstrip(b"\n")
    at = [0, *sorted(cut for cut in cuts if cut < len(body)), len(body)]
    pieces = [body[start:end] for start, end in itertools.pairwise(at)]
    with Client(URL, transport=httpx.MockTransport(lambda _: streamed(*pieces))) as client:
        assert ids(client.retrieve_stream(asking(*names), chunk_lines=len(names) + 1)) == names


@given(names=st.lists(st.text(st.characters(), min_size=1), min_size=1, max_size=5))
def test_each_request_is_one_line_whatever_its_letters(names: list[str]) -> None:
    for request, name in zip(asking(*names), names, strict=True):
        assert request.to_bytes().splitlines() == [request.to_bytes()]
        assert json.loads(request.to_bytes())["queries"] == [{"history": [name]}]


@pytest.mark.parametrize(
    "end",
    [[httpx.ReadError("reset")], [httpx.RemoteProtocolError("incomplete chunked read")], [found("c")[:20], httpx.ReadError("reset")], []],
)
def test_only_the_lines_without_an_answer_are_sent_again(driver: Driver, end: list[bytes | Exception]) -> None:
    stub = Stub([streamed(found("a"), dump(problem(422)), *end)])
    assert ids(driver.open(stub).retrieve_stream(asking("a", "b", "c", "d"))) == ["a", 422, "c", "d"]
    assert stub.lines == [["a", "b", "c", "d"], ["c", "d"]]
    assert driver.pauses_s == [0.1]


def test_a_stream_that_makes_no_progress_ends_with_the_failure(driver: Driver) -> None:
    stub = Stub([streamed(found("a"), httpx.ReadError("reset")), *[streamed(httpx.ReadError("reset")) for _ in range(9)]])
    outcomes = driver.open(stub, retries=2).retrieve_stream(asking("a", "b"))
    assert ids([next(outcomes)]) == ["a"]
    with pytest.raises(ConnectionFailed, match="reset"):
        next(outcomes)
    assert stub.lines == [["a", "b"], ["b"], ["b"]]


def test_progress_starts_the_count_and_the_clock_anew(driver: Driver) -> None:
    stub = Stub([streamed(found(id), httpx.ReadError("reset")) for id in "abcd"])
    got = []
    for outcome in driver.open(stub, retries=1, deadline_s=10).retrieve_stream(asking(*"abcde")):
        got.append(outcome)
        driver.now_s += 60  # the caller takes his time
    assert ids(got) == list("abcde")
    assert driver.pauses_s == [0.1] * 4


def test_lines_that_were_turned_away_are_sent_again_alone_and_keep_their_place(driver: Driver) -> None:
    stub = Stub([streamed(found("a"), dump(problem(429)), found("c"), dump(problem(503)), found("e"))])
    assert ids(driver.open(stub).retrieve_stream(asking(*"abcde"))) == list("abcde")
    assert stub.lines == [list("abcde"), ["b", "d"]]


def test_lines_that_are_turned_away_for_good_are_handed_out(driver: Driver) -> None:
    stub = Stub([streamed(found("a"), dump(problem(429)), found("c")), *[streamed(dump(problem(503))) for _ in range(2)]])
    assert ids(driver.open(stub, retries=2).retrieve_stream([*asking(*"abc"), *asking("d")], chunk_lines=3)) == ["a", 503, "c", "d"]
    assert stub.lines == [list("abc"), ["b"], ["b"], ["d"]]


def test_a_refusal_of_the_whole_request_is_tried_again_or_raised(driver: Driver) -> None:
    stub = Stub([whole(503, {"Retry-After": "2"}), streamed(found("a")), whole(401)])
    outcomes = driver.open(stub).retrieve_stream(asking("a", "b"), chunk_lines=1)
    assert ids([next(outcomes)]) == ["a"]
    assert driver.pauses_s == [2.1]
    with pytest.raises(NotAllowed, match="What happened"):
        next(outcomes)


def test_more_answers_than_requests_are_an_error(driver: Driver) -> None:
    stub = Stub([streamed(found("a") + found("b"))])
    with pytest.raises(InvalidAnswer, match="POST /retrieve/stream: expected 1 lines, got more"):
        list(driver.open(stub).retrieve_stream(asking("a")))
    assert len(stub.requests) == 1


def test_a_stream_that_is_left_early_closes_its_connection(driver: Driver) -> None:
    answer = streamed(found("a"), found("b"))
    outcomes = driver.open(lambda _: answer).retrieve_stream(asking("a", "b"))
    next(outcomes)
    assert not answer.is_closed
    outcomes.close()
    assert answer.is_closed


# -- items of the live catalogue through the client: what is sent, what is sent again, and bulks with back-pressure -------


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
        "count": 12,
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
