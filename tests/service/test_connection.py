"""Connections under hostile hands: heads, bodies, pipelines and clients that are too large, too slow, too many or make no sense."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.http.chunked_body import MAX_LINE, SMALL_BYTES, SMALL_CHUNKS, ChunkedBody, MalformedChunk
from service.http.connection import MAX_HEAD_BYTES, MAX_HEADERS, SKIPPED_BYTES, Connection
from service.http.connections import RESERVE
from tests.service.listening import Listening, Wire, direct, get, listening, post, retrieval
from tests.service.test_contract import STATIC
from tests.waiting import until


@pytest.fixture(scope="module")
def service(models: Path) -> Iterator[Listening]:
    with listening(models) as running:
        yield running


# -- heads --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * MAX_HEAD_BYTES,
        b"GET / HTTP/1.1\r\nX: " + b"a" * MAX_HEAD_BYTES,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEAD_BYTES // 6),
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n",
    ],
    ids=["endless url", "endless header", "endless headers", "many headers", "whole and too long"],
)
def test_a_head_that_is_too_large_is_431(service: Listening, head: bytes) -> None:
    before = service.refused("head_too_large")
    with service.connected() as wire:
        reply = wire.ask(head)
        assert reply.problem["status"] == 431
        assert reply.headers["connection"] == "close"
        assert wire.ended()
    assert service.refused("head_too_large") == before + 1


def test_long_heads_bodies_of_many_parts_and_long_names_are_answered_in_short(service: Listening) -> None:
    headers = [f"A{i}: b" for i in range(MAX_HEADERS - 2)]
    left = MAX_HEAD_BYTES - len(get("/livez", *headers, "X: "))
    assert service.ask(get("/livez", *headers, "X: " + "a" * left)).status == 200
    reply = service.ask(post("/retrieve", b'{"model": "books", "queries": [' + b"{}," * 200_000))
    assert reply.problem["status"] == 422
    assert "65536" in reply.problem["detail"]
    reply = service.ask(retrieval(model="x" * 1_000_000))
    assert reply.problem["status"] == 422
    assert len(reply.body) < 2000


@given(st.integers(1, 60), st.booleans())
def test_a_request_may_arrive_in_any_pieces(service: Listening, size: int, bare: bool) -> None:
    request = retrieval() + get("/livez")
    request = request.replace(b"\r\n", b"\n", 3) if bare else request  # a recipient may take a bare LF for a line's end
    with service.connected() as wire:
        for begin in range(0, len(request), size):
            wire.send(request[begin : begin + size])
        first = wire.reply()
        if first.status == 400 and bare:
            return
        assert first.status == 200
        assert len(first.document["results"]) == 1
        assert wire.reply().document == {"alive": True}


# -- bodies -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5), st.booleans(), st.data())
def test_a_chunked_body_ends_where_it_ends(chunks: list[bytes], trailers: bool, data: st.DataObject) -> None:
    body = b"".join(b"%x;e=1\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    body += b"0\r\n" + (b"A: b\r\nC: d\r\n" if trailers else b"") + b"\r\n"
    stream = body + b"GET / HTTP/1.1\r\n\r\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    follow, taken = ChunkedBody(), 0
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        piece = stream[begin:end]
        if not follow.done:
            taken += follow.take(piece)
    assert follow.done
    assert taken == len(body)


@pytest.mark.parametrize("body", [b"1" + b" " * 2 * MAX_LINE, b"0\r\n" + b"a: b\r\n" * MAX_LINE, b"1\r\na\r\n" * 2 * SMALL_CHUNKS])
def test_chunks_that_make_trouble(body: bytes) -> None:
    with pytest.raises(MalformedChunk):
        ChunkedBody().take(body)


def test_many_chunks_are_no_trouble_unless_they_are_small() -> None:
    body = (b"%x\r\n" % SMALL_BYTES + b"a" * SMALL_BYTES + b"\r\n") * 4 * SMALL_CHUNKS
    assert ChunkedBody().take(body) == len(body)


def test_chunked_requests_follow_one_another_and_their_trailers_are_no_headers(service: Listening) -> None:
    head = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    content = json.dumps({"model": "books", "queries": [{"history": []}], "m": 3}).encode()
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(content[i : i + 7]), content[i : i + 7]) for i in range(0, len(content), 7)) + b"0\r\n\r\n"
    with service.connected() as wire:
        wire.send((head + chunked) * 3 + get("/livez"))
        assert [len(wire.reply().document["results"][0]["items"]) for _ in range(3)] == [3, 3, 3]
        assert wire.reply().document == {"alive": True}
    body = json.dumps({"model": "books", "queries": [{"history": []}]}).encode()
    head = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    reply = service.ask(head + b"%x\r\n%s\r\n0\r\nX-Request-Id: fromtrailer\r\n\r\n" % (len(body), body))
    assert reply.status == 200
    assert reply.headers["x-request-id"] != "fromtrailer"


def test_a_body_over_the_limit_is_answered_although_its_client_sends_on(service: Listening) -> None:
    """Such a client gets its 413, and not a reset connection, because the service reads on for a while."""
    size = 32 << 20
    with service.connected() as wire:
        head, _, _ = post("/retrieve", b"").partition(b"Content-Length")
        wire.send(head + b"Content-Length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            wire.send(b" " * (1 << 16))
        reply = wire.reply()
        assert reply.problem["status"] == 413
        assert reply.headers["connection"] == "close"
        assert wire.ended()


def test_what_is_left_of_a_small_body_is_skipped_and_of_a_large_one_ends_the_connection(service: Listening) -> None:
    """The head of the answer says which: a client would lose the request that it sends next on a connection that ends."""
    request = post("/nowhere", b"x" * SKIPPED_BYTES)
    with service.connected() as wire:
        reply = wire.ask(request[:200])
        assert (reply.status, reply.headers.get("connection")) == (404, None)
        assert wire.ask(request[200:] + get("/livez")).document == {"alive": True}
    request = post("/nowhere", b"x" * (SKIPPED_BYTES + 300))
    with service.connected() as wire:
        reply = wire.ask(request[:200])
        assert (reply.status, reply.headers.get("connection")) == (404, "close")
        assert wire.ended()
    chunked = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
    for request in (post("/nowhere", b"{}", "Expect: 100-continue")[:-2], chunked % b"/nowhere"):  # what follows is not known
        with service.connected() as wire:
            reply = wire.ask(request)
            assert (reply.status, reply.headers.get("connection")) == (404, "close")
            assert wire.ended()
    with service.connected() as wire:  # a stream is answered while it is read
        reply = wire.ask(chunked % b"/retrieve/stream")
        assert (reply.status, reply.headers.get("connection")) == (200, None)


def test_bodies_share_a_memory(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.http.retrieve_route.BODIES_BYTES", 1)
    monkeypatch.setattr("service.http.retrieve_route.FREE_BYTES", 1000)
    request = post("/retrieve", json.dumps({"model": "books", "queries": [{"history": [], "exclude": ["x" * 99_000]}]}).encode())
    with listening(models, max_body_bytes=120_000) as running, running.connected() as slow:
        budget = direct(running, "/retrieve").bodies
        slow.send(request[:-1])
        until(lambda: budget.available < 60_000)
        assert running.ask(request).problem["status"] == 503
        assert running.ask(retrieval()).status == 200
        assert slow.ask(request[-1:]).status == 200
        until(lambda: budget.available == budget.units, "the room comes back, which is after the answer was sent")


# -- pipelines ----------------------------------------------------------------------------------------------------------


def test_what_is_sent_ahead_stays_in_the_socket(models: Path) -> None:
    with listening(models) as running, running.connected() as wire:
        engine = running.engines["books"]
        engine.go.clear()
        wire.send(retrieval())
        assert engine.started.wait(10)
        wire.raw.setblocking(False)
        requests, sent = get("/livez") * 20_000, 0
        try:
            while sent < 64 << 20:
                sent += wire.raw.send(requests)
        except BlockingIOError:
            pass
        assert sent < 64 << 20  # the kernel's buffers are full
        connection = cast(Connection, next(iter(running.server._connections.open)))
        until(lambda: len(connection._unparsed) > 0)
        assert len(connection._unparsed) <= 512 << 10
        wire.raw.settimeout(20)
        engine.go.set()
        assert wire.reply().status == 200
        assert wire.reply().document == {"alive": True}


def test_nonsense_costs_its_connection_alone(service: Listening, caplog: pytest.LogCaptureFixture) -> None:
    with service.connected() as wire:
        assert wire.ask(get("/livez") + b"nonsense\r\n\r\n").status == 200
        assert wire.reply().problem["status"] == 400
        assert wire.ended()
    assert service.ask(get("/livez")).status == 200
    inner = get("/readyz")
    with service.connected() as wire:
        wire.send(b"CONNECT /livez HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(inner) + inner)
        assert wire.reply().problem["status"] == 400
        with pytest.raises((EOFError, ConnectionResetError)):
            wire.reply()
    head = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
    with service.connected() as wire:
        assert wire.ask(head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n").problem["status"] == 400
        assert wire.ended()
    assert "Traceback" not in caplog.text


UPGRADES = [
    "Upgrade: h2c\r\nConnection: Upgrade",
    "upgrade: websocket\r\nConnection: keep-alive, Upgrade",
    "uPgRaDe: h2c\r\nConnection: upgrade",
]


@pytest.mark.parametrize("headers", UPGRADES)
def test_a_body_behind_a_wish_to_upgrade_is_that_requests(service: Listening, headers: str) -> None:
    """Java's client sends such a wish with every request. What is in the body must not become a request of its own."""
    inner = get("/readyz")
    with service.connected() as wire:
        assert wire.ask(post("/nowhere", inner, headers) + get("/livez")).status == 404
        assert wire.reply().document == {"alive": True}
    with service.connected() as wire:
        wire.send(retrieval().replace(b"Host: test", b"Host: test\r\n" + headers.encode()) + get("/livez"))
        assert len(wire.reply().document["results"]) == 1
        assert wire.reply().document == {"alive": True}


def test_a_silent_connection_ends_and_line_ends_are_no_word(models: Path) -> None:
    with listening(models, head_timeout_s=0.2, keep_alive_s=0.2) as running:
        with running.connected() as silent:
            assert silent.ended()
        with running.connected() as kept:
            assert kept.ask(get("/livez")).status == 200
            assert kept.ended()
        until(lambda: not running.server._connections.open)
    with listening(models, head_timeout_s=0.1, keep_alive_s=60) as running, running.connected() as kept:
        assert kept.ask(get("/livez") + b"\r\n").status == 200
        with running.connected() as silent:
            assert silent.ended()  # two looks at the times have passed
        assert kept.ask(b"\r\n" + get("/livez")).document == {"alive": True}


# -- time ---------------------------------------------------------------------------------------------------------------


def test_a_head_that_is_not_complete_in_time_is_408(models: Path) -> None:
    with listening(models, head_timeout_s=0.2) as running:
        with running.connected() as wire:
            assert wire.ask(b"GET / HTTP/1.1\r\nA:").problem["status"] == 408
            assert wire.ended()
        with running.connected() as dripping:
            stop = threading.Event()

            def drip() -> None:
                while not stop.wait(0.02):
                    try:
                        dripping.send(b"a")
                    except OSError:
                        return

            dripping.send(b"GET / HTTP/1.1\r\nA:")
            thread = threading.Thread(target=drip)
            thread.start()
            assert dripping.reply().problem["status"] == 408
            stop.set()
            thread.join()
        assert running.refused("head_too_slow") == 2


def test_a_client_that_takes_nothing_is_cut_off(models: Path) -> None:
    with listening(models, write_timeout_s=0.2) as running, running.connected(receive_buffer=4096) as wire:
        assert wire.ask(get("/livez")).status == 200  # the service has the connection
        wire.raw.setblocking(False)
        try:
            while True:
                wire.raw.send(get("/openapi.json"))
        except OSError:  # nothing more is taken, or it is cut off already
            pass
        until(lambda: not running.server._connections.open)
        assert running.refused("not_read") == 1


def test_a_client_that_reads_steadily_gets_its_answer_however_long_it_takes(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not crowded out, although its request is answered as far as the application knows."""
    monkeypatch.setattr("service.http.connections.GRACE_S", 0)
    ids = [f"{i:06}" + "x" * 500 for i in range(6000)]
    with listening(models, write_timeout_s=1.5, max_connections=1) as running, running.connected(receive_buffer=4096) as slow:
        entry = running.app.state.service.registry.entry("books")
        monkeypatch.setattr(entry, "removed", tuple(ids))
        monkeypatch.setattr(running.app.state.service.keys, "check", lambda *_: None)
        slow.send(get("/models/books/removed"))
        began = time.monotonic()
        received = b""
        while time.monotonic() < began + 2.5:
            received += slow.raw.recv(1 << 14)
            time.sleep(0.02)
        with running.connected():
            while len(received) < 3_000_000:
                piece = slow.raw.recv(1 << 16)
                assert piece, f"cut off after {len(received)} bytes"
                received += piece
        assert running.refused("not_read") == running.refused("crowded_out") == 0


# -- number -------------------------------------------------------------------------------------------------------------


def test_above_the_limit_who_is_idle_or_never_asked_makes_room_but_not_who_has_just_come(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.http.connections.GRACE_S", 0)
    with listening(models, max_connections=2) as running, running.connected() as first, running.connected() as second:
        for wire in (first, second, first):
            assert wire.ask(get("/livez")).status == 200
        assert running.ask(retrieval()).status == 200
        assert second.ended()  # it was idle for longest
        assert first.ask(get("/livez")).status == 200
    monkeypatch.setattr("service.http.connections.GRACE_S", 0)
    with listening(models, max_connections=2) as running, running.connected() as asks:
        assert asks.ask(get("/livez")).status == 200
        with running.connected() as silent:
            until(lambda: len(running.server._connections.silent) == 1)
            with running.connected() as third:
                assert silent.ended()
                assert third.ask(get("/livez")).status == 200
        assert asks.ask(get("/livez")).status == 200
    monkeypatch.setattr("service.http.connections.GRACE_S", 600)
    with listening(models, max_connections=1) as running, running.connected() as first:
        until(lambda: len(running.server._connections.silent) == 1)
        assert running.ask(retrieval()).problem["status"] == 503
        assert running.ask(get("/livez")).status == 200
        assert first.ask(retrieval()).status == 200


def test_above_the_limit_only_probes_are_answered(models: Path) -> None:
    with listening(models, max_connections=2) as running, running.connected() as first, running.connected() as second:
        engine = running.engines["books"]
        engine.go.clear()
        for wire in (first, second):
            wire.send(retrieval())
        until(lambda: not (running.server._connections.idle or running.server._connections.silent))
        refused = running.ask(retrieval())
        assert refused.problem["status"] == 503
        assert refused.headers["connection"] == "close"
        for path in ("/livez", "/readyz", "/metrics"):
            reply = running.ask(get(path))
            assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert running.refused("too_many") == 1
        engine.go.set()
        assert first.reply().status == second.reply().status == 200
        until(lambda: len(running.server._connections.open) <= 2)


def test_a_connection_that_reads_on_after_its_answer_makes_room(models: Path) -> None:
    with listening(models, max_connections=2) as running, ExitStack() as many:
        for _ in range(2):
            wire = many.enter_context(running.connected())
            assert wire.ask(b"POST /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n").status == 404
        until(lambda: running.ask(retrieval()).status == 200)
        assert running.refused("crowded_out") >= 1


@pytest.fixture
def two_keys(tmp_path: Path) -> tuple[Path, bytes, bytes]:
    """A file of keys; requests of one that is refused from the second on, and of one without limits."""
    keys, names = tmp_path / "keys.toml", ("flood", "shop")
    written = [f'[[keys]]\nname = "{name}"\nkey = "{name}-key-0123456789"\nrole = "retrieve"\n' for name in names]
    keys.write_text(written[0] + "rate = 0.001\nburst = 1\n" + written[1])
    body = json.dumps({"model": "books", "queries": [{"history": ["item-1"]}], "m": 2}).encode()
    flood, shop = (post("/retrieve", body, f"Authorization: Bearer {name}-key-0123456789") for name in names)
    return keys, flood, shop


def test_connections_whose_refusals_are_held_back_keep_nobody_out(
    models: Path, two_keys: tuple[Path, bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.http.connections.GRACE_S", 0)
    monkeypatch.setattr("service.http.key_limits.MIN_HELD_S", 2.0)
    keys, flood, shop = two_keys
    with listening(models, max_connections=2, keys_file=keys) as running, ExitStack() as many:
        assert running.ask(flood).status == 200
        connections = running.server._connections
        held: list[Wire] = []
        for _ in range(4):  # one after the other: a connection that has sent nothing yet makes room for the next
            held.append(many.enter_context(running.connected()))
            held[-1].send(flood)
            until(lambda: len(connections.held) == len(held))
        held.pop().raw.close()  # its client has gone
        until(lambda: len(connections.held) == 3)
        with running.connected() as first, running.connected() as second:
            for wire in (first, second):
                assert wire.ask(shop).status == 200
            assert [wire.reply().status for wire in held] == [429] * 3  # each takes the place of one that is idle
            until(lambda: not connections.held)
            assert len(connections.open) == 2
    assert not connections.held


def test_no_more_are_held_than_there_is_room_for_and_none_when_the_service_stops(
    models: Path, two_keys: tuple[Path, bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.http.key_limits.MIN_HELD_S", 600)
    monkeypatch.setattr("service.http.key_limits.MAX_HELD_S", 600)
    keys, flood, _ = two_keys
    with ExitStack() as many:
        with listening(models, max_connections=64, keys_file=keys) as running:
            assert running.ask(flood).status == 200
            connections = running.server._connections
            assert connections.held_limit > 2
            held = [many.enter_context(running.connected()) for _ in range(2)]
            for wire in held:
                wire.send(flood)
            until(lambda: len(connections.held) == 2)
            monkeypatch.setattr(running.server, "_make_room", lambda: None)  # which would set the limit anew
            connections.held_limit = 2  # as where few descriptors are left
            beyond = running.ask(flood)
            assert (beyond.status, beyond.headers["connection"]) == (429, "close")
        assert [wire.reply().status for wire in held] == [429, 429]


def test_held_connections_are_no_other_things_that_take_descriptors(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(models, max_connections=64) as running:
        connections = running.server._connections
        monkeypatch.setattr("service.processes.server._raise_limit", lambda wanted: 300)
        monkeypatch.setattr("service.processes.server.open_descriptors", lambda: 50 + len(connections.held))
        running.server._make_room()
        before = connections.limit, connections.held_limit
        assert 0 < before[1] < 300
        connections.held |= {cast(Connection, number) for number in range(before[1])}
        running.server._make_room()
        assert (connections.limit, connections.held_limit) == before
        connections.held.clear()


@pytest.mark.parametrize("grace_s", [0, 600])
def test_silent_connections_neither_stay_nor_keep_all_others_out(models: Path, monkeypatch: pytest.MonkeyPatch, grace_s: float) -> None:
    monkeypatch.setattr("service.http.connections.GRACE_S", grace_s)
    with listening(models, max_connections=1, head_timeout_s=600) as running, running.connected() as busy:
        connections, engine = running.server._connections, running.engines["books"]
        engine.go.clear()
        busy.send(retrieval())
        until(lambda: bool(connections.open) and not connections.silent)
        with ExitStack() as many:
            for _ in range(4 * RESERVE):
                many.enter_context(socket.create_connection(running.address))
            if grace_s:
                until(lambda: running.refused("too_many") >= 3 * RESERVE)
                assert running.ask(get("/livez")).problem["status"] == 503  # at once
            else:
                until(lambda: running.refused("crowded_out") >= 3 * RESERVE)
                assert running.ask(get("/livez")).status == 200
            assert len(connections.open) <= 1 + 2 * connections.reserve
        engine.go.set()
        assert busy.reply().status == 200


def test_head_leaves_a_connection_in_order(service: Listening) -> None:
    """A body after HEAD would be taken for the next answer."""
    connection = http.client.HTTPConnection(*service.address, timeout=20)
    for path in ("/livez", "/metrics", "/openapi.json", STATIC, "/nothing"):
        statuses = []
        for method in ("HEAD", "GET"):
            connection.request(method, path)
            answer = connection.getresponse()
            assert bool(answer.read()) == (method == "GET"), path
            statuses.append(answer.status)
        assert statuses[0] == statuses[1]
    connection.close()
