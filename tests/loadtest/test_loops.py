"""Open and closed loops over a stub of a service, and what is counted of their answers."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.metrics import precision_recall_f
from loadtest import cell as cell_module
from loadtest import loops, report
from loadtest.cell import Load, _with_writes, measure, recall_at_m, without_items
from loadtest.frontier import propose
from loadtest.loops import Answered, arrivals, closed_loop, each_once, open_loop, request_bytes, statuses
from loadtest.queries import Query
from loadtest.target import Json, ServiceRefused, Target
from loadtest.writes import PREFIX, Writes, delete_all, mixed, put_bytes
from tests.loadtest.stub import Request, stub

ANSWER: Json = {"engine": "stub", "results": [{"items": [{"id": "a", "score": 1.0}], "complete": True, "degraded": False, "unknown": []}]}
ANSWER |= {"timing": {"ms_per_query": 0.5}}


def answering(status: Callable[[int, Json], int | None]) -> AbstractContextManager[Target]:
    """A server whose answer to the n-th request, given its body, has this status; None closes the connection instead."""

    def answer(request: Request) -> tuple[int, object] | None:
        found = status(request.number, request.document)
        return None if found is None else (found, ANSWER if found == 200 else {"title": "no", "status": found})

    return stub(answer)


REQUEST = request_bytes("/retrieve", {"queries": [{"history": []}]})


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Nothing is answered before everything has been asked, so that a loop that waited would ask one thing alone."""
    per_s, seconds, seed = 400.0, 0.1, 3
    due = arrivals(per_s, seconds, seed)
    everything = threading.Barrier(len(due))

    def answer(number: int, body: Json) -> int:
        everything.wait(30)
        return 200

    with answering(answer) as target:
        answered = open_loop(target.address, [REQUEST], per_s, seconds, seed)
    assert statuses(answered) == {"200": len(due)}
    began = sorted(answer.began for answer in answered)
    assert [at - began[0] for at in began] == pytest.approx([at - due[0] for at in due], abs=1e-9)
    assert all(0 <= answer.late_s <= answer.seconds for answer in answered)


@given(st.floats(0.1, 1e4), st.floats(0.01, 20), st.integers(0, 2**32))
def test_arrivals_come_at_their_rate(per_s: float, seconds: float, seed: int) -> None:
    due = arrivals(per_s, seconds, seed)
    assert len(due) == max(1, round(per_s * seconds))
    assert due == sorted(due)
    assert due == arrivals(per_s, seconds, seed)
    assert due[-1] * per_s / len(due) == pytest.approx(1, abs=10 / math.sqrt(len(due)))


def test_every_request_is_sent_once_and_answers_find_their_requests() -> None:
    seen: list[str] = []

    def answer(number: int, body: Json) -> int | None:
        seen.append(body["id"])
        return None if body["id"] == "7" else 200 if int(body["id"]) % 2 else 503

    requests = [request_bytes("/retrieve", {"id": str(i)}) for i in range(40)]
    with answering(answer) as target:
        answered = each_once(target.address, requests, 4)
    assert sorted(seen, key=int) == [str(i) for i in range(40)]
    assert {answer.number: answer.status for answer in answered} == {i: 0 if i == 7 else 200 if i % 2 else 503 for i in range(40)}


def test_a_service_that_goes_away_ends_a_loop() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ServiceRefused, match=f"127.0.0.1:{port}: no connection"):
        closed_loop(("127.0.0.1", port), [REQUEST], 1, 0.1)


def load(target: Target) -> Load:
    queries = [Query("history", ("a",), ("a", "b")), Query("history", ("b",), ("c",))]
    return Load(target, "books", 1, queries, seconds=0.05, rate_per_s=400.0)


def test_failures_are_counted_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth request is refused; a query that was refused is asked again for its recall."""
    monkeypatch.setattr(cell_module, "PAUSE_S", 0)
    with answering(lambda number, body: 429 if number % 4 == 1 else 200) as target:
        cell = measure(load(target), 8, 3)
    assert cell["recall"] == 0.25
    document: Json = {"cells": [cell]}
    told = "\n".join(report.warnings(document))
    for loop in ("closed", "open"):
        measured = cell["loops"][loop]
        assert measured["failed"] == measured["statuses"].get("429", 0)
        assert measured["samples"] == measured["statuses"].get("200", 0)  # a closed loop may have no time for a second request
    opened = cell["loops"]["open"]
    assert (opened["samples"], opened["failed"]) == (15, 5)
    assert "beam 8, m 3, open loop: 5 requests (25.00%) failed, statuses 429: 5; its percentiles are of the answered alone" in told
    assert propose(report.points_of(document), 1e9)[0].best is None


def test_figures_are_medians_of_the_rounds_and_counts_are_sums() -> None:
    with answering(lambda number, body: 200) as target:
        cell = measure(replace(load(target), rounds=3), 8, 3)
    for loop in cell["loops"].values():
        assert loop["p99_ms"] == sorted(loop["rounds_p99_ms"])[1]
        assert loop["statuses"] == {"200": loop["samples"]}
    assert cell["loops"]["open"]["samples"] == 3 * 20
    assert cell["loops"]["open"]["offered_per_s"] == 400


def test_recall_is_left_out_where_a_query_is_never_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_module, "PAUSE_S", 0)
    with answering(lambda number, body: 503 if body["queries"][0]["history"] == ["b"] else 200) as target:
        cell = measure(load(target), 8, 3)
    assert cell["recall"] is None
    assert cell["recall_unanswered"] == 1
    assert any("no recall, 1 of its queries were not answered" in warning for warning in report.warnings({"cells": [cell]}))


@pytest.mark.parametrize(
    ("refused", "named"), [(["b"], "query 2 of 2: 422"), (["a"], "/retrieve: 422, no")], ids=["a later query", "the first request"]
)
def test_a_query_that_the_service_refuses_for_good_ends_the_cell_and_is_named(refused: list[str], named: str) -> None:
    with (
        answering(lambda number, body: 422 if body["queries"][0]["history"] == refused else 200) as target,
        pytest.raises(ServiceRefused, match=named),
    ):
        measure(load(target), 8, 3)


@pytest.mark.parametrize(
    ("lanes", "refuses_from", "expected"), [(1, 1000, 16), (16, 1000, 16), (100, 1000, 128), (10_000, 1000, 512), (64, 64, 32), (64, 16, 4)]
)
def test_the_capacity_is_that_of_as_many_clients_as_it_takes(
    lanes: int, refuses_from: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that answers so many requests at a time, 10 ms each, and refuses some where it has more clients than it likes."""

    def closed(address: Any, requests: Any, clients: int, seconds: float, keep: Any) -> list[Answered]:
        count = int(min(clients, lanes) * seconds * 100)
        body = orjson.dumps(ANSWER)
        return [Answered(i, seconds * i / count, 0.0, 0.01, 429 if clients >= refuses_from and i == 0 else 200, body) for i in range(count)]

    monkeypatch.setattr(cell_module, "closed_loop", closed)
    monkeypatch.setattr(cell_module, "PAUSE_S", 0)
    found, loop = cell_module._capacity(replace(load(Target("127.0.0.1", 1)), seconds=1.0), [REQUEST])
    assert found == expected
    assert loop["requests_per_s"] == pytest.approx(100 * min(found, lanes), rel=0.02)


@contextmanager
def holding(*numbers: int) -> Iterator[tuple[Target, threading.Event]]:
    """A server that holds the answers to these requests, or to all, back until the event is set."""
    let_go = threading.Event()

    def answer(number: int, body: Json) -> int:
        if not numbers or number in numbers:
            let_go.wait(30)
        return 200

    with answering(answer) as target:
        yield target, let_go
        let_go.set()


def test_what_is_due_and_never_sent_counts_as_unanswered() -> None:
    with holding() as (target, _):
        answered = open_loop(target.address, [REQUEST], 500, 0.1, connections=2, grace_s=0.1)
    assert len(answered) == 50
    assert {answer.status for answer in answered} == {0}
    assert sorted(answer.number for answer in answered) == list(range(50))


@pytest.mark.parametrize(("grace_s", "status"), [(0.05, 0), (30.0, 200)])
def test_a_closed_loop_waits_for_its_last_answers_as_long_as_it_is_told(grace_s: float, status: int) -> None:
    with holding() as (target, let_go):
        release = threading.Timer(0.5, let_go.set)
        release.start()
        found = closed_loop(target.address, [REQUEST], 1, 0.05, grace_s=grace_s)
        release.join()
    assert [one.status for one in found] == [status]


def test_an_answer_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "STALL_S", 0.1)
    with holding(0) as (target, _):
        answered = each_once(target.address, [REQUEST] * 3, 1)
    assert sorted(answer.status for answer in answered) == [0, 200, 200]


@given(st.lists(st.text()), st.lists(st.text()), st.booleans())
def test_what_is_kept_of_an_answer_is_all_but_its_items(items: list[str], unknown: list[str], complete: bool) -> None:
    result = {"items": [{"id": item} for item in items], "complete": complete, "degraded": False, "unknown": unknown}
    answer = {"model": "m", "results": [result], "timing": {"ms_per_query": 1.5}}
    kept = orjson.loads(without_items(orjson.dumps(answer)))
    assert kept["timing"] == answer["timing"]
    assert kept["results"] == [{name: value for name, value in result.items() if name != "items"}]


@given(st.data(), st.integers(1, 8))
def test_recall_of_ids_is_recall_of_rows(data: st.DataObject, m: int) -> None:
    queries = data.draw(st.integers(1, 5))
    found = [data.draw(st.lists(st.integers(0, 12), unique=True, max_size=m)) for _ in range(queries)]
    relevant = [data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=9)) for _ in range(queries)]
    rows_BM = np.array([[*rows, *[-1] * (m - len(rows))] for rows in found], np.int64)
    expected = precision_recall_f(rows_BM, [np.array(rows) for rows in relevant], m)[1].mean()

    def ids(lists: list[list[int]]) -> list[list[str]]:
        return [[f"id {row}" for row in rows] for rows in lists]

    assert recall_at_m(ids(found), ids(relevant), m) == expected


# -- the writes of a load test: what is put, and how it shares a loop with retrievals -------------------------------------


QUERIES = [Query("history", ("a", "b")), Query("history", ()), Query("history", ("c",))]


def test_no_two_writes_are_equal_and_each_is_a_whole_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.writes.ITEMS", 4)
    writes = Writes(QUERIES)
    puts = [writes.put(number) for number in range(20)]
    assert {put.id for put in puts} == {f"{PREFIX}{n}" for n in range(4)} == set(writes.ids(20))
    assert len({put.body["source_version"] for put in puts}) == 20
    assert [put.body["events"] for put in puts[:3]] == [[["a", "b"]], [["c"]], [["a", "b"]]]  # an empty history is no evidence
    assert Writes(QUERIES, longest=1).put(0).body["events"] == [["b"]]  # a service refuses longer histories as evidence
    assert writes.ids(2) == [f"{PREFIX}0", f"{PREFIX}1"]
    assert Writes(QUERIES).put(0).body["source_version"] > puts[0].body["source_version"]
    put = Writes(QUERIES).put(3)
    head, _, body = put_bytes(Target("h", 80, "/prefix", {"Authorization": "Bearer k"}), "a/b c", put).partition(b"\r\n\r\n")
    assert head.splitlines()[0] == b"PUT /prefix/models/a%2Fb%20c/items/loadtest-item-3 HTTP/1.1"
    assert b"Authorization: Bearer k" in head
    assert json.loads(body) == put.body


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
