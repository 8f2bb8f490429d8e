"""The writes of a load test: what is put, and how it shares a loop with retrievals."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.cell import Load, _with_writes
from loadtest.loops import request_bytes
from loadtest.queries import Query
from loadtest.target import ServiceRefused, Target
from loadtest.writes import PREFIX, Writes, delete_all, mixed, put_bytes

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
    query = Query(kind, values)  # type: ignore[arg-type]
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


class Service(ThreadingHTTPServer):
    """Answers retrievals and writes, and remembers the keys and what was written and deleted."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.put: list[str] = []
        self.deleted: list[str] = []
        self.keys: Counter[tuple[str, str]] = Counter()


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def do_PUT(self) -> None:
        self.server.put.append(self.path.rpartition("/")[2])
        self.answer({"sequence": 1, "outcome": "inserted"}, 201)

    def do_POST(self) -> None:
        if self.path == "/retrieve":
            self.answer({"results": [{"items": [], "complete": True}], "timing": {"ms_per_query": 0.5}}, 200)
            return
        ids = [json.loads(line)["id"] for line in self.body().splitlines()]
        self.server.deleted += ids
        self.answer("\n".join(json.dumps({"id": item, "status": 404 if item == "gone" else 200}) for item in ids), 200)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def answer(self, document: object, status: int) -> None:
        if self.command == "PUT" or self.path == "/retrieve":
            self.body()
        self.server.keys[self.command, self.headers.get("Authorization", "")] += 1
        content = (document if isinstance(document, str) else json.dumps(document)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def test_a_mixed_loop_measures_both_and_deletes_what_it_has_put() -> None:
    with Service() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            address = server.server_address[:2]
            target = Target("127.0.0.1", int(address[1]))
            writer = Target("127.0.0.1", int(address[1]), headers={"Authorization": "Bearer writes"})
            load = Load(target, "my books", 1, QUERIES, seconds=0.3, rounds=2, writes_per_s=20, writer=writer)
            retrieved, written = _with_writes(load, [request_bytes("/retrieve", {})], 40, [0, 1])
        finally:
            server.shutdown()
    assert (retrieved["samples"], retrieved["statuses"], retrieved["offered_per_s"]) == (24, {"200": 24}, 40)
    assert (written["samples"], written["failed"], written["statuses"]) == (12, 0, {"201": 12})
    assert sorted(server.put) == sorted(server.deleted) == sorted(f"{PREFIX}{n}" for n in range(12))
    assert server.keys == {("POST", ""): 24, ("PUT", "Bearer writes"): 12, ("POST", "Bearer writes"): 1}


def test_what_is_not_deleted_is_told() -> None:
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        target = Target("127.0.0.1", int(server.server_address[1]))
        try:
            delete_all(target, "books", ["a", "gone"])
        finally:
            server.shutdown()
            thread.join()
    with pytest.raises(ServiceRefused, match="no answer"):
        delete_all(target, "books", ["a"])


def test_a_put_is_a_whole_request() -> None:
    put = Writes(QUERIES).put(3)
    head, _, body = put_bytes(Target("h", 80, "/prefix", {"Authorization": "Bearer k"}), "a/b c", put).partition(b"\r\n\r\n")
    assert head.splitlines()[0] == b"PUT /prefix/models/a%2Fb%20c/items/loadtest-item-3 HTTP/1.1"
    assert b"Authorization: Bearer k" in head
    assert json.loads(body) == put.body
