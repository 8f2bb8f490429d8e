"""Facets count the items that a query may get: they are compared with what a search of everything returns."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pytest
from fastapi import FastAPI

from espalier.bundle import Bundle
from espalier.checks.random_bundles import make_bundle, make_linear_bundle, tree_over
from espalier.engines import open_engine
from espalier.errors import InvalidQuery
from espalier.manifest import Ranking
from espalier.masks.filters import Filter
from espalier.tree import complete_tree
from service.errors import DeadlinePassed
from service.retrieval import facets as facets_module
from service.retrieval import scans
from service.retrieval.facets import facets
from tests.service.live_running import ALL, ITEMS, live_service
from tests.service.running import LIMITS, Json, Running, bearer, problem, run

COLOURS = ["red", "green", "blue", None]
COLUMNS = ("colour", "tags", "price", "year", "sold")


def random_columns(rng: np.random.Generator) -> dict[str, Any]:
    tags = [None if rng.random() < 0.2 else [str(tag) for tag in rng.choice(list("abcde"), rng.integers(0, 4))] for _ in range(ITEMS)]
    return {
        "colour": pa.array([COLOURS[i] for i in rng.integers(0, 4, ITEMS)]),
        "tags": pa.array([tag if tag is None or rng.random() < 0.8 else [*tag, None] for tag in tags], pa.list_(pa.string())),
        "price": pa.array(rng.choice([0.0, -0.0, 1.5, 2.5, math.nan, math.inf], ITEMS), pa.float32()),
        "year": pa.array(rng.integers(1990, 2020, ITEMS)),
        "sold": pa.array([bool(i) for i in rng.integers(0, 2, ITEMS)]),
    }


def random_books(folder: Path, seed: int = 0) -> Path:
    """A models folder whose items have random fields."""
    rng = np.random.default_rng(seed)
    tree = complete_tree(rng.permutation(ITEMS), 2)
    make_bundle(folder, rng, tree, name="books", columns=random_columns(rng), **LIMITS)
    return folder


@pytest.fixture
def models(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return random_books(tmp_path, getattr(request, "param", 0))


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service for tests that change nothing in it."""
    with run(random_books(tmp_path_factory.mktemp("books"))) as running:
        yield running


def shown(running: Running, column: str, filter: Json | None = None, barred: Json | None = None, **params: Any) -> Json:
    conditions = {"filter": filter, "exclude_filter": barred}
    asked = {"column": column} | params | {name: json.dumps(one) for name, one in conditions.items() if one is not None}
    answer = running.client.get("/models/books/facets", params=asked)
    assert answer.status_code == 200, answer.text
    document: Json = answer.json()
    return document


def without(column: str, conditions: Json) -> Json:
    return {name: one for name, one in conditions.items() if name != column}


def found_with(running: Running, filter: Json, barred: Json, live: bool) -> Sequence[Json]:
    """The fields of all items that a search finds."""
    conditions = {"filter": filter, "exclude_filter": barred, "live": live}
    found = running.retrieve(queries=[{"history": ["item-1"]}], fields=list(COLUMNS), **conditions, **ALL)["results"][0]
    assert found["complete"]
    return [item["fields"] for item in found["items"]]


def brute(column: str, fields: Sequence[Json], limit: int) -> Json:
    """The same from the fields of all items."""
    values = [values_of(own[column]) for own in fields]
    counts = Counter(value for own in values for value in own)
    ordered = sorted(counts, key=lambda value: (-counts[value], value))
    listed = set(ordered[:limit])
    return {
        "column": column,
        "values": [{"value": value, "count": counts[value]} for value in ordered[:limit]],
        "others": sum(bool(own) and not own & listed for own in values),
        "missing": sum(not own for own in values),
        "eligible": len(values),
        "distinct": len(counts),
    }


def values_of(field: Any) -> set[Any]:
    """orjson writes NaN and infinity as null."""
    return {value for value in (field if isinstance(field, list) else [field]) if value is not None}


def agree(running: Running, live: bool = True) -> None:
    fields: dict[str, Sequence[Json]] = {}  # by conditions, of which many are the same once the column's own is left out
    for filter, barred in FILTERS:
        for column in COLUMNS:
            conditions = without(column, filter), without(column, barred)
            key = json.dumps(conditions)
            if key not in fields:
                fields[key] = found_with(running, *conditions, live)
            for limit in (1, 2, 20):
                found = shown(running, column, filter, barred, limit=limit, live=live)
                counted = {name: found[name] for name in found if name not in ("min", "max", "histogram")}
                assert counted == brute(column, fields[key], limit)


FILTERS: list[tuple[Json, Json]] = [
    ({}, {}),
    ({"colour": ["red", "blue"]}, {}),
    ({"colour": ["red"], "year": {"min": 1995, "max": 2012}}, {"tags": ["c"]}),
    ({"tags": ["a", "b"], "sold": [True]}, {"colour": ["green"]}),
    ({}, {"colour": ["red"], "year": {"max": 2000}}),
    ({"colour": ["nothing has this"], "price": {"min": 0}}, {}),
]


@pytest.mark.parametrize("models", range(3), indirect=True)
def test_counts_are_those_of_a_search_of_everything(models: Path) -> None:
    with run(models, lambda bundle: open_engine(bundle, "cpu"), admin_keys="admin-key-00000001") as running:
        agree(running)
        removed = {"ids": [f"item-{i}" for i in range(0, ITEMS, 3)]}
        answer = running.client.request("PUT", "/models/books/removed", json=removed, headers=bearer("admin-key-00000001"))
        assert answer.status_code == 200
        assert shown(running, "colour")["eligible"] == ITEMS - len(removed["ids"])
        agree(running)


@pytest.mark.parametrize("models", range(3), indirect=True)
def test_live_items_count_by_the_fields_that_they_have_now(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    with live_service(models, monkeypatch, admin_keys="admin-key-00000001") as live:
        before = shown(live.running, "colour")

        def fields() -> Json:
            own: Json = {
                "colour": COLOURS[rng.integers(0, 4)],
                "tags": ["a", "a", "f"],
                "price": 9.5,
                "year": int(rng.integers(1990, 2030)),
            }
            return own

        for i in range(6):
            live.put(f"new-{i}", like=(f"item-{i}",), fields=fields())  # new
        for i in range(6):
            live.put(f"item-{i}", fields=fields())  # trained, other fields
        live.put("item-7", like=("item-9",), fields=fields())  # trained, moved, other fields
        live.put("item-8", like=("item-9",))  # trained, moved, own fields
        for gone in ("item-2", "item-8", "item-20", "new-3"):
            live.delete(gone)
        live.put("item-20")  # back
        assert shown(live.running, "colour") != before
        agree(live.running)
        agree(live.running, live=False)
        removed = {"ids": ["item-3", "new-4", "item-7", "item-11"]}
        answer = live.running.client.request("PUT", "/models/books/removed", json=removed, headers=bearer("admin-key-00000001"))
        assert answer.status_code == 200
        assert shown(live.running, "colour")["eligible"] == ITEMS + 6 - 3 - 4
        agree(live.running)
        agree(live.running, live=False)


@pytest.mark.parametrize("trees", [1, 3])
def test_linear_models_and_forests_have_facets(tmp_path: Path, trees: int) -> None:
    rng = np.random.default_rng(2)
    first, *others = [tree_over(rng, 40, 4) for _ in range(trees)]
    ranking = Ranking(own="log_activation", gamma=1.0, activation="sigmoid")
    colours = [COLOURS[i % 3] for i in range(40)]
    make_linear_bundle(tmp_path, rng, first, ranking, name="books", others=others, columns={"colour": colours})
    with run(tmp_path, lambda bundle: open_engine(bundle, "cpu")) as running:
        found = shown(running, "colour")
        assert found["values"] == [{"value": "red", "count": 14}, {"value": "blue", "count": 13}, {"value": "green", "count": 13}]
        assert (found["others"], found["missing"], found["eligible"], found["distinct"]) == (0, 0, 40, 3)


def test_a_model_without_columns_has_facets_of_ids_and_titles(models: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    make_bundle(tmp_path / "bare", rng, complete_tree(rng.permutation(8), 2), name="books", **LIMITS)
    with run(tmp_path / "bare") as running:
        assert shown(running, "title", limit=3)["values"] == [{"value": f"Title {i}", "count": 1} for i in range(3)]
        refused = problem(running.client.get("/models/books/facets", params={"column": "colour"}))
        assert (refused["status"], refused["errors"][0]["expected"]) == (422, "a column that can be filtered: id, title")


def test_the_condition_on_the_column_itself_is_left_out(books: Running) -> None:
    whole = shown(books, "colour")
    assert shown(books, "colour", {"colour": ["red"]}) == whole
    assert shown(books, "year", {"colour": ["red"]})["eligible"] == next(one["count"] for one in whole["values"] if one["value"] == "red")


def test_numbers_of_which_there_are_many_have_a_histogram(models: Path) -> None:
    with run(models) as running:
        found = shown(running, "year", limit=3)
        years = Bundle.open(models / "books" / "1").items.column("year").to_pylist()
        assert (found["min"], found["max"]) == (min(years), max(years))
        assert len(found["histogram"]) == facets_module.BINS
        counts, edges = np.histogram(years, facets_module.BINS)
        assert [one["count"] for one in found["histogram"]] == counts.tolist()
        assert [one["min"] for one in found["histogram"]] == pytest.approx(edges[:-1].tolist())
        assert found["histogram"][-1]["max"] == max(years)
        assert "histogram" not in shown(running, "year", limit=100)
        assert "histogram" not in shown(running, "colour", limit=1)


def test_a_histogram_of_extreme_numbers_stays_finite(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {"n": pa.array([-1.7e308, 1.7e308, 0.0, math.inf]), "i": pa.array([(1 << 63) - 1, -(1 << 63), 5, (1 << 63) - 2])}
    make_bundle(tmp_path, rng, complete_tree(rng.permutation(4), 2), name="books", columns=columns, **LIMITS)
    with run(tmp_path) as running:
        numbers = shown(running, "n", limit=1)
        assert [one["count"] for one in numbers["histogram"] if one["count"]] == [1, 1, 1]
        assert (numbers["missing"], numbers["others"]) == (1, 2)
        integers = shown(running, "i", limit=2)
        assert [one["value"] for one in integers["values"]] == [-(1 << 63), 5]
        assert sum(one["count"] for one in integers["histogram"]) == 4


def test_a_catalogue_of_many_blocks_is_counted_whole(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch) as live:
        for i in range(5):
            live.put(f"new-{i}", like=(f"item-{i}",), fields={"colour": "grey", "tags": ["z", "a"]})
        whole = [shown(live.running, column, limit=limit) for column in COLUMNS for limit in (1, 20)]
        monkeypatch.setattr(facets_module, "SCANNED_ROWS", 3)
        monkeypatch.setattr(facets_module, "LIVE_ROWS", 2)
        monkeypatch.setattr("service.retrieval.facets.LIVE_ROWS", 2)
        monkeypatch.setattr("service.retrieval.value_counts.MERGED_VALUES", 1)
        assert [shown(live.running, column, limit=limit) for column in COLUMNS for limit in (1, 20)] == whole


def test_a_column_of_too_many_values_has_none_listed(books: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facets_module, "MAX_VALUES", ITEMS)
    assert shown(books, "id", limit=1)["distinct"] == ITEMS
    monkeypatch.setattr(facets_module, "MAX_VALUES", ITEMS - 1)
    monkeypatch.setattr("service.retrieval.value_counts.MERGED_VALUES", 1)
    monkeypatch.setattr(facets_module, "SCANNED_ROWS", 3)
    found = shown(books, "id", limit=1)
    assert (found["values"], found["distinct"], found["others"], found["missing"]) == ([], None, ITEMS, 0)
    monkeypatch.setattr(facets_module, "MAX_VALUES", 3)
    numbers = shown(books, "year", limit=3)
    assert numbers["values"] == []
    assert sum(one["count"] for one in numbers["histogram"]) == ITEMS


def test_long_values_end_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a" * 10, "a" * 10, "é" * 10, "c" * 10]
    rng = np.random.default_rng(0)
    make_bundle(tmp_path, rng, complete_tree(rng.permutation(4), 2), name="books", columns={"text": texts}, **LIMITS)
    with run(tmp_path) as running:
        for room, listed in ((40, 3), (39, 2), (20, 2), (19, 1), (9, 0)):
            monkeypatch.setattr(facets_module, "MAX_BYTES", room)
            found = shown(running, "text")
            assert [one["value"] for one in found["values"]] == ["a" * 10, "c" * 10, "é" * 10][:listed]
            assert found["others"] + sum(one["count"] for one in found["values"]) == 4


def test_nothing_eligible_is_no_fault(books: Running) -> None:
    for column in COLUMNS:
        found = shown(books, column, {"colour": ["none"], "title": ["none"]}, limit=1)
        assert (found["values"], found["eligible"], found["missing"], found["others"]) == ([], 0, 0, 0)


def test_a_scan_ends_at_its_deadline(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facets_module, "SCANNED_ROWS", 4)
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks == 4:
            raise DeadlinePassed("too late")

    with run(models) as running:
        model = running.app.state.service.registry.choose("books", None)
        with pytest.raises(DeadlinePassed):
            facets(model, "colour", Filter(), 20, check)
        assert looks == 4
    with run(models, timeout_ms=1e-6) as running:
        answer = running.client.get("/models/books/facets", params={"column": "colour"})
        assert problem(answer)["status"] == 504


def test_few_scans_run_at_once_and_the_rest_is_refused(books: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "MAX_WAITING", 0)

    async def flood(running: Running) -> list[int]:
        http = running.client.http
        answers = await asyncio.gather(*(http.get("/models/books/facets?column=colour") for _ in range(10)))
        return [answer.status_code for answer in answers]

    statuses = books.client.runner.run(flood(books))
    assert Counter(statuses) == {200: scans.MAX_SCANS, 429: 10 - scans.MAX_SCANS}
    assert books.client.get("/models/books/facets?column=colour").status_code == 200


def test_facets_leave_the_cache_of_masks_alone(models: Path) -> None:
    with run(models) as running:
        model = running.app.state.service.registry.choose("books", None)
        filter = {"colour": ["red"]}
        shown(running, "year", filter)
        assert model.filters.cached(model.filters.parse(filter, {})) is None
        running.retrieve(queries=[{"history": []}], filter=filter)
        assert model.filters.cached(model.filters.parse(filter, {})) is not None


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({}, "column"),
        ({"column": ""}, "column"),
        ({"column": "nothing"}, "column"),
        ({"column": "__hash"}, "column"),
        ({"column": "a/b\x00\u202e"}, "column"),
        ({"column": "c" * 513}, "column"),
        ({"column": "colour", "limit": "0"}, "limit"),
        ({"column": "colour", "limit": "1001"}, "limit"),
        ({"column": "colour", "limit": "-1"}, "limit"),
        ({"column": "colour", "limit": "many"}, "limit"),
        ({"column": "colour", "version": "0"}, "version"),
        ({"column": "colour", "filter": "{"}, "filter"),
        ({"column": "colour", "filter": "[]"}, "filter"),
        ({"column": "colour", "filter": "null"}, "filter"),
        ({"column": "colour", "exclude_filter": "3"}, "exclude_filter"),
        ({"column": "colour", "exclude_filter": '{"nothing": ["x"]}'}, "exclude_filter.nothing"),
        ({"column": "colour", "live": "perhaps"}, "live"),
        ({"column": "colour", "filter": "[" * 20_000}, "filter"),
        ({"column": "colour", "filter": '{"a":' * 3_000}, "filter"),
        ({"column": "colour", "filter": '{"colour": []}'}, "filter.colour"),
        ({"column": "colour", "filter": '{"nothing": ["x"]}'}, "filter.nothing"),
        ({"column": "colour", "filter": '{"year": {"min": "x"}}'}, "filter.year.min"),
        ({"column": "colour", "filter": json.dumps({"colour": ["x"] * 1001})}, "filter"),
    ],
)
def test_wrong_values_are_named(books: Running, params: dict[str, str], field: str) -> None:
    refused = problem(books.client.get("/models/books/facets", params=params))
    assert (refused["status"], refused["errors"][0]["field"]) == (422, field)


def test_a_filter_of_a_megabyte_is_refused_before_it_is_parsed(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of the tests makes no such address, so the application is called itself."""
    monkeypatch.setattr("service.http.console_routes.orjson.loads", lambda _: pytest.fail("it was parsed"))
    query = b"column=colour&filter=" + quote(json.dumps({"colour": ["x" * (1 << 20)]})).encode()
    scope = {"type": "http", "method": "GET", "path": "/models/books/facets", "query_string": query, "headers": []}
    sent: list[Any] = []

    async def ask(app: FastAPI) -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, lambda: pytest.fail("there is no body"), send)

    with run(models) as running:
        running.client.runner.run(ask(running.app))
    refused = json.loads(sent[1]["body"])
    assert (refused["status"], refused["errors"][0]["field"]) == (422, "filter")
    assert len(sent[1]["body"]) < 1000


@pytest.mark.parametrize("name", ["films", "a%2Fb", "books%2F..", ".."])
def test_other_models_are_not_there(books: Running, name: str) -> None:
    assert problem(books.client.get(f"/models/{name}/facets", params={"column": "colour"}))["status"] == 404


def test_a_retrieval_key_is_needed(models: Path) -> None:
    with run(models, retrieve_keys="retrieve-key-000001") as running:
        path = "/models/books/facets?column=colour"
        assert problem(running.client.get(path))["status"] == 401
        assert running.client.get(path, headers=bearer("retrieve-key-000001")).status_code == 200


def test_a_column_name_is_checked_before_anything_is_counted(books: Running) -> None:
    model = books.app.state.service.registry.choose("books", None)
    with pytest.raises(InvalidQuery, match="column: got"):
        facets(model, "nothing", Filter(), 1, lambda: pytest.fail("it was scanned"))
