"""What somebody with a write key that leaked, or a careless feed, does to the live catalogue of a model of histories.

After each attack an ordinary write must be answered, and the item found.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime

import orjson

from tests.hostile.attacks.target import SLACK_S, Seen, Target, flood, tally
from tests.hostile.attacks.wire import Answer, Wire, head, post

BULKS, LINES = 4, 256
"""Bulks that a worker reads at a time, and lines of each that wait."""
MIB = 1 << 20
NOT_NOW = {"429", "503"}
WRITTEN = {"200", "201", "202"}


def abandoned_bulks(target: Target) -> Seen:
    """Bulks of 256 items with 64 events each, from clients that hang up as soon as they have sent them."""
    numbers, sent = iter(range(1 << 30)), 0
    give_up = time.monotonic() + target.spell_s
    while time.monotonic() < give_up and not target.stop.is_set():
        lines = b"".join(_line(target, f"abandoned-{next(numbers)}", 64) for _ in range(LINES))
        for wire in target.connect_many(BULKS):
            sent += wire.send(_bulk_head(target) + _chunk(lines), 1)
            wire.close()
        target.wires.clear()
    before = _sequence(target)
    seen = _after(target, f"{sent} bulks abandoned", True)
    queued = _sequence(target) - before
    return Seen(seen.ok and queued <= (BULKS + 1) * LINES, f"{seen.told}, after {queued} others")


def unread_bulks(target: Target) -> Seen:
    """More bulks than are taken at once, of thousands of lines whose outcomes nobody reads: the connections are ended."""
    wires = target.connect_many(6, receive_buffer=4096)
    for wire in wires:
        wire.send(_bulk_head(target), 1)
    flood(target, wires, _chunk(b"".join(b'{"id": "%s"}\n' % (b"x" * 400) for _ in range(LINES))), 8 * MIB, until_answered=False)
    target.hold(wires, target.limits.stream_idle_s + target.limits.write_timeout_s + SLACK_S)
    ended = [wire.ends(SLACK_S) for wire in wires]
    return _after(target, f"{sum(ended)} of {len(wires)} connections ended", all(ended))


def silent_bulks(target: Target) -> Seen:
    """As many bulks as are taken that say nothing: others are refused until they end."""
    wires = target.connect_many(BULKS)
    for wire in wires:
        wire.send(_bulk_head(target) + b"1\r\n{\r\n", 1)
    other = _bulk(target, [b"{}"])
    outcomes = [wire.ends(target.limits.stream_idle_s + SLACK_S) for wire in wires]
    ok = other is not None and other.status in (200, 429) and all(outcomes)
    return _after(target, f"{sum(outcomes)} of {len(wires)} silent bulks ended", ok)


def endless_line(target: Target) -> Seen:
    """A line of a bulk without an end."""
    wire = target.connect()
    wire.send(_bulk_head(target), 1)
    (sent,) = flood(target, [wire], _chunk(b"x" * MIB), 64 * MIB, until_answered=False)
    wire.send(_chunk(b"\n") + b"0\r\n\r\n")
    found = wire.answers(1, 10)
    statuses = _statuses(found[0]) if found else {"none": 1}
    return _after(target, f"{sent / 1e6:.0f} MB, then {statuses}", set(statuses) == {"413"})


def empty_lines(target: Target) -> Seen:
    """Nothing but line ends: each costs the service more than the client."""
    wire = target.connect()
    wire.send(_bulk_head(target), 1)
    give_up, block, sent = time.monotonic() + target.spell_s, _chunk(b"\n" * 0x10000), 0
    while time.monotonic() < give_up and not target.stop.is_set() and wire.send(block, 1):
        sent += len(block)
    wire.send(b"0\r\n\r\n")
    return _after(target, f"{sent / 1e6:.0f} MB of line ends", True)


def wrong_lines(target: Target) -> Seen:
    """Lines of all kinds that are refused, and between them one that is right."""
    wrong = [
        b"{}", b"null", b"[]", b'"x"', b"nonsense", b"\xff\xfe", b'{"id": 5}', b'{"id": ""}', b'{"id": "%s"}' % (b"a" * 600),
        b'{"id": "\\ud800", "like": ["x"]}', b'{"id": "self", "like": ["self"]}', b'{"id": "self", "events": [["self"]]}',
        b'{"id": "a", "fields": {"nobody": 1}}', b'{"id": "a", "fields": ' + b'{"a":' * 150 + b"1" + b"}" * 150 + b"}",
        b'{"id": "a", "source_version": 1.5}', b'{"id": "a", "source_version": -1}', b'{"id": "a", "source_version": 9223372036854775808}',
        b'{"id": "a", "valid_until": "tomorrow"}', b'{"id": "a", "valid_until": "9999-12-31T23:59:59-01:00"}',
        b'{"id": "a", "users": ["u"]}', b'{"id": "a", "events": ' + b"[" * 1000 + b"]" * 1000 + b"}", b'{"id": "nobody", "delete": true}',
    ]  # fmt: skip
    right = _line(target, "right").strip()
    counted: dict[str, int] = {}
    answered = 0
    for _ in range(20):
        found = None if target.stop.is_set() else _bulk(target, [*wrong * 10, right])
        for status, count in (_statuses(found) if found is not None else {}).items():
            counted[status] = counted.get(status, 0) + count
        answered += found is not None
    ok = answered == 20 and set(counted) <= {"200", "201", "404", "422"} and counted.get("200", 0) + counted.get("201", 0) == answered
    return _after(target, str(counted), ok)


def one_item_for_ever(target: Target) -> Seen:
    """One item, changed as often as there is time for."""
    return _spell(target, (("one", {"fields": {target.filter_column: f"{i}" * 100}} | _evidence(target, i)) for i in range(1 << 30)))


def items_that_have_expired(target: Target) -> Seen:
    """Ever new items whose time has passed already."""
    past = {"valid_until": "1999-12-31T23:59:59Z"}
    return _spell(target, ((f"late-{i}", _evidence(target, i) | past) for i in range(1 << 30)))


def items_that_expire_together(target: Target) -> Seen:
    """Thousands of items that expire at one moment."""
    at = time.time() + 2 * target.spell_s
    until = datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
    rest = orjson.dumps({"valid_until": until})[1:]
    give_up, statuses = time.monotonic() + target.spell_s, dict[str, int]()
    for begin in range(0, 1 << 20, LINES):
        if time.monotonic() > give_up or target.stop.is_set():
            break
        found = _bulk(target, [_line(target, f"brief-{i}").strip()[:-1] + b"," + rest for i in range(begin, begin + LINES)])
        for status, count in (_statuses(found) if found is not None else {"none": 1}).items():
            statuses[status] = statuses.get(status, 0) + count
    target.wait(max(at - time.time(), 0) + 1)
    return _after(target, f"{statuses}, then expired", set(statuses) <= WRITTEN | {"507"})


def items_that_come_and_go(target: Target) -> Seen:
    """Ever new items, each deleted at once."""
    return _spell(target, ((f"gone-{i // 2}", None if i % 2 else _evidence(target, i)) for i in range(1 << 30)))


def waiting_for_what_never_comes(target: Target) -> Seen:
    """Two hundred retrievals that wait for an operation of the far future, while items are put."""
    wires = target.connect_many(200)
    body = orjson.dumps(orjson.loads(target.retrieval()) | {"min_sequence": 1 << 62, "timeout_ms": 1e3 * target.spell_s})
    for wire in wires:
        wire.send(post(body), 1)
    seen = one_item_for_ever(target)
    outcomes = [wire.outcome(target.spell_s + SLACK_S) for wire in wires]
    return Seen(seen.ok and set(outcomes) == {"503"}, f"{tally(outcomes)}, expected 503; {seen.told}")


def tags_without_end(target: Target) -> Seen:
    """Conditions of 60 kilobytes."""
    wire, outcomes = target.connect(), []
    for tags in (b'"1",' * 15_000, b'"' * 60_000, b'W/"' * 20_000, b"*" * 60_000):
        for header in (b"If-Match", b"If-None-Match"):
            wire.held.clear()
            wire.send(_put(target, "tagged", _evidence(target, 1)).replace(b"\r\nHost:", b"\r\n" + header + b": " + tags + b"\r\nHost:", 1))
            outcomes.append(wire.outcome())
    return _after(target, tally(outcomes), set(outcomes) <= {"200", "201", "412"})


# -- requests -------------------------------------------------------------------------------------------------------------


def _after(target: Target, told: str, ok: bool) -> Seen:
    """Whether an ordinary write is answered after an attack, and found. A catalogue that an attack has filled may say 507."""
    wire = target.connect()
    status, give_up = "none", time.monotonic() + 3 * SLACK_S
    while time.monotonic() < give_up:
        wire.held.clear()
        wire.send(_put(target, "ordinary", _evidence(target, 0)))
        status = wire.outcome(3 * SLACK_S)
        if status not in NOT_NOW:
            break
        target.wait(0.1)
    if status not in WRITTEN | {"507"}:
        return Seen(False, f"{told}; then a write: {status}")
    wire.held.clear()
    wire.send(post(orjson.dumps(orjson.loads(target.retrieval()) | {"filter": {"id": ["ordinary"]}, "m": 1})))
    found = wire.answers()
    items = orjson.loads(found[0].body)["results"][0]["items"] if found and found[0].status == 200 else None
    there = items is not None and (status == "507" or [item["id"] for item in items] == ["ordinary"])
    return Seen(ok and there, f"{told}; then a write: {status}, {'found' if there else items}")


def _spell(target: Target, writes: Iterator[tuple[str, dict[str, object] | None]]) -> Seen:
    """Writes, one after the other, as long as an attack lasts; None deletes."""
    wire, outcomes = target.connect(), []
    give_up = time.monotonic() + target.spell_s
    for item, body in writes:
        if time.monotonic() > give_up or target.stop.is_set() or wire.ended:
            break
        wire.held.clear()
        wire.send(_put(target, item, body))
        outcomes.append(wire.outcome())
    return _after(target, tally(outcomes), bool(outcomes) and set(outcomes) <= WRITTEN)


def _evidence(target: Target, i: int, events: int = 1) -> dict[str, object]:
    return {"events": [[target.ids[(7 * i + j + k) % len(target.ids)] for j in range(3)] for k in range(events)]}


def _line(target: Target, item: str, events: int = 1) -> bytes:
    return orjson.dumps({"id": item} | _evidence(target, zlib.crc32(item.encode()), events), option=orjson.OPT_APPEND_NEWLINE)


def _put(target: Target, item: str, body: dict[str, object] | None) -> bytes:
    content = b"" if body is None else orjson.dumps(body)
    method = "DELETE" if body is None else "PUT"
    return head(len(content), _authorised(target), f"/models/{target.model}/items/{item}", method=method) + content


def _bulk_head(target: Target) -> bytes:
    return head(None, _authorised(target), f"/models/{target.model}/items", "application/x-ndjson")


def _authorised(target: Target) -> str:
    return f"Authorization: Bearer {target.limits.write_key}\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"


def _bulk(target: Target, lines: list[bytes]) -> Answer | None:
    """The answer to a whole bulk; None where there is none."""
    wire: Wire = target.connect()
    wire.send(_bulk_head(target) + _chunk(b"\n".join(lines)) + b"0\r\n\r\n")
    found = wire.answers(1, 30)
    wire.close()
    return found[0] if found else None


def _sequence(target: Target) -> int:
    """The last operation of the catalogue."""
    wire = target.connect()
    wire.send(f"GET /models/{target.model} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    found = wire.answers()
    return int(orjson.loads(found[0].body)["live"]["sequence"]) if found else 0


def _statuses(answer: Answer) -> dict[str, int]:
    """How many lines of a bulk were answered with each status; of a bulk that was refused, its own."""
    counted: dict[str, int] = {}
    for line in answer.body.splitlines() if answer.status == 200 else ():
        status = str(orjson.loads(line)["status"])
        counted[status] = counted.get(status, 0) + 1
    return counted if answer.status == 200 else {str(answer.status): 1}
