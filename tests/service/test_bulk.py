"""POST /models/{name}/items: many writes in one request, over a fake catalogue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.types import Message

from service.errors import CatalogueFull, NotReady
from service.http import bulk_route, live_routes
from service.http.bulk_route import GROUP_LINES
from tests.service.fake_catalogue import FakeCatalogue, FakeCatalogues
from tests.service.running import ITEMS, Json, Running, bearer, problem, run

WRITE = "write-key-00000001"
HEADERS = {"Content-Type": "application/x-ndjson"} | bearer(WRITE)
BULK = "/models/books/items"


@pytest.fixture
def catalogue() -> FakeCatalogue:
    return FakeCatalogue(trained=[f"item-{i}" for i in range(ITEMS)])


@pytest.fixture
def shelf(models: Path, catalogue: FakeCatalogue) -> Iterator[Running]:
    with run(models, catalogues=FakeCatalogues(books=catalogue), write_keys=(WRITE,)) as running:
        yield running


def line(item: str, **rest: Any) -> bytes:
    return orjson.dumps({"id": item} | (rest or {"events": [["item-1"]]}))


def bulk(running: Running, lines: list[bytes], **headers: str) -> list[Json]:
    answer = running.client.post(BULK, content=b"\n".join(lines), headers=HEADERS | headers)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson")
    return [orjson.loads(text) for text in answer.content.splitlines()]


def test_each_line_gets_its_outcome_in_order(shelf: Running, catalogue: FakeCatalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_route, "GROUP_S", 60)  # a slow machine ends no group
    lines = [
        line("a"),
        line("a"),
        line("item-2", delete=True),
        line("b", like=["item-3", "nobody"], source_version=4),
        line("b", like=["item-3"], source_version=3),
        line("a", delete=True, source_version=9),
    ]
    assert bulk(shelf, lines) == [
        {"id": "a", "status": 201, "sequence": 1, "outcome": "inserted"},
        {"id": "a", "status": 200, "sequence": 1, "outcome": "unchanged"},
        {"id": "item-2", "status": 200, "sequence": 2, "outcome": "deleted"},
        {"id": "b", "status": 201, "sequence": 3, "outcome": "inserted", "unknown": ["nobody"]},
        {"id": "b", "status": 200, "sequence": 3, "outcome": "stale"},
        {"id": "a", "status": 200, "sequence": 4, "outcome": "deleted"},
    ]
    assert [len(group) for group in catalogue.groups] == [6]


def test_a_wrong_line_costs_one_line(models: Path, catalogue: FakeCatalogue) -> None:
    wrong = [
        (b"{", None, 422),
        (b"[]", None, 422),
        (b"\xff", None, 422),
        (b'{"events": [["a"]]}', None, 422),
        (line(""), "", 422),
        (line("x", events=[[]]), "x", 422),
        (line("x", nothing=1), "x", 422),
        (line("x", delete=True, text="t"), "x", 422),
        (line("x", fields={}), "x", 422),  # no evidence
        (line("nobody", delete=True), "nobody", 404),
        (line("x", text="x" * 2000), None, 413),
    ]
    lines = [part for bad, _, _ in wrong for part in (line("a"), bad, b"", b"  ")]
    with run(models, catalogues=FakeCatalogues(books=catalogue), write_keys=(WRITE,), max_body_bytes=1000) as running:
        found = bulk(running, lines)
        text = running.client.get("/metrics").text
    assert [one["outcome"] for one in found[::2]] == ["inserted"] + ["unchanged"] * (len(wrong) - 1)
    assert [(one["id"], one["status"]) for one in found[1::2]] == [(item, status) for _, item, status in wrong]
    assert all({"type", "title", "detail"} <= one.keys() for one in found[1::2])
    assert found[15]["errors"][0]["expected"] == "an id and perhaps a source_version beside it, and no text"
    assert 'espalier_live_refused_total{model="books",status="422"} 9.0' in text
    assert 'espalier_live_refused_total{model="books",status="404"} 1.0' in text


def test_a_full_catalogue_still_deletes(models: Path) -> None:
    catalogue = FakeCatalogue(capacity=1)
    with run(models, catalogues=FakeCatalogues(books=catalogue), write_keys=(WRITE,)) as running:
        found = bulk(running, [line("a"), line("b"), line("a", delete=True), line("b")])
    assert [one["status"] for one in found] == [201, CatalogueFull.status, 200, 201]


def test_a_bulk_is_larger_than_a_body_may_be(models: Path) -> None:
    with run(models, catalogues=FakeCatalogues(books=FakeCatalogue()), write_keys=(WRITE,), max_body_bytes=200) as running:
        assert len(bulk(running, [line("a")] * 100)) == 100
        assert bulk(running, []) == []


def test_lines_are_committed_in_groups(shelf: Running, catalogue: FakeCatalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_route, "GROUP_S", 60)
    count = 3 * GROUP_LINES + 7
    found = bulk(shelf, [line(f"new-{i}") for i in range(count)])
    assert [one["sequence"] for one in found] == [*range(1, count + 1)]
    assert [len(group) for group in catalogue.groups] == [GROUP_LINES, GROUP_LINES, GROUP_LINES, 7]


def test_a_catalogue_that_is_not_ready_refuses_the_lines_and_not_the_bulk(shelf: Running, catalogue: FakeCatalogue) -> None:
    catalogue.failure = NotReady("The service is shutting down.")
    found = bulk(shelf, [line(f"new-{i}") for i in range(3)] + [b"{"])
    assert [one["status"] for one in found] == [503, 503, 503, 422]


def test_another_content_type_key_or_model_is_refused(shelf: Running) -> None:
    for headers, status in (({"Content-Type": "application/json"}, 415), (bearer("wrong-key-00000000"), 401), ({"Authorization": ""}, 401)):
        answer = shelf.client.post(BULK, content=line("a"), headers=HEADERS | headers)
        assert answer.status_code == problem(answer)["status"] == status
    assert shelf.client.post("/models/nobody/items", content=line("a"), headers=HEADERS).status_code == 404


def test_the_audit_log_has_a_line_for_a_bulk(shelf: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "service.audit")
    bulk(shelf, [line("a"), line("b"), b"{"], **{"X-Request-Id": "b-1"})
    [record] = [record for record in caplog.records if record.name == "service.audit"]
    fields = record.__dict__["fields"]
    assert (fields["action"], fields["model"], fields["request_id"]) == ("bulk", "books", "b-1")
    assert (fields["statuses"], fields["key"]) == ({"201": 2, "422": 1}, "953bd98b")


class Conversation:
    """A client that decides when it sends a line and when it reads one."""

    def __init__(self, running: Running) -> None:
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self.got: asyncio.Queue[Message] = asyncio.Queue()
        self.taking = asyncio.Event()
        self.taking.set()
        headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
        scope = {"type": "http", "method": "POST", "path": BULK, "query_string": b"", "headers": headers, "state": {}}
        self.task = asyncio.create_task(running.app(scope, self.sent.get, self.send))

    async def send(self, message: Message) -> None:
        await self.taking.wait()
        await self.got.put(message)

    def say(self, body: bytes, more: bool = True) -> None:
        self.sent.put_nowait({"type": "http.request", "body": body, "more_body": more})

    async def head(self) -> int:
        status: int = (await asyncio.wait_for(self.got.get(), 10))["status"]
        return status

    async def answers(self) -> AsyncIterator[Json]:
        while (message := await asyncio.wait_for(self.got.get(), 10)).get("body") != b"":
            for text in message["body"].splitlines():
                yield orjson.loads(text)


async def settled() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


async def test_a_line_is_answered_before_the_next_one_is_sent(shelf: Running) -> None:
    talk = Conversation(shelf)
    assert await talk.head() == 200
    answers = talk.answers()
    for i in range(3):
        talk.say(line(f"new-{i}") + b"\n")
        assert (await anext(answers))["sequence"] == i + 1
    talk.say(b"", more=False)
    assert [one async for one in answers] == []
    talk.sent.put_nowait({"type": "http.disconnect"})
    await talk.task


async def test_no_more_is_read_than_is_committed(shelf: Running, catalogue: FakeCatalogue) -> None:
    catalogue.go.clear()
    talk = Conversation(shelf)
    for i in range(10 * GROUP_LINES):
        talk.say(line(f"new-{i}") + b"\n")
    talk.say(b"", more=False)
    while not catalogue.groups:
        await asyncio.sleep(0)
    await settled()
    read = 10 * GROUP_LINES + 1 - talk.sent.qsize()
    assert read <= 2 * GROUP_LINES + 2  # a commit, the next one, and the line that waits for room
    catalogue.go.set()
    assert await talk.head() == 200
    found = [one async for one in talk.answers()]
    assert [one for one in found if "sequence" not in one] == []
    assert [one["sequence"] for one in found] == [*range(1, 10 * GROUP_LINES + 1)]


async def test_a_client_that_takes_no_outcomes_stops_the_commits(shelf: Running, catalogue: FakeCatalogue) -> None:
    talk = Conversation(shelf)
    assert await talk.head() == 200
    talk.taking.clear()
    for i in range(10 * GROUP_LINES):
        talk.say(line(f"new-{i}") + b"\n")
    await settled()
    await asyncio.sleep(3 * bulk_route.GROUP_S)
    await settled()
    assert len(catalogue.operations) <= 2 * GROUP_LINES
    talk.task.cancel()
    await asyncio.gather(talk.task, return_exceptions=True)


@pytest.mark.settings(catalogues=FakeCatalogues(books=catalogue), write_keys=(WRITE,), max_bulk=2)
async def test_only_some_bulks_are_read_at_a_time(running: Running) -> None:
    catalogue = FakeCatalogue()
    talks = [Conversation(running) for _ in range(2)]
    assert [await talk.head() for talk in talks] == [200, 200]
    third = Conversation(running)
    assert await third.head() == 429
    talks[0].sent.put_nowait({"type": "http.disconnect"})
    await talks[0].task
    fourth = Conversation(running)
    assert await fourth.head() == 200
    for talk in (talks[1], fourth):
        talk.sent.put_nowait({"type": "http.disconnect"})
        await talk.task
    assert 'espalier_live_refused_total{model="books",status="429"} 1.0' in (await running.client.http.get("/metrics")).text


@pytest.mark.settings(catalogues=FakeCatalogues(books=FakeCatalogue()), write_keys=(WRITE,), max_bulk=1)
async def test_the_next_bulk_may_come_with_the_end_of_one(running: Running) -> None:
    talk = Conversation(running)
    talk.say(line("a") + b"\n", more=False)
    assert await talk.head() == 200
    await anext(talk.answers())
    while talk.got.empty():
        await asyncio.sleep(0)
    again = Conversation(running)
    again.say(b"", more=False)
    talk.sent.put_nowait({"type": "http.disconnect"})
    again.sent.put_nowait({"type": "http.disconnect"})
    assert await again.head() == 200
    await asyncio.gather(talk.task, again.task)


@pytest.mark.settings(catalogues=FakeCatalogues(books=catalogue), write_keys=(WRITE,), max_bulk=1)
async def test_a_client_that_hangs_up_leaves_nothing_behind(running: Running, catalogue: FakeCatalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_routes, "FREE_BYTES", 0)
    budget = running.app.state.bodies["bulk"]
    catalogue.go.clear()
    talk = Conversation(running)
    talk.say(line("a") + b"\n" + line("b") + b"\n" + line("c")[:9])
    while not catalogue.groups:
        await asyncio.sleep(0)
    assert budget.left < budget.units
    talk.sent.put_nowait({"type": "http.disconnect"})
    await settled()
    assert budget.left < budget.units  # what was handed on is finished, and counts till then
    assert await Conversation(running).head() == 429
    catalogue.go.set()
    await talk.task
    assert budget.left == budget.units
    again = Conversation(running)
    again.say(b"", more=False)
    assert await again.head() == 200
    again.sent.put_nowait({"type": "http.disconnect"})
    await again.task


@pytest.mark.settings(catalogues=FakeCatalogues(books=FakeCatalogue()), write_keys=(WRITE,), stream_idle_s=0.05)
async def test_a_silent_bulk_ends_with_408(running: Running) -> None:
    talk = Conversation(running)
    talk.say(line("a") + b"\n")
    assert await talk.head() == 200
    assert [one["status"] async for one in talk.answers()] == [201, 408]


def test_a_worker_that_is_behind_makes_lines_202(shelf: Running, catalogue: FakeCatalogue) -> None:
    catalogue.visible = False
    assert bulk(shelf, [line("a")])[0]["status"] == 202
