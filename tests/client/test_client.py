"""The client, over a stub of the service: in memory, and over sockets where the connection itself matters."""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import fields
from importlib import import_module
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import espalier_client
from espalier_client import (
    Answer,
    AsyncClient,
    Change,
    Changes,
    Client,
    Completion,
    Coverage,
    InvalidAnswer,
    Item,
    ItemOutcome,
    LiveItem,
    Placement,
    Put,
    Query,
    Readiness,
    Removal,
    RemovedIds,
    RemovedItem,
    Request,
    Result,
    Retry,
    Timing,
    Unavailable,
    Version,
)
from espalier_client.errors import from_problem
from espalier_client.messages import Options
from tests import ROOT
from tests.client.stub import FACETS, KEY, NODE, URL, Driver, Json, Stub, answer_to, refuse, serving


def test_both_clients_take_the_same() -> None:
    def shape(kind: type, method: str) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(getattr(kind, method)).parameters.values()
        return [(one.name, one.kind, one.default) for one in parameters if one.name != "sleep"]

    for method in ["__init__", *(name for name in vars(Client) if not name.startswith("_"))]:
        assert shape(Client, method) == shape(AsyncClient, method), method
    assert list(Options.__annotations__) == [one.name for one in fields(Request) if one.name != "queries"]


def test_without_httpx_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("espalier_client", "espalier_client.client"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ModuleNotFoundError, match=r"^the client needs httpx: pip install 'espalier\[client\]'$"):
        import_module("espalier_client")


def test_retrieve_and_that_cookies_are_not_kept(driver: Driver) -> None:
    stub = Stub()
    answer = driver.open(stub).retrieve([Query(history=["b1", "b2"]), Query()], m=5, beam_size=7, fields=["title"])
    items = (Item("b1", 0.5, {"title": "b1"}), Item("b2", 0.5, {"title": "b2"}))
    results = (Result(items, True, 7, False, ()), Result((), True, 7, False, ()))
    assert answer == Answer("books", 3, "fake", results, Timing(0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 2))
    (request,) = stub.requests
    assert (request.method, str(request.url)) == ("POST", f"{URL}/retrieve")
    assert request.headers["Content-Type"] == "application/json"
    assert "Authorization" not in request.headers
    assert stub.bodies == [{"queries": [{"history": ["b1", "b2"]}, {"history": []}], "m": 5, "beam_size": 7, "fields": ["title"]}]
    stub = Stub([httpx.Response(200, json={"ready": True, "reasons": []}, headers={"Set-Cookie": "c=1; Max-Age=99999"})])
    driver.open(stub)
    assert driver.ready() == driver.ready()
    assert ["Cookie" in request.headers for request in stub.requests] == [False, False]


def test_whose_request_it_is_is_said_in_headers(driver: Driver) -> None:
    stub = Stub()
    driver.open(stub).retrieve([Query()], user="Zoë/1", group="beta")
    driver.retrieve([Query()])
    given = [(request.headers.get("Espalier-User"), request.headers.get("Espalier-Group")) for request in stub.requests]
    assert given == [("Zo%C3%AB/1", "beta"), (None, None)]


def test_everything_that_can_be_asked_is_sent(driver: Driver) -> None:
    stub = Stub()
    queries = [Query(vector=np.array([0.5, 2], np.float32), exclude=(id for id in ("b1",))), Query(history=["b2"], exclude_seen=True)]
    options: Json = {
        "model": "books",
        "version": 3,
        "m": 5,
        "beam_size": 7,
        "filter": {"section": ["games"], "price": {"min": 1, "max": 2}},
        "exclude_filter": {"brand": ["x"]},
        "min_score": 0.0,
        "timeout_ms": 50,
        "min_sequence": 41,
        "min_coverage": 0.75,
        "partial": "refuse",
        "live": False,
        "fields": ["title"],
        "rerank": True,
        "explain": True,
        "explain_items": ["b3"],
        "explain_nodes": True,
    }
    assert list(options) == list(Options.__annotations__)
    driver.open(stub).retrieve(queries, **options)
    sent = [{"vector": [0.5, 2.0], "exclude": ["b1"]}, {"history": ["b2"], "exclude_seen": True}]
    assert stub.bodies == [options | {"queries": sent}]


def test_an_answer_and_a_model_may_say_more_or_less_than_is_known(driver: Driver) -> None:
    document = answer_to({"queries": [{"history": ["b1"]}]})
    retrieve = driver.open(lambda _: httpx.Response(200, json=document)).retrieve
    assert retrieve([Query()]).coverage is None
    document["coverage"] = {"items": 0.75, "shards": 4, "answered": 3, "missing": [2]}
    assert retrieve([Query()]).coverage == Coverage(0.75, 4, 3, (2,))
    document = answer_to({"queries": [{"history": ["b1"]}]}) | {"new": 1}
    document["timing"]["rerank_ms"] = 1
    document["results"][0] |= {
        "explain": {"levels": [], "items": []},
        "new": 1,
        "items": [{"id": "b1", "score": 1.0, "fields": None, "new": 1}],
    }
    del document["results"][0]["degraded"]
    result = driver.open(lambda _: httpx.Response(200, json=document)).retrieve([Query()]).results[0]
    assert result == Result((Item("b1", 1.0, {}),), True, 100, False, (), {"levels": [], "items": []})
    plain = {"name": "books", "state": "ready", "version": 3, "versions": []}
    tail = {"form": "product", "alpha": 0.8, "gamma": 30, "entries": 5}
    documents = [plain, plain | {"trees": 1, "tail": None}, plain | {"trees": 3, "tail": tail}]
    models = driver.open(lambda _: httpx.Response(200, json={"models": documents})).models()
    assert [(model.trees, model.has_tail) for model in models] == [(None, False), (1, False), (3, True)]


def test_numbers_of_numpy_are_sent_as_numbers_of_python(driver: Driver) -> None:
    stub = Stub()
    one: Any = np.int64(1)
    driver.open(stub)
    integers: Json = dict.fromkeys(("version", "m", "beam_size", "min_sequence", "rerank"), one)
    floats: Json = dict.fromkeys(("min_score", "timeout_ms", "min_coverage"), np.float32(0.5))
    driver.retrieve([Query(rank_features={"age": one})], filter={"price": [one, np.float32(0.5)]}, **integers, **floats)
    driver.put_item("books", "b9", fields={"price": np.float32(0.5)}, source_version=one, count=one)
    tensors = {"one": torch.tensor(1), "half": torch.tensor(0.5), "is": [np.True_, torch.tensor(False)]}  # a float's `__index__` raises
    driver.put_item("books", "b9", fields=tensors)
    driver.load("books", one)
    driver.changes("books", one, np.uint8(2))
    driver.delete_item("books", "b9", source_version=one)
    given = dict.fromkeys(integers, 1) | {"rerank": {"depth": 1}} | dict.fromkeys(floats, 0.5) | {"filter": {"price": [1, 0.5]}}
    query = {"history": [], "rank_features": {"age": 1.0}}
    put = {"fields": {"price": 0.5}, "source_version": 1, "count": 1}
    bodies = [json.loads(request.content) for request in stub.requests if request.content]
    of_tensors = {"fields": {"one": 1, "half": 0.5, "is": [True, False]}}
    assert bodies == [given | {"queries": [query]}, put, of_tensors, {"version": 1, "default": True}]
    assert {type(value) for value in bodies[2]["fields"]["is"]} == {bool}
    assert [str(request.url.params) for request in stub.requests[4:]] == ["after=1&limit=2", "source_version=1"]


@pytest.mark.parametrize("results", [0, 1, 3])
def test_an_answer_has_a_result_of_each_query(driver: Driver, results: int) -> None:
    document = answer_to({"queries": [{"history": ["b1"]}] * results})
    with pytest.raises(InvalidAnswer, match=f"{results} results of 2 queries"):
        driver.open(lambda _: httpx.Response(200, json=document)).retrieve([Query(), Query()])


def test_what_is_chosen_of_a_catalogue_is_sent(driver: Driver) -> None:
    stub = Stub()
    driver.open(stub)
    driver.facets("books", "price", filter={"section": ["libs", "games"], "year": {"min": 1990}}, limit=3, version=2)
    driver.node("books", tree=1, limit=5, version=2)
    driver.item_path("books", "b1", tree=1, version=2)
    sent = [dict(request.url.params) for request in stub.requests]
    assert json.loads(sent[0].pop("filter")) == {"section": ["libs", "games"], "year": {"min": 1990}}
    assert sent == [
        {"column": "price", "limit": "3", "version": "2"},
        {"tree": "1", "limit": "5", "version": "2"},
        {"item": "b1", "tree": "1", "version": "2"},
    ]


@pytest.mark.parametrize(
    ("method", "arguments", "sent", "body"),
    [
        ("models", (), "GET /models", None),
        ("model", ("a/b c",), "GET /models/a%2Fb%20c", None),
        ("complete", ("books", "a&b", 3), "GET /models/books/items?prefix=a%26b&limit=3", None),
        ("facets", ("books", "a&b"), "GET /models/books/facets?column=a%26b&limit=20", None),
        ("node", ("books", 2), "GET /models/books/tree/2?tree=0&limit=50", None),
        ("item_path", ("books", "b/1"), "GET /models/books/tree?item=b%2F1&tree=0", None),
        ("ready", (), "GET /readyz", None),
        ("load", ("books", 4), "POST /models/books/load", {"version": 4, "default": True}),
        ("unload", ("books", 3), "POST /models/books/unload", {"version": 3}),
        ("set_default", ("books", 3), "POST /models/books/default", {"version": 3}),
        (
            "set_candidate",
            ("books", 4),
            "PUT /models/books/candidate",
            {"version": 4, "share": 0.0, "keys": [], "groups": [], "shadow": 0.0},
        ),
        ("drop_candidate", ("books",), "DELETE /models/books/candidate", None),
        ("trial", ("books",), "GET /models/books/candidate", None),
        ("set_removed", ("books", ["b1", "b9"]), "PUT /models/books/removed", {"ids": ["b1", "b9"]}),
        ("remove_item", ("books", "b/9 ü%2F"), "PUT /models/books/removed/b%2F9%20%C3%BC%252F", None),
        ("restore_item", ("books", "b9"), "DELETE /models/books/removed/b9", None),
        ("removed", ("books",), "GET /models/books/removed", None),
        ("put_item", ("books", "b/9 ü"), "PUT /models/books/items/b%2F9%20%C3%BC", {}),
        ("get_item", ("books", ".."), "GET /models/books/items/%2E%2E", None),
        ("delete_item", ("books", "b9"), "DELETE /models/books/items/b9", None),
        ("changes", ("books", 4, 2), "GET /models/books/changes?after=4&limit=2", None),
    ],
)
def test_every_route(driver: Driver, method: str, arguments: tuple[Any, ...], sent: str, body: Json | None) -> None:
    stub = Stub()
    driver.open(stub, url=f"{URL}/prefix/", api_key=KEY)
    expected: Any = {
        "complete": (Completion("b1", "One"), Completion("b2", None)),
        "facets": FACETS,
        "node": NODE,
        "item_path": (0, 2, 5),
        "ready": Readiness(True, ()),
        "trial": {"candidate": None, "versions": [], "shadow": None},
        "set_removed": Removal(1, ("b9",), '"abc"'),
        "remove_item": RemovedItem("b/9 ü%2F", True, True, False, 3, '"abc"'),
        "restore_item": RemovedItem("b9", False, True, False, 3, '"abc"'),
        "removed": RemovedIds(("b1",), '"abc"'),
        "put_item": ItemOutcome("b/9 ü", "inserted", 41, True, ("b9",), Placement(3, 9, "events")),
        "get_item": LiveItem("..", 41, True, "2027-01-15T08:00:01Z", None, {"title": "New"}, (["b1"],), source_version=7),
        "delete_item": ItemOutcome("b9", "deleted", 41, True, ("b9",)),
        "changes": Changes(
            (
                Change(4, "b1", "2027-01-15T08:00:01Z", Put("b1", text="words", source_version=7), 7),
                Change(6, "b2", "2027-01-15T08:00:02Z", None),
            ),
            6,
            "j1",
        ),
    }.get(method)
    stub.answer, plain = lambda request: plain(without_prefix(request)), stub.answer  # type: ignore[method-assign]  # behind a proxy
    got = getattr(driver, method)(*arguments)
    if expected is not None:
        assert got == expected
    else:
        model = got[0] if method == "models" else got
        assert (model.state, model.version, model.description["tree"]) == ("ready", 3, {"items": 5})
        assert model.versions == (Version(1, "failed", None, "it is broken"), Version(3, "ready", "onnx-cpu", None))
    (request,) = stub.requests
    assert f"{request.method} {request.url.raw_path.decode()}" == sent.replace(" /", " /prefix/")
    assert request.headers["Authorization"] == f"Bearer {KEY}"
    assert (json.loads(request.content) if request.content else None) == body


def without_prefix(request: httpx.Request) -> httpx.Request:
    path = request.url.raw_path.decode().removeprefix("/prefix")
    path = re.sub(r"/models/a%2Fb%20c", "/models/books", path)
    return httpx.Request(request.method, f"{URL}{path}", content=request.content)


def test_not_being_ready_is_an_answer_and_another_503_an_error(driver: Driver) -> None:
    loading = httpx.Response(503, json={"ready": False, "reasons": ["books is loading"]})
    assert driver.open(Stub([loading])).ready() == Readiness(False, ("books is loading",))
    assert driver.pauses_s == []
    with pytest.raises(Unavailable):
        driver.open(lambda _: refuse(503), retries=0).ready()


PAGE = (ROOT / "docs" / "serve.md").read_text()


def section(title: str) -> str:
    """A section of the page, its subsections included."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_code_of_the_documentation_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RETRIEVAL_KEY", KEY)
    blocks = re.findall(r"^```python\n(.*?)^```$", section("Python client"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    stub = Stub()
    with serving(stub) as url:
        for block in blocks:
            assert "http://localhost:8000" in block
            exec(compile(block.replace("http://localhost:8000", url), "docs/serve.md", "exec"), {"__name__": "docs"})
    printed = capsys.readouterr().out
    for expected in (
        "libsdl2-2.0-0 0.5",
        "['libc6', 'libgtk-3-0']",
        "['zlib1g'] ['zlib1g']",
        "inserted 41",
        "m: got 1000000, expected at most 1000",
        "ready",
    ):
        assert expected in printed
    keys = {request.headers["Authorization"] for request in stub.requests if "Authorization" in request.headers}
    assert keys == {f"Bearer {KEY}", "Bearer a-write-key", "Bearer an-admin-key"}


def test_every_error_and_every_option_is_described() -> None:
    raised = dict(re.findall(r"^\| (\d{3}) \| .* \| (?:`(\w+)`)? ?\|$", section("Errors"), re.MULTILINE))
    assert raised.pop("499") == ""  # the client has hung up
    for status, name in raised.items():
        refusal = from_problem(int(status), {}, None)
        assert type(refusal).__name__ == name, status
    client = section("Python client")
    described = set(re.findall(r"^\| `(\w+)` \|", client, re.MULTILINE)) | set(raised.values()) | {"ClientError"}
    public = [(name, getattr(espalier_client, name)) for name in espalier_client.__all__]
    assert described == {name for name, one in public if isinstance(one, type) and issubclass(one, Exception)}
    assert "`ClientError`" in client
    fields = section("Retrieve").partition("| field |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", fields, re.MULTILINE)) == set(Options.__annotations__)
    for name in (*Retry.__dataclass_fields__, *(name for name in vars(Client) if not name.startswith("_"))):
        assert name in {"clock", "draw", "close"} or name in client, name
