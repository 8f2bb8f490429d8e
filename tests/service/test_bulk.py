"""POST /models/{name}/items: many writes in one request, over a fake catalogue."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from service.errors import NotReady
from service.http import bulk_route, live_routes
from service.http.bulk_route import GROUP_LINES, GROUP_S
from tests.service.conversation import LINES, Conversation, sent
from tests.service.fake_catalogue import WRITE, FakeCatalogue
from tests.service.own_time import pass_time, settled
from tests.service.running import Json, Running, bearer, counted

BULK = "/models/books/items"
HEADERS = LINES | bearer(WRITE)


def line(item: str, **rest: Any) -> bytes:
    return orjson.dumps({"id": item} | (rest or {"events": [["item-1"]]}))


def bulk(running: Running, lines: list[bytes], **headers: str) -> list[Json]:
    return sent(running, BULK, b"\n".join(lines), **HEADERS, **headers)


def talking(running: Running) -> Conversation:
    return Conversation(running, BULK, HEADERS)


def test_each_line_gets_its_outcome_in_order(shelf: Running, catalogue: FakeCatalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_route, "GROUP_S", 60)  # a slow machine ends no group
    expected: list[tuple[bytes, Json]] = [
        (line("a"), {"id": "a", "status": 201, "sequence": 1, "outcome": "inserted"}),
        (line("a"), {"id": "a", "status": 200, "sequence": 1, "outcome": "unchanged"}),
        (line("item-2", delete=True), {"id": "item-2", "status": 200, "sequence": 2, "outcome": "deleted"}),
        (
            line("b", like=["item-3", "nobody"], source_version=4),
            {"id": "b", "status": 201, "sequence": 3, "outcome": "inserted", "unknown": ["nobody"]},
        ),
        (line("b", like=["item-3"], source_version=3), {"id": "b", "status": 200, "sequence": 3, "outcome": "stale"}),
        (line("a", delete=True, source_version=9), {"id": "a", "status": 200, "sequence": 4, "outcome": "deleted"}),
    ]
    assert bulk(shelf, [asked for asked, _ in expected]) == [outcome for _, outcome in expected]
    assert [len(group) for group in catalogue.groups] == [6]
    catalogue.visible = False
    assert bulk(shelf, [line("c")])[0]["status"] == 202  # a worker is behind


@pytest.mark.settings(max_body_bytes=1000)
def test_a_wrong_line_costs_one_line(shelf: Running) -> None:
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
    found = bulk(shelf, [part for bad, _, _ in wrong for part in (line("a"), bad, b"", b"  ")])
    assert [one["outcome"] for one in found[::2]] == ["inserted"] + ["unchanged"] * (len(wrong) - 1)
    assert [(one["id"], one["status"]) for one in found[1::2]] == [(item, status) for _, item, status in wrong]
    assert all({"type", "title", "detail"} <= one.keys() for one in found[1::2])
    assert found[15]["errors"][0]["expected"] == "an id and perhaps a source_version beside it, and no text"
    refused = [counted(shelf)[f'espalier_live_refused_total{{model="books",status="{status}"}}'] for status in (422, 404, 413)]
    assert refused == [9, 1, 1]


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


def test_the_audit_log_has_a_line_for_a_bulk(shelf: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "service.audit")
    bulk(shelf, [line("a"), line("b"), b"{"], **{"X-Request-Id": "b-1"})
    [record] = [record for record in caplog.records if record.name == "service.audit"]
    fields = record.__dict__["fields"]
    assert (fields["action"], fields["model"], fields["request_id"]) == ("bulk", "books", "b-1")
    assert (fields["statuses"], fields["key"]) == ({"201": 2, "422": 1}, "953bd98b")


async def test_no_more_is_read_than_is_committed(shelf: Running, catalogue: FakeCatalogue) -> None:
    catalogue.go.clear()
    talk = talking(shelf)
    talk.say(*(line(f"new-{i}") for i in range(10 * GROUP_LINES)), more=False)
    while not catalogue.groups:
        await asyncio.sleep(0)
    await settled(200)
    assert talk.asked <= 2 * GROUP_LINES + 3  # a commit, the next one, and the line that waits for room
    catalogue.go.set()
    assert await talk.head() == 200
    assert [one["sequence"] async for one in talk.answers()] == [*range(1, 10 * GROUP_LINES + 1)]


async def test_a_client_that_takes_no_outcomes_stops_the_commits(shelf: Running, catalogue: FakeCatalogue) -> None:
    talk = talking(shelf)
    assert await talk.head() == 200
    talk.take(False)
    talk.say(*(line(f"new-{i}") for i in range(10 * GROUP_LINES)))
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
    talk.say(line("a"), more=False)
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
    talk.say(line("a"), line("b"))
    talk.say_piece(line("c")[:9])
    await settled()
    await pass_time(GROUP_S)
    assert catalogue.groups
    assert budget.left < budget.units
    await talk.leave()
    assert budget.left < budget.units  # what was handed on is finished, and counts till then
    assert await talking(shelf).head() == 429
    catalogue.go.set()
    await talk.task
    assert budget.left == budget.units
    again = talking(shelf)
    again.say(more=False)
    assert await again.head() == 200
    await again.leave()
    await again.task
