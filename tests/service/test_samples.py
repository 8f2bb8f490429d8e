"""A sample of customers' queries: only where a setting asks for one, in memory, bounded, for admins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from service.retrieval.schemas import Query
from service.watch.query_samples import MAX_BYTES, PER_REQUEST, QUERY_BYTES, QuerySamples, as_json
from tests.service.running import run

ADMIN, RETRIEVE = "an-admin-key-of-tests", "a-retrieval-key-of-tests"
AS_ADMIN = {"Authorization": f"Bearer {ADMIN}"}


def query(**fields: object) -> Query:
    return Query.model_validate(fields)


def body(*items: str) -> dict[str, object]:
    return {"model": "books", "queries": [{"history": [item]} for item in items]}


def test_nothing_is_kept_unless_a_setting_says_so(versions: Path) -> None:
    with run(versions, admin_keys=ADMIN) as running:
        running.client.post("/retrieve", json=body("item-1"))
        assert running.client.get("/models/books/samples", headers=AS_ADMIN).json() == {"queries": [], "most": 0}


def test_the_newest_queries_of_customers_are_kept(versions: Path) -> None:
    with run(versions, admin_keys=ADMIN, sample_queries=2) as running:
        running.client.post("/retrieve", json=body("item-1", "item-2", "item-3"))
        running.client.post("/retrieve", json=body("item-4"), headers={"Espalier-Priority": "background"})
        running.client.post("/retrieve", json=body("item-5") | {"m": 10**6})  # is refused
        found = running.client.get("/models/books/samples", headers=AS_ADMIN).json()
        assert [one["query"] for one in found["queries"]] == [{"history": ["item-3"]}, {"history": ["item-2"]}]
        assert {one["version"] for one in found["queries"]} == {2}
        assert found["most"] == 2
        again = running.client.post("/retrieve", json={"model": "books", "queries": [found["queries"][0]["query"]]})
        assert again.status_code == 200
        few = running.client.get("/models/books/samples?limit=1", headers=AS_ADMIN).json()
        assert len(few["queries"]) == 1
        assert running.client.get("/models/books/samples?version=1", headers=AS_ADMIN).json()["queries"] == []
        assert running.client.get("/models/nobody/samples", headers=AS_ADMIN).status_code == 404
        assert running.client.get("/models/books/samples?limit=0", headers=AS_ADMIN).status_code == 422


@pytest.mark.parametrize(("settings", "status"), [({}, 403), ({"retrieve_keys": RETRIEVE}, 403), ({"admin_keys": ADMIN}, 401)])
def test_an_admin_key_is_needed_always(versions: Path, settings: dict[str, Any], status: int) -> None:
    with run(versions, sample_queries=5, **settings) as running:
        assert running.client.get("/models/books/samples").status_code == status


def test_samples_are_bounded_in_number_bytes_and_by_request() -> None:
    samples = QuerySamples(10_000, lambda: 1.0)
    samples.note("books", 1, [query(text="x" * QUERY_BYTES)])  # too large
    samples.note("books", 1, [query(text=str(i)) for i in range(100)])
    assert len(samples.of("books", 1000)) == PER_REQUEST
    for _ in range(2 * MAX_BYTES // 60_000):
        samples.note("books", 1, [query(text="x" * 60_000)])
    kept = samples.of("books", 10_000)
    assert MAX_BYTES - 61_000 < sum(len(one.query) for one in kept) <= MAX_BYTES
    few = QuerySamples(3)
    for i in range(10):
        few.note("books", 1, [query(text=str(i))])
    assert [orjson.loads(one.query)["text"] for one in few.of("books", 10)] == ["9", "8", "7"]


def test_what_was_not_set_is_not_shown() -> None:
    samples = QuerySamples(1, lambda: 12.5)
    samples.note("books", 3, [query(history=["a"], exclude_seen=True)])
    assert orjson.loads(as_json(samples.of("books", 1), 1)) == {
        "queries": [{"at": 12.5, "version": 3, "query": {"history": ["a"], "exclude_seen": True}}],
        "most": 1,
    }
