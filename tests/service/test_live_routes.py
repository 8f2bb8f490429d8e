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

from espalier.checks.random_bundles import make_linear_bundle
from espalier.items import MAX_ID_BYTES
from espalier.manifest import Ranking
from espalier.queries import HistoryKind
from espalier.tree import complete_tree
from service.errors import CatalogueFull, Follows, NotWritable, QueueFull
from service.http import live_routes
from service.http.dependencies import FEEDS
from service.http.item_bodies import MAX_FIELDS_BYTES, VALUES
from service.http.item_schemas import MAX_EVENTS, MAX_LIKE
from tests.service.fake_catalogue import FakeCatalogue, FakeCatalogues
from tests.service.live_running import live_service
from tests.service.running import ITEMS, Json, Running, bearer, problem, run

RETRIEVE, WRITE, ADMIN = "retrieve-key-0001", "write-key-00000001", "admin-key-00000001"
EVENT = {"events": [["item-1", "item-2"]]}
A_TIME = "a time from 1970 to 9999, as 2027-01-31T12:00:00Z"


@pytest.fixture
def catalogue() -> FakeCatalogue:
    return FakeCatalogue(trained=[f"item-{i}" for i in range(ITEMS)])


@pytest.fixture
def shelf(models: Path, catalogue: FakeCatalogue) -> Iterator[Running]:
    catalogues = FakeCatalogues(books=catalogue, points=FakeCatalogue())
    with run(models, catalogues=catalogues, retrieve_keys=(RETRIEVE,), write_keys=(WRITE,), admin_keys=(ADMIN,)) as running:
        yield running


def path(item: str, model: str = "books") -> str:
    return f"/models/{model}/items/{quote(item, safe='')}"


def send(
    running: Running, method: str, item: str, body: Any = None, model: str = "books", key: str = WRITE, **headers: str
) -> httpx.Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()} | bearer(key)
    return running.client.request(method, path(item, model), headers=given, **({} if body is None else {"json": body}))


def put(running: Running, item: str, body: Any = EVENT, **rest: Any) -> httpx.Response:
    return send(running, "PUT", item, body, **rest)


def wrong(running: Running, body: Any, model: str = "books") -> tuple[str, str, str]:
    """Field, value and expectation of a body that must be refused with 422."""
    answer = put(running, "new", body, model=model)
    assert answer.status_code == 422, answer.text
    first: Json = problem(answer)["errors"][0]
    return first["field"], first["value"], first["expected"]


# -- what a write answers -------------------------------------------------------------------------------------------------


def test_a_new_item_is_201_with_its_sequence_as_tag(shelf: Running, catalogue: FakeCatalogue) -> None:
    body = {
        "fields": {"title": "New"},
        "like": ["item-3", "nobody"],
        "source_version": 7,
        "valid_until": "2030-01-31T12:00:00+02:00",
    } | EVENT
    answer = put(shelf, "new/one", body)
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


def test_what_is_there_is_200(shelf: Running) -> None:
    put(shelf, "new", EVENT | {"source_version": 7})
    said = [
        put(shelf, "new", body)
        for body in (EVENT | {"source_version": 7}, EVENT | {"source_version": 6}, EVENT | {"source_version": 8, "fields": {"title": "x"}})
    ]
    assert [answer.status_code for answer in said] == [200, 200, 200]
    assert [(answer.json()["outcome"], answer.json()["sequence"]) for answer in said] == [("unchanged", 1), ("stale", 1), ("updated", 2)]


def test_a_put_that_does_not_name_valid_until_leaves_it_and_null_lifts_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    until, later = "2130-01-31T12:00:00Z", "2140-01-31T12:00:00Z"
    with live_service(models, monkeypatch, write_keys=(WRITE,)) as live:
        shelf = live.running

        def stored() -> Any:
            return send(shelf, "GET", "new").json().get("valid_until")

        assert put(shelf, "new", {"like": ["item-1"], "valid_until": until}).status_code == 201
        assert put(shelf, "new", {"fields": {"title": "b"}}).json()["outcome"] == "updated"
        assert put(shelf, "new", {"like": ["item-2"]}).json()["outcome"] == "updated"
        assert put(shelf, "new", {}).json()["outcome"] == "unchanged"
        assert stored() == until
        assert put(shelf, "new", {"valid_until": later}).json()["outcome"] == "updated"
        assert stored() == later
        assert put(shelf, "new", {"valid_until": None}).json()["outcome"] == "updated"
        assert stored() is None
        put(shelf, "new", {"valid_until": until})
        headers = bearer(WRITE) | {"Content-Type": "application/x-ndjson"}
        for line, expected in ((b'{"id": "new", "fields": {"title": "c"}}', until), (b'{"id": "new", "valid_until": null}', None)):
            assert shelf.client.post("/models/books/items", content=line, headers=headers).status_code == 200
            assert stored() == expected


def test_an_item_whose_time_has_passed_comes_back_without_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch, write_keys=(WRITE,)) as live:
        put(live.running, "old", {"like": ["item-1"], "valid_until": "2001-01-31T12:00:00Z"})
        assert send(live.running, "GET", "old").status_code == 404
        assert put(live.running, "old", {"fields": {"title": "x"}}).json()["outcome"] == "inserted"
        assert "valid_until" not in send(live.running, "GET", "old").json()
        assert "old" in live.found("item-1")


def test_a_worker_that_is_behind_makes_it_202(shelf: Running, catalogue: FakeCatalogue) -> None:
    catalogue.visible = False
    assert (put(shelf, "new").status_code, send(shelf, "DELETE", "new").status_code) == (202, 202)


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


def test_an_item_reads_as_it_was_put(shelf: Running) -> None:
    body = {
        "fields": {"title": "New", "tags": ["a", "b"], "price": 2.5},
        "text": "words",
        "source_version": 7,
        "valid_until": "2030-01-31T12:00:00.250Z",
    }
    put(shelf, "new", body | EVENT)
    answer = send(shelf, "GET", "new")
    assert answer.headers["etag"] == '"1"'
    known = {"id": "new", "sequence": 1, "live": True, "at": "2027-01-15T08:00:01Z", "placed": {"version": 1, "parent": 7, "by": "events"}}
    assert answer.json() == known | EVENT | body | {"valid_until": "2030-01-31T12:00:00.250000Z"}
    trained = send(shelf, "GET", "item-3")
    assert (trained.headers["etag"], trained.json()["live"], trained.json()["at"]) == ('"0"', False, None)
    assert send(shelf, "HEAD", "new").status_code == 200


def test_a_body_without_anything_is_no_evidence(shelf: Running) -> None:
    assert wrong(shelf, {})[0] == "events"


# -- conditions -----------------------------------------------------------------------------------------------------------


def test_if_none_match_star_only_inserts(shelf: Running) -> None:
    assert put(shelf, "new", **{"If-None-Match": "*"}).status_code == 201
    again = put(shelf, "new", EVENT | {"fields": {}}, **{"If-None-Match": "*"})
    assert (again.status_code, again.headers["etag"]) == (412, '"1"')
    assert put(shelf, "item-1", **{"If-None-Match": "*"}).status_code == 412  # a trained item is there


def test_if_match_only_changes_what_was_read(shelf: Running) -> None:
    absent = put(shelf, "new", **{"If-Match": "*"})
    assert (absent.status_code, "etag" in absent.headers) == (412, False)
    put(shelf, "new")
    assert put(shelf, "new", {"fields": {"title": "a"}}, **{"If-Match": '"1"'}).status_code == 200
    assert put(shelf, "new", {"fields": {"title": "b"}}, **{"If-Match": '"1"'}).status_code == 412
    assert send(shelf, "DELETE", "new", **{"If-Match": 'W/"2"'}).status_code == 412  # a weak tag matches nothing here
    assert send(shelf, "DELETE", "new", **{"If-Match": '"9", "2"'}).status_code == 200


def test_a_get_that_knows_the_tag_is_304(shelf: Running) -> None:
    put(shelf, "new")
    answer = send(shelf, "GET", "new", **{"If-None-Match": 'W/"1"'})
    assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", '"1"')
    assert send(shelf, "GET", "new", **{"If-None-Match": '"2"'}).status_code == 200


# -- keys -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
def test_only_write_and_admin_keys_write(shelf: Running, method: str) -> None:
    assert shelf.client.request(method, path("item-1"), json=EVENT).status_code == 401
    assert send(shelf, method, "item-1", EVENT, key="wrong-key-00000000").status_code == 401
    assert send(shelf, method, "item-1", EVENT, key=RETRIEVE).status_code == 403
    assert send(shelf, method, "item-1", EVENT, key=ADMIN).status_code == 200


def test_a_write_key_neither_retrieves_nor_administers(shelf: Running) -> None:
    body = {"model": "books", "queries": [{"history": []}]}
    assert shelf.client.post("/retrieve", json=body, headers=bearer(WRITE)).status_code == 403
    assert shelf.client.get("/models", headers=bearer(WRITE)).status_code == 403
    assert shelf.client.get("/models/books/changes", headers=bearer(WRITE)).status_code == 403
    assert shelf.client.request("DELETE", "/models/books/removed/item-1", headers=bearer(WRITE)).status_code == 403


def test_without_write_keys_writing_is_off(models: Path) -> None:
    with run(models, catalogues=FakeCatalogues(books=FakeCatalogue()), admin_keys=(ADMIN,)) as running:
        for method in ("PUT", "GET", "DELETE"):
            answer = send(running, method, "new", EVENT, key=ADMIN)
            assert "ESPALIER_WRITE_KEYS" in problem(answer)["detail"]
            assert answer.status_code == 403


def test_the_key_is_checked_before_the_body_is_read(shelf: Running) -> None:
    answer = shelf.client.request("PUT", path("new"), content=b"x" * (2 << 20), headers={"Content-Type": "text/plain"})
    assert answer.status_code == 401


# -- limits: the largest that is taken, and one more ----------------------------------------------------------------------


def at_the_limit(running: Running, model: str, good: Json, bad: Json, field: str) -> str:
    assert put(running, "new", good, model=model).status_code in (200, 201), field
    found, _, expected = wrong(running, bad, model)
    assert found == field
    return expected


def test_events_and_likes_have_limits(shelf: Running) -> None:
    length = query_kind(shelf).length
    history = [f"item-{i}" for i in range(length + 1)]
    at_the_limit(shelf, "books", {"events": [["a"]] * MAX_EVENTS}, {"events": [["a"]] * (MAX_EVENTS + 1)}, "events")
    said = at_the_limit(shelf, "books", {"events": [["a"], history[1:]]}, {"events": [["a"], history]}, "events[1]")
    assert said == f"1 to {length} ids, the length of this model's histories"
    at_the_limit(shelf, "books", {"like": ["a"] * MAX_LIKE}, {"like": ["a"] * (MAX_LIKE + 1)}, "like")
    at_the_limit(shelf, "books", {"like": ["a" * MAX_ID_BYTES]}, {"like": ["a" * (MAX_ID_BYTES + 1)]}, "like[0]")
    longest = "ä" * (MAX_ID_BYTES // 2)
    at_the_limit(shelf, "books", {"events": [[longest]]}, {"events": [["a" * (MAX_ID_BYTES + 1)]]}, "events[0][0]")
    assert wrong(shelf, {"events": [[]]})[0] == "events[0]"
    at_the_limit(shelf, "books", EVENT | {"users": ["u"]}, EVENT | {"users": ["u", "v"]}, "users")


def query_kind(running: Running) -> HistoryKind:
    kind = running.app.state.service.registry.choose("books", None).bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    return kind


def test_fields_and_texts_have_limits(models: Path, catalogue: FakeCatalogue) -> None:
    room = MAX_FIELDS_BYTES - len(orjson.dumps({"title": ""}))
    with run(models, catalogues=FakeCatalogues(books=catalogue), write_keys=(WRITE,), max_text=10) as running:
        at_the_limit(running, "books", {"fields": {"title": "x" * room}} | EVENT, {"fields": {"title": "x" * (room + 1)}} | EVENT, "fields")
        at_the_limit(running, "books", {"text": "x" * 10}, {"text": "x" * 11}, "text")
        assert wrong(running, {"text": ""})[0] == "text"


def test_an_id_has_1_to_512_bytes_of_utf_8(shelf: Running) -> None:
    assert put(shelf, "x" * MAX_ID_BYTES).status_code == 201
    for method in ("PUT", "GET", "DELETE"):
        assert problem(send(shelf, method, "ä" * 257, EVENT))["errors"][0]["field"] == "id"
    answer = shelf.client.request("PUT", "/models/books/items/%ff", json=EVENT, headers=bearer(WRITE))
    assert (answer.status_code, problem(answer)["errors"][0]["expected"]) == (422, "an item id in UTF-8, percent-encoded")
    for odd in ("a/b/../c", "%2F", "line\nbreak", " ", "items/x", "ids?x=1#y"):
        assert put(shelf, odd).status_code == 201
        assert send(shelf, "GET", odd).json()["id"] == odd


def test_a_body_has_a_size_a_type_and_a_form(models: Path) -> None:
    with run(models, catalogues=FakeCatalogues(books=FakeCatalogue()), write_keys=(WRITE,), max_body_bytes=1000) as running:

        def raw(content: bytes, media_type: str = "application/json") -> httpx.Response:
            return running.client.request("PUT", path("new"), content=content, headers=bearer(WRITE) | {"Content-Type": media_type})

        body = orjson.dumps(EVENT)
        assert raw(body + b" " * (1000 - len(body))).status_code == 201
        assert raw(body + b" " * (1001 - len(body))).status_code == 413
        assert raw(body, "text/plain").status_code == 415
        for broken in (b"", b"{", b"[]", b"null", b"\xff", b'{"events": NaN}', b"[" * 900):
            assert problem(raw(broken))["status"] == 422, broken


@pytest.mark.settings(catalogues=FakeCatalogues(books=catalogue), write_keys=(WRITE,), max_body_bytes=1000)
async def test_large_bodies_share_their_memory(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_routes, "BODIES_BYTES", 1)
    monkeypatch.setattr(live_routes, "FREE_BYTES", 100)
    catalogue = FakeCatalogue()
    catalogue.go.clear()
    headers = bearer(WRITE)
    large = running.client.http.put(path("one"), json={"text": "x" * 900}, headers=headers)
    first = asyncio.create_task(large)
    while not running.app.state.bodies["item"].left < 1000:
        await asyncio.sleep(0)
    refused = await running.client.http.put(path("two"), json={"text": "x" * 900}, headers=headers)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    small = asyncio.create_task(running.client.http.put(path("three"), json={"text": "x"}, headers=headers))
    await asyncio.sleep(0)
    catalogue.go.set()
    assert [(await first).status_code, (await small).status_code] == [201, 201]
    assert running.app.state.bodies["item"].left == 1000


# -- bad input names field, value and expectation -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field", "value", "expected"),
    [
        ({"like": "item-1"}, "like", "'item-1'", "a valid array"),
        ({"events": [["a"], ["b", 5]]}, "events[1][1]", "5", 'a valid string: "5"'),
        ({"events": ["a"]}, "events[0]", "'a'", "a valid array"),
        ({"nothing": 1}, "nothing", "1", "only the fields fields, text, like, events, users, source_version, valid_until"),
        ({"fields": {"title": {"en": "x"}}}, "fields.title", "{'en': 'x'}", VALUES),
        ({"fields": {"tags": ["a", 1]}}, "fields.tags", "['a', 1]", VALUES),
        ({"fields": {"n": 2**63}}, "fields.n", str(2**63), VALUES),
        ({"source_version": -1}, "source_version", "-1", "greater than or equal to 0"),
        ({"source_version": 2**63}, "source_version", str(2**63), f"less than or equal to {2**63 - 1}"),
        ({"valid_until": "2030-02-30T00:00:00Z"}, "valid_until", "'2030-02-30T00:00:00Z'", A_TIME),
        ({"valid_until": "9999-12-31T23:59:59-23:00"}, "valid_until", "'9999-12-31T23:59:59-23:00'", A_TIME),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(shelf: Running, body: Json, field: str, value: str, expected: str) -> None:
    assert wrong(shelf, body) == (field, value, expected)


def test_a_time_needs_its_offset(shelf: Running) -> None:
    assert wrong(shelf, {"valid_until": "2030-01-31T12:00:00"}) == ("valid_until", "'2030-01-31T12:00:00'", A_TIME)
    assert wrong(shelf, {"valid_until": 1896084000})[0] == "valid_until"


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1e999"])
def test_a_field_that_is_no_number_is_refused(shelf: Running, number: bytes) -> None:
    headers = bearer(WRITE) | {"Content-Type": "application/json"}
    answer = shelf.client.request("PUT", path("new"), content=b'{"fields": {"price": %s}}' % number, headers=headers)
    assert (answer.status_code, problem(answer)["errors"][0]["field"]) == (422, "fields.price")


def test_events_are_of_the_models_kind(shelf: Running, tmp_path: Path) -> None:
    width = 4
    assert put(shelf, "p", {"events": [[0.0] * width, [1.5] * width]}, model="points").status_code == 201
    assert wrong(shelf, {"events": [["item-1"] * width]}, "points")[0] == "events[0][0]"
    assert wrong(shelf, {"events": [[0.0] * (width + 1)]}, "points") == ("events[0]", "'5 numbers'", "4 numbers")
    assert wrong(shelf, {"events": [[0.0, 0.0, -1e39, 1.0]]}, "points") == ("events[0]", "-1e+39", "32-bit numbers")
    rng = np.random.default_rng(5)
    make_linear_bundle(tmp_path, rng, complete_tree(rng.permutation(ITEMS), 2), Ranking(own="log_activation", gamma=1), name="rows")
    with run(tmp_path, catalogues=FakeCatalogues(rows=FakeCatalogue()), write_keys=(WRITE,), max_features=3) as rows:
        top = rows.app.state.service.registry.choose("rows", None).bundle.manifest.query.width

        def event(indices: list[int], values: list[float]) -> Json:
            return {"events": [{"indices": indices, "values": values}]}

        assert put(rows, "r", event([0, 1, top - 1], [1.0, 2.0, 3.0]), model="rows").status_code == 201
        for bad, field in (
            (event([0, 1, 2, 3], [1.0] * 4), "events[0].indices"),
            (event([], []), "events[0].indices"),
            (event([0, top], [1.0, 1.0]), "events[0].indices"),
            (event([1, 1], [1.0, 1.0]), "events[0].indices"),
            (event([0, 1], [1.0]), "events[0].values"),
            (event([0, 1], [1.0, 1e39]), "events[0].values"),
            ({"events": [{"indices": [0]}]}, "events[0].values"),
            ({"events": [{"indices": [0], "values": [1.0], "x": 1}]}, "events[0].x"),
        ):
            assert wrong(rows, bad, "rows")[0] == field


# -- what the catalogue refuses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "status", "headers"),
    [
        (QueueFull("Too many writes wait.", 3), 429, {"retry-after": "3"}),
        (CatalogueFull("65536 live items are there already."), 507, {}),
        (Follows("This host follows https://first.example."), 409, {}),
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
    text = shelf.client.get("/metrics").text
    counted = f'espalier_live_refused_total{{model="books",status="{status}"}} 1.0'
    assert (counted in text) == (status != 500)
    assert put(shelf, "new").status_code == 201


def test_an_unknown_model_is_404(shelf: Running) -> None:
    for method in ("PUT", "GET", "DELETE"):
        assert send(shelf, method, "x", EVENT, model="nobody").status_code == 404
    assert 'model="nobody"' not in shelf.client.get("/metrics").text


def test_a_delete_may_name_its_source_version(shelf: Running, catalogue: FakeCatalogue) -> None:
    put(shelf, "new")
    answer = shelf.client.request("DELETE", path("new") + "?source_version=9", headers=bearer(WRITE))
    assert (answer.status_code, catalogue.latest["new"].source_version) == (200, 9)
    for bad in ("-1", "x", "", str(2**63), "1_0", "٣"):
        refused = shelf.client.request("DELETE", path("new"), params={"source_version": bad}, headers=bearer(WRITE))
        assert (refused.status_code, problem(refused)["errors"][0]["field"]) == (422, "source_version")


def test_another_method_is_405(shelf: Running) -> None:
    answer = send(shelf, "POST", "x", EVENT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET, HEAD, PUT")
    assert shelf.client.get("/models/books/items/", headers=bearer(WRITE)).status_code == 404


def test_a_write_that_was_seen_by_all_is_timed(shelf: Running, catalogue: FakeCatalogue) -> None:
    put(shelf, "new")
    put(shelf, "new")  # unchanged
    catalogue.visible = False
    put(shelf, "other")
    assert 'espalier_live_visible_seconds_count{model="books"} 1.0' in shelf.client.get("/metrics").text


# -- the feed -------------------------------------------------------------------------------------------------------------


def feed(running: Running, **params: Any) -> Json:
    answer = running.client.get("/models/books/changes", params=params, headers=bearer(ADMIN))
    assert answer.status_code == 200, answer.text
    document: Json = answer.json()
    return document


def test_the_feed_has_every_operation_in_order(shelf: Running) -> None:
    body = {"fields": {"title": "x"}, "source_version": 3} | EVENT
    put(shelf, "a", body)
    send(shelf, "DELETE", "item-1")
    assert feed(shelf) == {
        "changes": [
            {"sequence": 1, "id": "a", "kind": "put", "at": "2027-01-15T08:00:01Z"} | body,
            {"sequence": 2, "id": "item-1", "kind": "delete", "at": "2027-01-15T08:00:02Z"},
        ],
        "sequence": 2,
        "dropped": 0,
        "journal": "fake",
    }
    assert feed(shelf, after=2) == {"changes": [], "sequence": 2, "dropped": 0, "journal": "fake"}


def test_the_feed_comes_in_pages(shelf: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(100):
        put(shelf, f"new-{i}", {"text": "x" * 100})
    assert [change["sequence"] for change in feed(shelf)["changes"]] == [*range(1, 101)]
    assert [change["sequence"] for change in feed(shelf, after=40, limit=50)["changes"]] == [*range(41, 91)]
    monkeypatch.setattr(live_routes, "CHANGES_BYTES", 1000)
    short = feed(shelf, after=10)
    assert len(short["changes"]) < 10
    assert (short["changes"][0]["sequence"], short["sequence"]) == (11, 100)


async def test_only_some_feeds_are_answered_at_a_time(shelf: Running, catalogue: FakeCatalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    put(shelf, "new")
    go = asyncio.Event()
    identity = catalogue.identity

    async def slow() -> str | None:
        await go.wait()
        return await identity()

    monkeypatch.setattr(catalogue, "identity", slow)
    def ask() -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(shelf.client.http.get("/models/books/changes", headers=bearer(ADMIN)))

    asked = [ask() for _ in range(FEEDS)]
    while shelf.app.state.service.feeds.left:
        await asyncio.sleep(0)
    refused = await ask()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    go.set()
    assert {(await answer).status_code for answer in asked} == {200}
    assert (await ask()).status_code == 200
    missing = await shelf.client.http.get("/models/books/changes?after=99", headers=bearer(ADMIN))
    assert missing.status_code in (200, 410)
    assert shelf.app.state.service.feeds.left == FEEDS


@pytest.mark.parametrize("params", [{"after": -1}, {"after": "x"}, {"limit": 0}, {"limit": live_routes.MAX_CHANGES + 1}])
def test_the_feeds_arguments_have_limits(shelf: Running, params: Json) -> None:
    assert shelf.client.get("/models/books/changes", params=params, headers=bearer(ADMIN)).status_code == 422


def test_a_model_says_how_full_its_live_catalogue_is(shelf: Running, catalogue: FakeCatalogue) -> None:
    put(shelf, "new")
    catalogue.behind = 1
    found = shelf.client.get("/models/books", headers=bearer(RETRIEVE)).json()["live"]
    assert found == {"sequence": 1, "applied": 0, "items": 1, "tombstones": 0, "capacity": 10_000, "reason": None}


# -- retrieval ------------------------------------------------------------------------------------------------------------


async def test_a_retrieval_waits_for_the_sequence_that_it_names(shelf: Running, catalogue: FakeCatalogue) -> None:
    for i in range(3):
        put(shelf, f"new-{i}")
    body = {"model": "books", "queries": [{"history": ["item-1"]}], "min_sequence": 3}
    assert shelf.client.post("/retrieve", json=body, headers=bearer(RETRIEVE)).status_code == 200
    catalogue.behind = 1
    late = shelf.client.post("/retrieve", json=body | {"timeout_ms": 5}, headers=bearer(RETRIEVE))
    assert (late.status_code, late.headers["retry-after"]) == (503, "1")
    assert problem(late)["detail"] == "min_sequence: got 3, and by the deadline this worker has the operations up to 2."
    waiting = asyncio.create_task(shelf.client.http.post("/retrieve", json=body, headers=bearer(RETRIEVE)))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not waiting.done()
    catalogue.behind = 0
    assert (await waiting).status_code == 200


@pytest.mark.parametrize(
    ("sequence", "timeout_ms", "status"), [(10**18, 1, "503-client"), (10**18, None, "503-client"), (3, 1, "503-client"), (3, 60, "503")]
)
def test_a_sequence_that_nobody_could_reach_is_no_failure_of_the_service(
    models: Path, catalogue: FakeCatalogue, sequence: int, timeout_ms: float | None, status: str
) -> None:
    with run(models, catalogues=FakeCatalogues(books=catalogue), write_keys=(WRITE,), timeout_ms=50) as running:
        for i in range(3):
            put(running, f"new-{i}")
        catalogue.behind = 1
        body: Json = {"model": "books", "queries": [{"history": ["item-1"]}], "min_sequence": sequence}
        body |= {} if timeout_ms is None else {"timeout_ms": timeout_ms}
        assert running.client.post("/retrieve", json=body).status_code == 503
        assert f'espalier_requests_total{{model="books",status="{status}"}} 1.0' in running.client.get("/metrics").text


@pytest.mark.parametrize("body", [{"min_sequence": -1}, {"min_sequence": "3"}, {"live": 1}])
def test_what_a_retrieval_says_of_the_live_catalogue_is_checked(shelf: Running, body: Json) -> None:
    whole = {"model": "books", "queries": [{"history": ["item-1"]}]} | body
    assert shelf.client.post("/retrieve", json=whole, headers=bearer(RETRIEVE)).status_code == 422
