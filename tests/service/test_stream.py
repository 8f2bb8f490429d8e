"""POST /retrieve/stream: many requests in one, line by line, both ways. The first tests are of POST /models/{name}/items, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from service.batching.batcher import Batcher
from service.errors import NotReady, QueueFull
from service.http import bulk_route, live_routes
from service.http.bulk_route import GROUP_LINES, GROUP_S
from service.http.memory_budget import Budget, Reservation
from service.http.retrieve_route import reserve
from tests.service.conversation import LINES, Conversation, sent
from tests.service.fake_catalogue import WRITE, FakeCatalogue
from tests.service.fake_engine import FakeEngine
from tests.service.own_time import pass_time, settled
from tests.service.running import Json, Running, bearer, counted, problem

STREAM, BULK = "/retrieve/stream", "/models/books/items"
IDLE_S = 600.0


def line(item: str, **rest: Any) -> bytes:
    return orjson.dumps({"model": "books", "queries": [{"history": [item]}], "m": 2} | rest)


def write(item: str) -> bytes:
    return orjson.dumps({"id": item, "events": [["item-1"]]})


either = pytest.mark.parametrize(("path", "line_of"), [(STREAM, line), (BULK, write)])
LineOf = Callable[[str], bytes]
HEADERS = LINES | bearer(WRITE)


@either
@pytest.mark.settings(max_body_bytes=200)
def test_a_stream_is_larger_than_a_request_may_be(shelf: Running, path: str, line_of: LineOf) -> None:
    assert len(sent(shelf, path, b"\n".join([line_of("item-1")] * 50), **HEADERS)) == 50
    assert sent(shelf, path, b"", **HEADERS) == []


@either
async def test_a_line_is_answered_before_the_next_one_is_sent(shelf: Running, path: str, line_of: LineOf) -> None:
    talk = Conversation(shelf, path, HEADERS)
    answers = talk.answers()
    for i in range(3):
        talk.say(line_of(f"item-{i}"))
        assert {"results", "sequence"} & (await anext(answers)).keys()
    talk.say(more=False)
    assert [answer async for answer in answers] == []
    await talk.leave()
    await talk.task


@either
@pytest.mark.settings(stream_idle_s=IDLE_S)
async def test_a_stream_that_falls_silent_ends_with_408(shelf: Running, path: str, line_of: LineOf) -> None:
    talk = Conversation(shelf, path, HEADERS)
    answers = talk.answers()
    talk.say(line_of("item-1"))
    assert (await anext(answers)).get("status", 200) in (200, 201)
    await pass_time(IDLE_S - 1)
    assert not talk.task.done()
    await pass_time(2)
    assert [answer["status"] async for answer in answers] == [408]


# -- retrieval ------------------------------------------------------------------------------------------------------------


def test_each_line_gets_its_answer_in_order(running: Running) -> None:
    found = sent(running, STREAM, b"\n".join(line(f"item-{i % 30}", m=1 + i % 7) for i in range(200)))
    histories = [int(item) for queries, _ in running.engines["books"].calls for item in queries.array[:, -1]]
    assert [len(document["results"][0]["items"]) for document in found] == [1 + i % 7 for i in range(200)]
    assert sorted(histories) == sorted(i % 30 for i in range(200))
    assert 'espalier_requests_total{model="books",status="200"} 200.0' in running.client.get("/metrics").text


@pytest.mark.settings(max_body_bytes=2000)
def test_a_wrong_line_costs_one_line(running: Running) -> None:
    wrong = [b"{", b"[]", b'"x"', b'{"queries": []}', line("item-1", m=0), line("item-1", model="nobody"), b"\xff\xfe", line("x" * 3000)]
    body = b"\n".join(part for bad in wrong for part in (line("item-1"), bad)) + b"\n\n  \n" + line("item-2")
    found = sent(running, STREAM, body)
    assert [document.get("status", 200) for document in found[1::2]] == [422, 422, 422, 422, 422, 404, 422, 413]
    assert found[9]["errors"][0]["field"] == "m"
    assert all("results" in document for document in found[::2])
    assert len(found) == 2 * len(wrong) + 1
    text = running.client.get("/metrics").text
    assert 'espalier_requests_total{model="books",status="422"}' not in text  # no model was found for those
    assert 'espalier_requests_total{model="",status="422"} 6.0' in text


def test_a_failing_engine_costs_the_lines_of_that_call(running: Running) -> None:
    running.engines["books"].failure = RuntimeError("secret")
    (failed,) = sent(running, STREAM, line("item-1"))
    assert (failed["status"], "secret" in str(failed)) == (500, False)
    assert "results" in sent(running, STREAM, line("item-1"))[0]


@pytest.mark.settings(stream_window=8)
async def test_a_client_that_does_not_read_holds_its_own_sending_back(running: Running) -> None:
    talk = Conversation(running, STREAM)
    assert await talk.head() == 200  # only then it begins to read
    talk.take(False)
    talk.say(*(line(f"item-{i % 30}") for i in range(100)), more=False)
    await settled(300)
    calls = running.engines["books"].calls
    while sum(len(queries) for queries, _ in calls) < 8:  # what a thread has taken is not in the queue, and not yet a call
        await asyncio.sleep(0)
    await settled(300)
    assert 8 < talk.asked <= 12  # the window, those on their way in, and one more
    assert sum(len(queries) for queries, _ in calls) <= 12
    talk.take(True)
    assert len([answer async for answer in talk.answers()]) == 100
    await talk.task


def held(running: Running, lines: int, more: bool) -> tuple[Conversation, FakeEngine, Batcher]:
    """A stream of so many lines whose first call the engine holds, with the engine and what waits for it."""
    engine = running.engines["books"]
    engine.go.clear()
    talk = Conversation(running, STREAM)
    talk.say(*(line(f"item-{i}") for i in range(lines)), more=more)
    return talk, engine, running.app.state.service.registry.choose("books", None).batcher


@pytest.mark.settings(max_queue=2)
async def test_a_stream_waits_for_room_where_a_single_request_is_refused(running: Running) -> None:
    talk, engine, batcher = held(running, 20, more=False)
    while not engine.calls or batcher.depth < 2:  # before its first call the engine still makes room
        await asyncio.sleep(0)
    refused = await running.client.http.post("/retrieve", json={"model": "books", "queries": [{"history": []}]})
    assert refused.status_code == problem(refused)["status"] == 429
    assert refused.headers["retry-after"] == "1"
    engine.go.set()
    answers = [answer async for answer in talk.answers()]
    assert ["results" in answer for answer in answers] == [True] * 20
    text = (await running.client.http.get("/metrics")).text
    assert 'espalier_shed_total{model="books"} 1.0' in text
    assert 'espalier_requests_total{model="books",status="429"} 1.0' in text


@pytest.mark.settings(stream_window=6)
async def test_a_client_that_hangs_up_leaves_nothing_in_the_queue(running: Running) -> None:
    """While its lines fill the window, nothing more is read, also not that it is gone: each line has its deadline."""
    talk, engine, batcher = held(running, 6, more=True)
    while not engine.calls or batcher.depth + sum(len(queries) for queries, _ in engine.calls) < 6:  # the first call may take several
        await asyncio.sleep(0)
    await talk.leave()
    await talk.task
    assert batcher.depth == 0
    engine.go.set()
    assert len(engine.calls) == 1
    text = (await running.client.http.get("/metrics")).text
    assert 'espalier_requests_total{model="books",status="200"}' not in text
    assert 'espalier_requests_total{model="books",status="499"}' in text


@pytest.mark.settings(stream_idle_s=IDLE_S)
async def test_a_client_that_never_reads_is_let_go(running: Running) -> None:
    talk = Conversation(running, STREAM)
    talk.say(line("item-1"))
    assert await talk.head() == 200
    talk.take(False)
    while talk.offered < 2:  # the head and the answer
        await asyncio.sleep(0)
    await pass_time(IDLE_S - 1)
    assert not talk.task.done()
    await pass_time(2)
    await talk.task


# -- POST /models/{name}/items: many writes in one request, over a fake catalogue -----------------------------------------


def write_line(item: str, **rest: Any) -> bytes:
    return orjson.dumps({"id": item} | (rest or {"events": [["item-1"]]}))


def write_all(running: Running, lines: list[bytes], **headers: str) -> list[Json]:
    return sent(running, BULK, b"\n".join(lines), **HEADERS, **headers)


def talking(running: Running) -> Conversation:
    return Conversation(running, BULK, HEADERS)


def test_each_line_gets_its_outcome_in_order(shelf: Running, catalogue: FakeCatalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_route, "GROUP_S", 60)  # a slow machine ends no group
    expected: list[tuple[bytes, Json]] = [
        (write_line("a"), {"id": "a", "status": 201, "sequence": 1, "outcome": "inserted"}),
        (write_line("a"), {"id": "a", "status": 200, "sequence": 1, "outcome": "unchanged"}),
        (write_line("item-2", delete=True), {"id": "item-2", "status": 200, "sequence": 2, "outcome": "deleted"}),
        (
            write_line("b", like=["item-3", "nobody"], source_version=4),
            {"id": "b", "status": 201, "sequence": 3, "outcome": "inserted", "unknown": ["nobody"]},
        ),
        (write_line("b", like=["item-3"], source_version=3), {"id": "b", "status": 200, "sequence": 3, "outcome": "stale"}),
        (write_line("a", delete=True, source_version=9), {"id": "a", "status": 200, "sequence": 4, "outcome": "deleted"}),
    ]
    assert write_all(shelf, [asked for asked, _ in expected]) == [outcome for _, outcome in expected]
    assert [len(group) for group in catalogue.groups] == [6]
    catalogue.visible = False
    assert write_all(shelf, [write_line("c")])[0]["status"] == 202  # a worker is behind


@pytest.mark.settings(max_body_bytes=1000)
def test_a_wrong_write_costs_one_line(shelf: Running) -> None:
    wrong = [
        (b"{", None, 422),
        (b"[]", None, 422),
        (b"\xff", None, 422),
        (b'{"events": [["a"]]}', None, 422),
        (write_line(""), "", 422),
        (write_line("x", events=[[]]), "x", 422),
        (write_line("x", nothing=1), "x", 422),
        (write_line("x", delete=True, text="t"), "x", 422),
        (write_line("x", fields={}), "x", 422),  # no evidence
        (write_line("nobody", delete=True), "nobody", 404),
        (write_line("x", text="x" * 2000), None, 413),
    ]
    found = write_all(shelf, [part for bad, _, _ in wrong for part in (write_line("a"), bad, b"", b"  ")])
    assert [one["outcome"] for one in found[::2]] == ["inserted"] + ["unchanged"] * (len(wrong) - 1)
    assert [(one["id"], one["status"]) for one in found[1::2]] == [(item, status) for _, item, status in wrong]
    assert all({"type", "title", "detail"} <= one.keys() for one in found[1::2])
    assert found[15]["errors"][0]["expected"] == "an id and perhaps a source_version beside it, and no text"
    refused = [counted(shelf)[f'espalier_live_refused_total{{model="books",status="{status}"}}'] for status in (422, 404, 413)]
    assert refused == [9, 1, 1]


def test_lines_are_committed_in_groups(shelf: Running, catalogue: FakeCatalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_route, "GROUP_S", 60)
    count = 3 * GROUP_LINES + 7
    found = write_all(shelf, [write_line(f"new-{i}") for i in range(count)])
    assert [one["sequence"] for one in found] == [*range(1, count + 1)]
    assert [len(group) for group in catalogue.groups] == [GROUP_LINES, GROUP_LINES, GROUP_LINES, 7]


def test_a_catalogue_that_is_not_ready_refuses_the_lines_and_not_the_bulk(shelf: Running, catalogue: FakeCatalogue) -> None:
    catalogue.failure = NotReady("The service is shutting down.")
    found = write_all(shelf, [write_line(f"new-{i}") for i in range(3)] + [b"{"])
    assert [one["status"] for one in found] == [503, 503, 503, 422]


def test_the_audit_log_has_a_line_for_a_bulk(shelf: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "service.audit")
    write_all(shelf, [write_line("a"), write_line("b"), b"{"], **{"X-Request-Id": "b-1"})
    [record] = [record for record in caplog.records if record.name == "service.audit"]
    fields = record.__dict__["fields"]
    assert (fields["action"], fields["model"], fields["request_id"]) == ("bulk", "books", "b-1")
    assert (fields["statuses"], fields["key"]) == ({"201": 2, "422": 1}, "953bd98b")


async def test_no_more_is_read_than_is_committed(shelf: Running, catalogue: FakeCatalogue) -> None:
    catalogue.go.clear()
    talk = talking(shelf)
    talk.say(*(write_line(f"new-{i}") for i in range(10 * GROUP_LINES)), more=False)
    while not catalogue.groups:
        await asyncio.sleep(0)
    await settled(200)
    assert talk.asked <= 2 * GROUP_LINES + 3  # a commit, the next one, and the write_line that waits for room
    catalogue.go.set()
    assert await talk.head() == 200
    assert [one["sequence"] async for one in talk.answers()] == [*range(1, 10 * GROUP_LINES + 1)]


async def test_a_client_that_takes_no_outcomes_stops_the_commits(shelf: Running, catalogue: FakeCatalogue) -> None:
    talk = talking(shelf)
    assert await talk.head() == 200
    talk.take(False)
    talk.say(*(write_line(f"new-{i}") for i in range(10 * GROUP_LINES)))
    for _ in range(3):
        await settled(200)
        await pass_time(GROUP_S)
    assert len(catalogue.operations) <= 2 * GROUP_LINES
    talk.task.cancel()
    await asyncio.gather(talk.task, return_exceptions=True)


@pytest.mark.settings(max_bulk=2)
async def test_only_some_bulks_are_read_at_a_time(shelf: Running) -> None:
    talks = [talking(shelf) for _ in range(2)]
    assert [await talk.head() for talk in talks] == [200, 200]
    assert await talking(shelf).head() == 429
    await talks[0].leave()
    fourth = talking(shelf)
    assert await fourth.head() == 200
    for talk in (talks[1], fourth):
        await talk.leave()
        await talk.task
    assert 'espalier_live_refused_total{model="books",status="429"} 1.0' in (await shelf.client.http.get("/metrics")).text


@pytest.mark.settings(max_bulk=1)
async def test_the_next_bulk_may_come_with_the_end_of_one(shelf: Running) -> None:
    talk = talking(shelf)
    talk.say(write_line("a"), more=False)
    assert await talk.head() == 200
    await anext(talk.answers())
    await talk.ended()
    again = talking(shelf)
    again.say(more=False)
    await talk.leave()
    await again.leave()
    assert await again.head() == 200
    await asyncio.gather(talk.task, again.task)


@pytest.fixture
def no_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte of a body counts."""
    monkeypatch.setattr(live_routes, "FREE_BYTES", 0)


@pytest.mark.usefixtures("no_free_memory")
@pytest.mark.settings(max_bulk=1)
async def test_a_client_that_hangs_up_leaves_nothing_behind(shelf: Running, catalogue: FakeCatalogue) -> None:
    budget = shelf.app.state.bodies["bulk"]
    catalogue.go.clear()
    talk = talking(shelf)
    talk.say(write_line("a"), write_line("b"))
    talk.say_piece(write_line("c")[:9])
    await settled()
    await pass_time(GROUP_S)
    assert catalogue.groups
    assert budget.available < budget.units
    await talk.leave()
    assert budget.available < budget.units  # what was handed on is finished, and counts till then
    assert await talking(shelf).head() == 429
    catalogue.go.set()
    await talk.task
    assert budget.available == budget.units
    again = talking(shelf)
    again.say(more=False)
    assert await again.head() == 200
    await again.leave()
    await again.task


async def test_a_line_is_refused_where_as_many_wait_for_room_as_may() -> None:
    memory = Budget(units=1, free=0, most_waiting=0)
    with Reservation(memory) as first, Reservation(memory) as second:
        assert await reserve(first, 1, 10, {}) == 1
        with pytest.raises(QueueFull, match="Too many requests in lines wait for room"):
            await reserve(second, 1, 10, {})
