"""The writes of a load test: what is put, and how it shares a loop with retrievals."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.cell import Load, _with_writes
from loadtest.loops import request_bytes
from loadtest.queries import Query
from loadtest.target import ServiceRefused, Target
from loadtest.writes import PREFIX, Writes, delete_all, mixed, put_bytes
from tests.loadtest.stub import Request, stub

QUERIES = [Query("history", ("a", "b")), Query("history", ()), Query("history", ("c",))]


def test_no_two_writes_are_equal_and_few_items_are_written() -> None:
    writes = Writes(QUERIES, items=4)
    puts = [writes.put(number) for number in range(20)]
    assert {put.id for put in puts} == {f"{PREFIX}{n}" for n in range(4)} == set(writes.ids(20))
    assert len({put.body["source_version"] for put in puts}) == 20
    assert [put.body["events"] for put in puts[:3]] == [[["a", "b"]], [["c"]], [["a", "b"]]]  # an empty history is no evidence
    assert writes.ids(2) == [f"{PREFIX}0", f"{PREFIX}1"]
    assert Writes(QUERIES).put(0).body["source_version"] > puts[0].body["source_version"]


@pytest.mark.parametrize("kind", ["vector", "features", "text"])
def test_evidence_is_a_query_of_any_kind(kind: str) -> None:
    values = {"vector": (0.5, 1.0), "features": {"indices": [3], "values": [1.0]}, "text": "words"}[kind]
    query = Query(kind, values)  # type: ignore[arg-type]  # parametrised strings
    assert Writes([query]).put(0).body["events"] == [query.body()[kind]]


@given(per_s=st.floats(1, 500), writes_per_s=st.floats(0.5, 500), seconds=st.floats(0.1, 3))
def test_writes_are_spread_evenly(per_s: float, writes_per_s: float, seconds: float) -> None:
    found = mixed([b"r0", b"r1"], lambda number: b"w%d" % number, per_s, writes_per_s, seconds)
    count = len(found.requests)
    assert count == max(1, round((per_s + writes_per_s) * seconds))
    assert found.is_write == [request.startswith(b"w") for request in found.requests]
    assert [request for request in found.requests if request.startswith(b"w")] == [b"w%d" % n for n in range(sum(found.is_write))]
    share = writes_per_s / (per_s + writes_per_s)
    for i in range(1, count + 1):
        assert abs(sum(found.is_write[:i]) - i * share) <= 1


def test_a_mixed_loop_measures_both_and_deletes_what_it_has_put() -> None:
    put: list[str] = []
    deleted: list[str] = []
    keys: Counter[tuple[str, str]] = Counter()

    def answer(request: Request) -> tuple[int, object]:
        keys[request.method, request.authorization] += 1
        if request.method == "PUT":
            put.append(request.path.rpartition("/")[2])
            return 201, {"sequence": 1, "outcome": "inserted"}
        if request.path == "/retrieve":
            return 200, {"results": [{"items": [], "complete": True}], "timing": {"ms_per_query": 0.5}}
        deleted.extend(json.loads(line)["id"] for line in request.body.splitlines())
        return 200, "\n".join(json.dumps({"id": item, "status": 200}) for item in deleted)

    with stub(answer) as target:
        writer = replace(target, headers={"Authorization": "Bearer writes"})
        load = Load(target, "my books", 1, QUERIES, seconds=0.3, rounds=2, writes_per_s=20, writer=writer)
        retrieved, written = _with_writes(load, [request_bytes("/retrieve", {})], 40, [0, 1])
    assert (retrieved["samples"], retrieved["statuses"], retrieved["offered_per_s"]) == (24, {"200": 24}, 40)
    assert (written["samples"], written["failed"], written["statuses"]) == (12, 0, {"201": 12})
    assert sorted(put) == sorted(deleted) == sorted(f"{PREFIX}{n}" for n in range(12))
    assert keys == {("POST", ""): 24, ("PUT", "Bearer writes"): 12, ("POST", "Bearer writes"): 1}


def test_what_is_not_deleted_is_told() -> None:
    missing = "\n".join(json.dumps({"id": item, "status": 404 if item == "gone" else 200}) for item in ("a", "gone"))
    with stub(lambda request: (200, missing)) as target:
        delete_all(target, "books", ["a", "gone"])
    with pytest.raises(ServiceRefused, match="no answer"):
        delete_all(target, "books", ["a"])


def test_a_put_is_a_whole_request() -> None:
    put = Writes(QUERIES).put(3)
    head, _, body = put_bytes(Target("h", 80, "/prefix", {"Authorization": "Bearer k"}), "a/b c", put).partition(b"\r\n\r\n")
    assert head.splitlines()[0] == b"PUT /prefix/models/a%2Fb%20c/items/loadtest-item-3 HTTP/1.1"
    assert b"Authorization: Bearer k" in head
    assert json.loads(body) == put.body
