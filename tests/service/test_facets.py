"""Facets count the items that a query may get: they are compared with what a search of everything returns."""

from __future__ import annotations

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

from espalier.masks.filters import Filter
from service.errors import DeadlinePassed
from service.models.loading import LoadedModel
from service.retrieval import facets as facets_module
from service.retrieval.facets import facets
from tests.service.live_running import ALL, Live
from tests.service.running import ITEMS, Json, Running, bearer, document, problem, run, small_model

ADMIN = "admin-key-00000001"
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
    small_model(folder, seed=seed, columns=random_columns(np.random.default_rng(seed)))
    return folder


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return random_books(tmp_path)


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service for tests that change nothing in it."""
    with run(random_books(tmp_path_factory.mktemp("books"))) as running:
        yield running


def model_of(running: Running) -> LoadedModel:
    model: LoadedModel = running.app.state.service.registry.choose("books", None)
    return model


def counted(
    running: Running, column: str, filter: Json | None = None, barred: Json | None = None, limit: int = 20, live: bool = True
) -> Json:
    """What the route answers."""
    model = model_of(running)
    return facets(model, column, model.filters.parse(filter or {}, barred or {}), limit, lambda: None, live)


def shown(running: Running, column: str, **params: Any) -> Json:
    """The same over HTTP."""
    return document(running.client.get("/models/books/facets", params={"column": column} | params))


def remove(running: Running, *ids: str) -> None:
    answer = running.client.request("PUT", "/models/books/removed", json={"ids": ids}, headers=bearer(ADMIN))
    assert answer.status_code == 200


# -- counts ---------------------------------------------------------------------------------------------------------------

FILTERS: list[tuple[Json, Json]] = [
    ({}, {}),
    ({"colour": ["red", "blue"]}, {}),
    ({"colour": ["red"], "year": {"min": 1995, "max": 2012}}, {"tags": ["c"]}),
    ({"tags": ["a", "b"], "sold": [True]}, {"colour": ["green"]}),
    ({}, {"colour": ["red"], "year": {"max": 2000}}),
    ({"colour": ["nothing has this"], "price": {"min": 0}}, {}),
]


def without(column: str, conditions: Json) -> Json:
    return {name: one for name, one in conditions.items() if name != column}


def found_with(running: Running, filter: Json, barred: Json, live: bool) -> Sequence[Json]:
    """The fields of all items that a search finds."""
    conditions = {"filter": filter, "exclude_filter": barred, "live": live}
    found = running.retrieve(queries=[{"history": ["item-1"]}], fields=list(COLUMNS), **conditions, **ALL)["results"][0]
    assert found["complete"]
    return [item["fields"] for item in found["items"]]


def brute(column: str, fields: Sequence[Json], limit: int) -> Json:
    """The answer from the fields of all items."""
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
    """The condition on the column itself is left out."""
    fields: dict[str, Sequence[Json]] = {}  # by conditions, of which many are the same without those on a column
    for filter, barred in FILTERS:
        for column in COLUMNS:
            conditions = without(column, filter), without(column, barred)
            key = json.dumps(conditions)
            if key not in fields:
                fields[key] = found_with(running, *conditions, live)
            for limit in (1, 2, 20):
                found = counted(running, column, filter, barred, limit, live)
                assert {name: found[name] for name in found if name not in ("min", "max", "histogram")} == brute(column, fields[key], limit)


@pytest.mark.settings(admin_keys=ADMIN)
def test_live_items_count_by_the_fields_that_they_have_now(live: Live) -> None:
    rng = np.random.default_rng(7)

    def fields() -> Json:
        year = int(rng.integers(1990, 2030))
        return {"colour": COLOURS[rng.integers(0, 4)], "tags": ["a", "a", "f"], "price": 9.5, "year": year}

    before = counted(live.running, "colour")
    agree(live.running)
    agree(live.running, live=False)
    for i in range(6):
        live.put(f"new-{i}", like=(f"item-{i}",), fields=fields())  # new
        live.put(f"item-{i}", fields=fields())  # trained, other fields
    live.put("item-7", like=("item-9",), fields=fields())  # trained, moved, other fields
    live.put("item-8", like=("item-9",))  # trained, moved, own fields
    for gone in ("item-2", "item-8", "item-20", "new-3"):
        live.delete(gone)
    live.put("item-20")  # back
    assert counted(live.running, "colour") != before
    agree(live.running)
    remove(live.running, "item-3", "new-4", "item-7", "item-11")
    assert shown(live.running, "colour")["eligible"] == ITEMS + 6 - 3 - 4
    agree(live.running)
    agree(live.running, live=False)


def test_the_route_counts_with_its_parameters_and_makes_histograms_of_many_numbers(books: Running) -> None:
    filter, barred = {"year": {"min": 1995, "max": 2012}}, {"tags": ["c"]}
    asked = shown(books, "colour", filter=json.dumps(filter), exclude_filter=json.dumps(barred), limit=2, live=False)
    assert asked == counted(books, "colour", filter, barred, 2, live=False)
    assert shown(books, "sold") == counted(books, "sold")
    found, years = counted(books, "year", limit=3), model_of(books).bundle.items.column("year").to_pylist()
    assert (found["min"], found["max"]) == (min(years), max(years))
    counts, edges = np.histogram(years, facets_module.BINS)
    assert [one["count"] for one in found["histogram"]] == counts.tolist()
    assert [one["min"] for one in found["histogram"]] == pytest.approx(edges[:-1].tolist())
    assert found["histogram"][-1]["max"] == max(years)
    assert "histogram" not in counted(books, "year", limit=100)
    assert "histogram" not in counted(books, "colour", limit=1)


def test_facets_leave_the_cache_of_masks_alone(books: Running) -> None:
    model, filter = model_of(books), {"colour": ["red"]}
    shown(books, "year", filter=json.dumps(filter))
    assert model.filters.cached(model.filters.parse(filter, {})) is None
    books.retrieve(queries=[{"history": []}], filter=filter)
    assert model.filters.cached(model.filters.parse(filter, {})) is not None


# -- many values ----------------------------------------------------------------------------------------------------------


def small(folder: Path, **columns: Any) -> Path:
    """A models folder with a `books` of four items."""
    small_model(folder, items=4, columns=columns)
    return folder


def test_a_histogram_of_extreme_numbers_stays_finite(tmp_path: Path) -> None:
    ends = (1 << 63) - 1, -(1 << 63)
    models = small(tmp_path, n=pa.array([-1.7e308, 1.7e308, 0.0, math.inf]), i=pa.array([ends[0], ends[1], 5, ends[0] - 1]))
    with run(models) as running:
        numbers = shown(running, "n", limit=1)
        assert [one["count"] for one in numbers["histogram"] if one["count"]] == [1, 1, 1]
        assert (numbers["missing"], numbers["others"]) == (1, 2)
        integers = shown(running, "i", limit=2)
        assert [one["value"] for one in integers["values"]] == [ends[1], 5]
        assert sum(one["count"] for one in integers["histogram"]) == 4


def test_a_histogram_of_close_numbers_counts_all_of_them(tmp_path: Path) -> None:
    close = [19.99, 19.990000000000002, 19.990000000000002, 19.99]
    with run(small(tmp_path, price=close)) as running:
        bins = shown(running, "price", limit=1)["histogram"]
    assert sum(one["count"] for one in bins) == 4
    assert (bins[0]["min"], bins[-1]["max"]) == (min(close), max(close))
    assert all(one["min"] <= one["max"] for one in bins)


def test_a_catalogue_of_many_blocks_is_counted_whole(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(5):
        live.put(f"new-{i}", like=(f"item-{i}",), fields={"colour": "grey", "tags": ["z", "a"]})
    asked = [(column, limit) for column in COLUMNS for limit in (1, 20)]
    whole = [counted(live.running, column, limit=limit) for column, limit in asked]
    monkeypatch.setattr(facets_module, "SCANNED_ROWS", 3)
    monkeypatch.setattr(facets_module, "LIVE_ROWS", 2)
    monkeypatch.setattr("service.retrieval.value_counts.MERGED_VALUES", 1)
    assert [counted(live.running, column, limit=limit) for column, limit in asked] == whole


def test_a_column_of_too_many_values_has_none_listed_and_a_scan_ends_at_its_deadline(
    books: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facets_module, "MAX_VALUES", ITEMS)
    assert counted(books, "id", limit=1)["distinct"] == ITEMS
    monkeypatch.setattr(facets_module, "MAX_VALUES", ITEMS - 1)
    monkeypatch.setattr("service.retrieval.value_counts.MERGED_VALUES", 1)
    monkeypatch.setattr(facets_module, "SCANNED_ROWS", 3)
    found = counted(books, "id", limit=1)
    assert (found["values"], found["distinct"], found["others"], found["missing"]) == ([], None, ITEMS, 0)
    monkeypatch.setattr(facets_module, "MAX_VALUES", 3)
    numbers = counted(books, "year", limit=3)
    assert (numbers["values"], sum(one["count"] for one in numbers["histogram"])) == ([], ITEMS)
    monkeypatch.setattr(facets_module, "SCANNED_ROWS", 4)
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks == 4:
            raise DeadlinePassed("too late")

    with pytest.raises(DeadlinePassed):
        facets(model_of(books), "colour", Filter(), 20, check)
    assert looks == 4


def test_long_values_end_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run(small(tmp_path, text=["a" * 10, "a" * 10, "é" * 10, "c" * 10])) as running:
        for room, listed in ((40, 3), (39, 2), (20, 2), (19, 1), (9, 0)):
            monkeypatch.setattr(facets_module, "MAX_BYTES", room)
            found = counted(running, "text")
            assert [one["value"] for one in found["values"]] == ["a" * 10, "c" * 10, "é" * 10][:listed]
            assert found["others"] + sum(one["count"] for one in found["values"]) == 4


# -- what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "field"),
    [
        *(({"column": column}, "column") for column in ("", "nothing", "__hash", "a/b\x00\u202e")),
        ({"exclude_filter": "3"}, "exclude_filter"),
        ({"filter": '{"a":' * 3_000}, "filter"),
        ({"filter": '{"nothing": ["x"]}'}, "filter.nothing"),
        ({"filter": json.dumps({"colour": ["x"] * 1001})}, "filter"),
    ],
)
def test_wrong_values_are_named(books: Running, params: dict[str, str], field: str) -> None:
    refused = problem(books.client.get("/models/books/facets", params={"column": "colour"} | params))
    assert (refused["status"], refused["errors"][0]["field"]) == (422, field)


@pytest.mark.parametrize("value", [str(2**70), "NaN", "1e400"])
def test_numbers_of_a_filter_are_read_as_those_of_a_query(books: Running, value: str) -> None:
    conditions = f'{{"colour": [{value}]}}'
    refused = books.client.get("/models/books/facets", params={"column": "colour", "filter": conditions})
    body = f'{{"queries": [{{"history": []}}], "filter": {conditions}}}'
    by_search = books.client.post("/retrieve", content=body, headers={"content-type": "application/json"})
    assert problem(refused)["errors"] == problem(by_search)["errors"]


async def test_a_filter_of_a_megabyte_is_refused_before_it_is_parsed(books: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of the tests makes no such address, so the application is called itself."""
    monkeypatch.setattr("service.http.console_routes.from_json", lambda _: pytest.fail("it was parsed"))
    query = b"column=colour&filter=" + quote(json.dumps({"colour": ["x" * (1 << 20)]})).encode()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/models/books/facets", "query_string": query, "headers": []}
    await books.app(scope, lambda: pytest.fail("there is no body"), send)
    refused = json.loads(sent[1]["body"])
    assert (refused["status"], refused["errors"][0]["field"]) == (422, "filter")
    assert len(sent[1]["body"]) < 1000
