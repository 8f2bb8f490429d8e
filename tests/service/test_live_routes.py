"""PUT, GET and DELETE of live items and the feed of changes, over a fake catalogue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import orjson
import pytest

from benchmarks.random_bundles import make_linear_bundle
from espalier.items import MAX_ID_BYTES
from espalier.manifest import Ranking
from espalier.tree import complete_tree
from service.errors import CatalogueFull, Conflict, NotWritable, QueueFull
from service.http import live_routes
from service.http.dependencies import FEEDS
from service.http.item_bodies import MAX_FIELDS_BYTES, VALUES
from service.http.item_schemas import MAX_EVENTS, MAX_LIKE
from service.retrieval import retrieve as retrieve_module
from service.retrieval.request import encode
from tests.service.fake_catalogue import ADMIN, WRITE, FakeCatalogue, FakeCatalogues
from tests.service.live_running import Live
from tests.service.own_time import settled
from tests.service.running import ITEMS, Json, Running, bearer, counted, document, ids, problem, run

EVENT = {"events": [["item-1", "item-2"]]}
A_TIME = "a time from 1970 to 9999, as 2027-01-31T12:00:00Z"
QUERY: Json = {"model": "books", "queries": [{"history": ["item-1"]}]}


def path(item: str, model: str = "books") -> str:
    return f"/models/{model}/items/{quote(item, safe='')}"


def send(running: Running, method: str, item: str, body: Any = None, model: str = "books", **headers: str) -> httpx.Response:
    """headers: with _ for -."""
    given = {name.replace("_", "-"): value for name, value in headers.items()} | bearer(WRITE)
    return running.client.request(method, path(item, model), headers=given, **({} if body is None else {"json": body}))


def put(running: Running, item: str, body: Any = EVENT, **rest: Any) -> httpx.Response:
    return send(running, "PUT", item, body, **rest)


@pytest.fixture(scope="module")
def shared(models: Path) -> Iterator[Running]:
    """A service for tests that leave no item in it."""
    catalogues = FakeCatalogues(books=FakeCatalogue())
    with run(models, catalogues=catalogues, write_keys=(WRITE,), max_text=10) as started:
        yield started


def wrong(running: Running, body: Any, model: str = "books") -> tuple[str, str | None, str]:
    """Field, value (None: missing) and expectation of a body that must be refused with 422."""
    answer = put(running, "new", body, model=model)
    assert answer.status_code == 422, answer.text
    first: Json = problem(answer)["errors"][0]
    return first["field"], first.get("value"), first["expected"]


# -- what a write answers -------------------------------------------------------------------------------------------------


def test_a_new_item_is_201_with_its_sequence_as_tag(shelf: Running, catalogue: FakeCatalogue) -> None:
    told = {"fields": {"title": "New"}, "like": ["item-3", "nobody"], "source_version": 7, "valid_until": "2030-01-31T12:00:00+02:00"}
    answer = put(shelf, "new/one", told | EVENT)
    assert (answer.status_code, answer.headers["etag"]) == (201, '"1"')
    assert answer.json() == {
        "sequence": 1,
        "outcome": "inserted",
        "visible": True,
        "placed": {"version": 1, "parent": 7, "by": "events"},
        "unknown": ["nobody"],
    }
    operation = catalogue.latest["new/one"]
    assert (operation.source_version, operation.body.valid_until) == (7, 1896084000.0)
    assert (operation.body.events, operation.body.like) == ((["item-1", "item-2"],), ("item-3", "nobody"))


@pytest.mark.settings(write_keys=(WRITE,))
@pytest.mark.parametrize("query", [{"history": ["item-1"], "exclude": ["late"]}, {"history": ["item-1", "late"], "exclude_seen": True}])
def test_an_item_that_comes_after_a_request_excluded_it_is_excluded(live: Live, monkeypatch: pytest.MonkeyPatch, query: Json) -> None:
    views: list[Any] = []

    def encoded_as_before(checked: Any, view: Any, *rest: Any) -> Any:
        views.append(view)
        return encode(checked, views[0], *rest)

    monkeypatch.setattr(retrieve_module, "encode", encoded_as_before)
    body = QUERY | {"m": 40, "beam_size": 64}
    live.running.retrieve(**body)
    assert put(live.running, "late", {"like": ["item-1"]}).status_code == 201
    assert "late" in ids(live.running.retrieve(**body)["results"][0])
    (result,) = live.running.retrieve(**body | {"queries": [query]})["results"]
    assert result["unknown"] == ["late"]
    assert "late" not in ids(result)
    assert result["items"]
    assert send(live.running, "DELETE", "late").status_code == 200


@pytest.mark.settings(write_keys=(WRITE,))
def test_a_put_that_does_not_name_valid_until_leaves_it_and_null_lifts_it(live: Live) -> None:
    until, later = "2130-01-31T12:00:00Z", "2140-01-31T12:00:00Z"
    shelf = live.running

    def stored() -> Any:
        return send(shelf, "GET", "new").json().get("valid_until")

    for body, outcome, expected in (
        ({"like": ["item-1"], "valid_until": until}, "inserted", until),
        ({"fields": {"title": "b"}}, "updated", until),
        ({"like": ["item-2"]}, "updated", until),
        ({}, "unchanged", until),
        ({"valid_until": later}, "updated", later),
        ({"valid_until": None}, "updated", None),
        ({"valid_until": until}, "updated", until),
    ):
        assert (put(shelf, "new", body).json()["outcome"], stored()) == (outcome, expected)
    headers = bearer(WRITE) | {"Content-Type": "application/x-ndjson"}
    for line, expected in ((b'{"id": "new", "fields": {"title": "c"}}', until), (b'{"id": "new", "valid_until": null}', None)):
        assert shelf.client.post("/models/books/items", content=line, headers=headers).status_code == 200
        assert stored() == expected
    put(shelf, "old", {"like": ["item-1"], "valid_until": "2001-01-31T12:00:00Z"})
    assert send(shelf, "GET", "old").status_code == 404
    assert put(shelf, "old", {"fields": {"title": "x"}}).json()["outcome"] == "inserted"
    assert "valid_until" not in send(shelf, "GET", "old").json()
    assert "old" in live.found("item-1")


def test_a_worker_that_is_behind_makes_it_202_and_no_visible_write(shelf: Running, catalogue: FakeCatalogue) -> None:
    put(shelf, "new")
    put(shelf, "new")  # unchanged
    catalogue.visible = False
    assert (put(shelf, "other").status_code, send(shelf, "DELETE", "new").status_code) == (202, 202)
    assert counted(shelf)['espalier_live_visible_seconds_count{model="books"}'] == 1


def test_a_deleted_item_is_gone_and_comes_back(shelf: Running) -> None:
    put(shelf, "new")
    deleted = send(shelf, "DELETE", "new")
    assert (deleted.status_code, deleted.json()["outcome"], deleted.headers["etag"]) == (200, "deleted", '"2"')
    assert send(shelf, "DELETE", "new").json()["outcome"] == "unchanged"
    assert send(shelf, "GET", "new").status_code == 404
    assert send(shelf, "DELETE", "never").status_code == 404
    assert put(shelf, "new").status_code == 201
    assert send(shelf, "DELETE", "item-1").json()["outcome"] == "deleted"
    assert put(shelf, "item-1", {}).status_code == 201


def test_a_delete_may_name_its_source_version(shelf: Running, catalogue: FakeCatalogue) -> None:
    put(shelf, "new")
    answer = shelf.client.request("DELETE", path("new") + "?source_version=9", headers=bearer(WRITE))
    assert (answer.status_code, catalogue.latest["new"].source_version) == (200, 9)
    for bad in ("", "1_0", "٣"):
        refused = shelf.client.request("DELETE", path("new"), params={"source_version": bad}, headers=bearer(WRITE))
        assert (refused.status_code, problem(refused)["errors"][0]["field"]) == (422, "source_version")


def test_an_item_reads_as_it_was_put(shelf: Running) -> None:
    fields = {"title": "New", "tags": ["a", "b"], "price": 2.5, "sizes": [38, 39.5], "hash": 2**64 - 1}
    body = EVENT | {"fields": fields, "text": "words", "source_version": 7, "valid_until": "2030-01-31T12:00:00.250Z", "count": 40}
    put(shelf, "new", body)
    answer = send(shelf, "GET", "new")
    assert answer.headers["etag"] == '"1"'
    known = {"id": "new", "sequence": 1, "live": True, "at": "2027-01-15T08:00:01Z", "placed": {"version": 1, "parent": 7, "by": "events"}}
    assert answer.json() == known | body | {"valid_until": "2030-01-31T12:00:00.250000Z"}
    trained = send(shelf, "GET", "item-3")
    assert (trained.headers["etag"], trained.json()["live"], trained.json()["at"]) == ('"0"', False, None)
    assert send(shelf, "HEAD", "new").status_code == 200


# -- conditions -----------------------------------------------------------------------------------------------------------


def test_if_match_only_changes_what_was_read(shelf: Running) -> None:
    absent = put(shelf, "new", If_Match="*")
    assert (absent.status_code, "etag" in absent.headers) == (412, False)
    put(shelf, "new")
    assert put(shelf, "new", {"fields": {"title": "a"}}, If_Match='"1"').status_code == 200
    assert put(shelf, "new", {"fields": {"title": "b"}}, If_Match='"1"').status_code == 412
    for known, status in (('W/"2"', 304), ('"1"', 200)):
        answer = send(shelf, "GET", "new", If_None_Match=known)
        assert (answer.status_code, bool(answer.content), answer.headers["etag"]) == (status, status == 200, '"2"')
    assert send(shelf, "DELETE", "new", If_Match='W/"2"').status_code == 412  # a weak tag matches nothing here
    assert send(shelf, "DELETE", "new", If_Match='"9", "2"').status_code == 200


# -- limits: the largest that is taken, and one more ----------------------------------------------------------------------

LENGTH = 5
"""Of the model's histories."""
LONGEST = "ä" * (MAX_ID_BYTES // 2)
ROOM = MAX_FIELDS_BYTES - len(orjson.dumps({"title": ""}))


@pytest.mark.parametrize(
    ("good", "bad", "field"),
    [
        ({"events": [["a"]] * MAX_EVENTS}, {"events": [["a"]] * (MAX_EVENTS + 1)}, "events"),
        ({"events": [["a"], ["b"] * LENGTH]}, {"events": [["a"], ["b"] * (LENGTH + 1)]}, "events[1]"),
        ({"events": [["a"]]}, {"events": [[]]}, "events[0]"),
        ({"events": [[LONGEST]]}, {"events": [["a" * (MAX_ID_BYTES + 1)]]}, "events[0][0]"),
        ({"like": ["a"] * MAX_LIKE}, {"like": ["a"] * (MAX_LIKE + 1)}, "like"),
        ({"like": ["a" * MAX_ID_BYTES]}, {"like": ["a" * (MAX_ID_BYTES + 1)]}, "like[0]"),
        (EVENT | {"users": ["u"]}, EVENT | {"users": ["u", "v"]}, "users"),
        (EVENT | {"fields": {"title": "x" * ROOM}}, EVENT | {"fields": {"title": "x" * (ROOM + 1)}}, "fields"),
        ({"text": "x" * 10}, {"text": "x" * 11}, "text"),
        ({"text": "x"}, {"text": ""}, "text"),
        (EVENT, {}, "events"),  # no evidence
    ],
)
def test_bodies_have_limits(shared: Running, good: Json, bad: Json, field: str) -> None:
    assert wrong(shared, bad)[0] == field
    assert put(shared, "new", good).status_code == 201
    assert send(shared, "DELETE", "new").status_code == 200


def test_an_id_has_1_to_512_bytes_of_utf_8(shelf: Running) -> None:
    assert put(shelf, "x" * MAX_ID_BYTES).status_code == 201
    for method in ("PUT", "GET", "DELETE"):
        assert problem(send(shelf, method, "ä" * 257, EVENT))["errors"][0]["field"] == "id"
    answer = shelf.client.request("PUT", "/models/books/items/%ff", json=EVENT, headers=bearer(WRITE))
    assert (answer.status_code, problem(answer)["errors"][0]["expected"]) == (422, "an item id in UTF-8, percent-encoded")
    assert shelf.client.get("/models/books/items/", headers=bearer(WRITE)).status_code == 404
    for odd in ("a/b/../c", "%2F", "line\nbreak", " ", "items/x", "ids?x=1#y"):
        assert put(shelf, odd).status_code == 201
        assert send(shelf, "GET", odd).json()["id"] == odd


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies of more than 100 bytes share the size of one."""
    monkeypatch.setattr(live_routes, "BODIES_BYTES", 1)
    monkeypatch.setattr(live_routes, "FREE_BYTES", 100)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.settings(max_body_bytes=1000)
async def test_large_bodies_share_their_memory(shelf: Running, catalogue: FakeCatalogue) -> None:
    def sent(item: str, size: int) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(shelf.client.http.put(path(item), json={"text": "x" * size}, headers=bearer(WRITE)))

    catalogue.go.clear()
    first = sent("one", 900)
    await settled()
    assert shelf.app.state.bodies["item"].available < 1000
    refused = await sent("two", 900)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    small = sent("three", 1)
    await settled()
    catalogue.go.set()
    assert [(await first).status_code, (await small).status_code] == [201, 201]
    assert shelf.app.state.bodies["item"].available == 1000


# -- bad input names field, value and expectation -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field", "value", "expected"),
    [
        ({"like": "item-1"}, "like", '"item-1"', "a valid array"),
        ({"events": [["a"], ["b", 5]]}, "events[1][1]", "5", 'a valid string: "5"'),
        ({"events": [["a"], ["b"] * 6]}, "events[1]", '"6 ids"', "1 to 5 ids, the length of this model's histories"),
        ({"nothing": 1}, "nothing", "1", "only the fields fields, text, like, events, users, source_version, valid_until, count"),
        ({"count": 0}, "count", "0", "greater than or equal to 1"),
        ({"count": 2.5}, "count", "2.5", "a valid integer"),
        ({"count": 2**53 + 1}, "count", str(2**53 + 1), f"less than or equal to {2**53}"),
        ({"events": [["a"], ["b"]], "count": 1}, "count", "1", "at least 2, the number of events in the body"),
        ({"fields": {"title": {"en": "x"}}}, "fields.title", '{"en": "x"}', VALUES),
        ({"fields": {"tags": ["a", ["b"]]}}, "fields.tags", '["a", ["b"]]', VALUES),
        ({"fields": {"n": 2**64}}, "fields.n", str(2**64), VALUES),
        ({"source_version": 2**63}, "source_version", str(2**63), f"less than or equal to {2**63 - 1}"),
        ({"valid_until": "2030-02-30T00:00:00Z"}, "valid_until", '"2030-02-30T00:00:00Z"', A_TIME),
        ({"valid_until": "9999-12-31T23:59:59-23:00"}, "valid_until", '"9999-12-31T23:59:59-23:00"', A_TIME),
        ({"valid_until": "2030-01-31T12:00:00"}, "valid_until", '"2030-01-31T12:00:00"', A_TIME),
    ],
)
def test_a_wrong_value_is_named(shared: Running, body: Json, field: str, value: str, expected: str) -> None:
    assert wrong(shared, body) == (field, value, expected)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1e999"])
def test_a_field_that_is_no_number_is_refused(shared: Running, number: bytes) -> None:
    headers = bearer(WRITE) | {"Content-Type": "application/json"}
    answer = shared.client.request("PUT", path("new"), content=b'{"fields": {"price": %s}}' % number, headers=headers)
    assert (answer.status_code, problem(answer)["errors"][0]["field"]) == (422, "fields.price")


def test_events_are_of_the_models_kind(shelf: Running, tmp_path: Path) -> None:
    width = 4
    assert put(shelf, "p", {"events": [[0.0] * width, [1.5] * width]}, model="points").status_code == 201
    assert wrong(shelf, {"events": [["item-1"] * width]}, "points")[0] == "events[0][0]"
    assert wrong(shelf, {"events": [[0.0] * (width + 1)]}, "points") == ("events[0]", '"5 numbers"', "4 numbers")
    assert wrong(shelf, {"events": [[0.0, 0.0, -1e39, 1.0]]}, "points") == ("events[0]", "-1e+39", "32-bit numbers")
    rng = np.random.default_rng(5)
    made = make_linear_bundle(tmp_path, rng, complete_tree(rng.permutation(ITEMS), 2), Ranking(own="log_activation", gamma=1), name="rows")
    top: int = made.manifest.query.width  # type: ignore[union-attr]  # of features
    with run(tmp_path, catalogues=FakeCatalogues(rows=FakeCatalogue()), write_keys=(WRITE,), max_features=3) as rows:
        for indices, values, field in (
            ([0, 1, top - 1], [1.0, 2.0, 3.0], None),
            ([0, 1, 2, 3], [1.0] * 4, "indices"),
            ([], [], "indices"),
            ([0, top], [1.0, 1.0], "indices"),
            ([1, 1], [1.0, 1.0], "indices"),
            ([0, 1], [1.0], "values"),
            ([0, 1], [1.0, 1e39], "values"),
        ):
            answer = put(rows, "r", {"events": [{"indices": indices, "values": values}]}, model="rows")
            said = problem(answer)["errors"][0]["field"] if answer.status_code == 422 else None
            assert said == (None if field is None else f"events[0].{field}")
        for event, said in (({"indices": [0]}, "events[0].values"), ({"indices": [0], "values": [1.0], "x": 1}, "events[0].x")):
            assert wrong(rows, {"events": [event]}, "rows")[0] == said


# -- what the catalogue refuses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "status", "headers"),
    [
        (QueueFull("Too many writes wait.", 3), 429, {"retry-after": "3"}),
        (CatalogueFull("65536 live items are there already."), 507, {}),
        (Conflict("This host follows https://first.example."), 409, {}),
        (NotWritable("live.db: no space left on device."), 503, {"retry-after": "1"}),
        (RuntimeError("secret"), 500, {}),
    ],
)
def test_a_refusal_has_its_status_and_is_counted(
    shelf: Running, catalogue: FakeCatalogue, failure: Exception, status: int, headers: dict[str, str]
) -> None:
    catalogue.failure = failure
    answer = put(shelf, "new")
    assert answer.status_code == problem(answer)["status"] == status
    assert headers.items() <= dict(answer.headers).items()
    assert "secret" not in answer.text
    refused = counted(shelf).get(f'espalier_live_refused_total{{model="books",status="{status}"}}')
    assert refused == (None if status == 500 else 1)
    assert put(shelf, "new").status_code == 201


# -- the feed -------------------------------------------------------------------------------------------------------------


def feed(running: Running, **params: Any) -> Json:
    return document(running.client.get("/models/books/changes", params=params, headers=bearer(ADMIN)))


def test_the_feed_has_every_operation_in_order(shelf: Running) -> None:
    body = {"fields": {"title": "x"}, "source_version": 3} | EVENT
    put(shelf, "a", body)
    send(shelf, "DELETE", "item-1")
    changes = [
        {"sequence": 1, "id": "a", "kind": "put", "at": "2027-01-15T08:00:01Z"} | body,
        {"sequence": 2, "id": "item-1", "kind": "delete", "at": "2027-01-15T08:00:02Z"},
    ]
    assert feed(shelf) == {"changes": changes, "sequence": 2, "dropped": 0, "journal": "fake"}
    assert feed(shelf, after=2) == {"changes": [], "sequence": 2, "dropped": 0, "journal": "fake"}


def test_the_feed_ends_where_numbers_without_operations_follow(
    shelf: Running, catalogue: FakeCatalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restore the journal goes on far above its last operation."""
    put(shelf, "a")
    put(shelf, "b")

    async def committed() -> int:
        return 1 << 32

    monkeypatch.setattr(catalogue, "committed", committed)
    assert [feed(shelf, after=after)["sequence"] for after in (0, 1, 2)] == [2, 2, 2]


def test_the_feed_comes_in_pages(shelf: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(30):
        put(shelf, f"new-{i}", {"text": "x" * 100})
    assert [change["sequence"] for change in feed(shelf)["changes"]] == [*range(1, 31)]
    assert [change["sequence"] for change in feed(shelf, after=4, limit=20)["changes"]] == [*range(5, 25)]
    monkeypatch.setattr(live_routes, "CHANGES_BYTES", 1000)
    short = feed(shelf, after=10)
    assert len(short["changes"]) < 10
    assert (short["changes"][0]["sequence"], short["sequence"]) == (11, 30)


async def test_only_some_feeds_are_answered_at_a_time(shelf: Running, catalogue: FakeCatalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    go, identity = asyncio.Event(), catalogue.identity

    async def slow() -> str | None:
        await go.wait()
        return await identity()

    def ask(after: int = 0) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(shelf.client.http.get(f"/models/books/changes?after={after}", headers=bearer(ADMIN)))

    monkeypatch.setattr(catalogue, "identity", slow)
    asked = [ask() for _ in range(FEEDS)]
    await settled()
    refused = await ask()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    go.set()
    assert {(await answer).status_code for answer in asked} == {200}
    assert (await ask()).status_code == 200
    assert (await ask(after=99)).status_code in (200, 410)
    assert shelf.app.state.service.feeds.available == FEEDS


def test_a_model_says_how_full_its_live_catalogue_is(shelf: Running, catalogue: FakeCatalogue) -> None:
    put(shelf, "new")
    catalogue.behind = 1
    found = shelf.client.get("/models/books").json()["live"]
    assert found == {"sequence": 1, "applied": 0, "items": 1, "tombstones": 0, "capacity": 10_000, "reason": None}


# -- retrieval ------------------------------------------------------------------------------------------------------------


async def test_a_retrieval_waits_for_the_sequence_that_it_names(shelf: Running, catalogue: FakeCatalogue) -> None:
    http, body = shelf.client.http, QUERY | {"min_sequence": 3}
    for i in range(3):
        await http.put(path(f"new-{i}"), json=EVENT, headers=bearer(WRITE))
    assert (await http.post("/retrieve", json=body)).status_code == 200
    catalogue.behind = 1
    late = await http.post("/retrieve", json=body | {"timeout_ms": 5})
    assert (late.status_code, late.headers["retry-after"]) == (503, "1")
    assert problem(late)["detail"] == "min_sequence: got 3, and by the deadline this worker has the operations up to 2."
    waiting = asyncio.create_task(http.post("/retrieve", json=body))
    await settled()
    assert not waiting.done()
    catalogue.behind = 0
    assert (await waiting).status_code == 200


@pytest.mark.settings(timeout_ms=50)
@pytest.mark.parametrize(
    ("sequence", "timeout_ms", "status"), [(10**18, 1, "503-client"), (10**18, None, "503-client"), (3, 1, "503-client"), (3, 60, "503")]
)
def test_a_sequence_that_nobody_could_reach_is_no_failure_of_the_service(
    shelf: Running, catalogue: FakeCatalogue, sequence: int, timeout_ms: float | None, status: str
) -> None:
    for i in range(3):
        put(shelf, f"new-{i}")
    catalogue.behind = 1
    body = QUERY | {"min_sequence": sequence} | ({} if timeout_ms is None else {"timeout_ms": timeout_ms})
    assert shelf.client.post("/retrieve", json=body).status_code == 503
    assert counted(shelf)[f'espalier_requests_total{{model="books",status="{status}"}}'] == 1
