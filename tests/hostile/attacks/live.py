"""What somebody with a write key that leaked, or a careless feed, does to the live catalogue of a model of histories.

After each attack an ordinary write must be answered, and the item found.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime

import orjson

from tests.hostile.attacks.target import SLACK_S, Seen, Target, flood, judged, tally
from tests.hostile.attacks.wire import LIVEZ, Answer, head, post

BULKS, LINES = 4, 256
"""Bulks that a worker reads at a time, and lines of each that wait."""
MIB = 1 << 20
NOT_NOW = {"429", "503"}
WRITTEN = {"200", "201", "202"}


def abandoned_bulks(target: Target) -> Seen:
    """Bulks of 256 items with 64 events each, from clients that hang up as soon as they have sent them."""
    sent = 0
    for number in target.spell():
        lines = b"".join(_line(target, f"abandoned-{number * LINES + i}", 64) for i in range(LINES))
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
    wires = target.send_many(6, _bulk_head(target), receive_buffer=4096)
    flood(target, wires, _chunk(b"".join(b'{"id": "%s"}\n' % (b"x" * 400) for _ in range(LINES))), 8 * MIB, until_answered=False)
    target.hold(wires, target.limits.stream_idle_s + target.limits.write_timeout_s + SLACK_S)
    ended = [wire.ends(SLACK_S) for wire in wires]
    return _after(target, f"{sum(ended)} of {len(wires)} connections ended", all(ended))


def silent_bulks(target: Target) -> Seen:
    """As many bulks as are taken that say nothing: others are refused until they end."""
    wires = target.send_many(BULKS, _bulk_head(target) + b"1\r\n{\r\n")
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
    statuses = _statuses(found[0] if found else None)
    return _after(target, f"{sent / 1e6:.0f} MB, then {tally(statuses)}", set(statuses) == {"413"})


def empty_lines(target: Target) -> Seen:
    """Nothing but line ends: each costs the service more than the client."""
    wire = target.connect()
    wire.send(_bulk_head(target), 1)
    block, sent = _chunk(b"\n" * 0x10000), 0
    for _ in target.spell():
        if not wire.send(block, 1):
            break
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
    bulks = [_bulk(target, [*wrong * 10, right]) for _ in range(20) if not target.stop.is_set()]
    statuses = [status for found in bulks for status in _statuses(found)]
    ok = len(bulks) == 20 and set(statuses) <= {"200", "201", "404", "422"} and sum(status in WRITTEN for status in statuses) == 20
    return _after(target, tally(statuses), ok)


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
    statuses = []
    for number in target.spell():
        lines = [_line(target, f"brief-{number * LINES + i}").strip()[:-1] + b"," + rest for i in range(LINES)]
        statuses += _statuses(_bulk(target, lines))
    target.wait(max(at - time.time(), 0) + 1)
    return _after(target, f"{tally(statuses)}, then expired", set(statuses) <= WRITTEN | {"507"})


def items_that_come_and_go(target: Target) -> Seen:
    """Ever new items, each deleted at once."""
    return _spell(target, ((f"gone-{i // 2}", None if i % 2 else _evidence(target, i)) for i in range(1 << 30)))


def waiting_for_what_never_comes(target: Target) -> Seen:
    """Two hundred retrievals that wait for an operation of the far future, while items are put."""
    wires = target.send_many(200, post(target.retrieval(min_sequence=1 << 62, timeout_ms=1e3 * target.spell_s)))
    seen = one_item_for_ever(target)
    return judged([wire.outcome(target.spell_s + SLACK_S) for wire in wires], {"503"}, f"{seen.told}; ", seen.ok)


def tags_without_end(target: Target) -> Seen:
    """Conditions of 60 kilobytes."""
    wire, outcomes = target.connect(), []
    for tags in (b'"1",' * 15_000, b'"' * 60_000, b'W/"' * 20_000, b"*" * 60_000):
        for header in (b"If-Match", b"If-None-Match"):
            put = _put(target, "tagged", _evidence(target, 1))
            outcomes.append(wire.ask(put.replace(b"\r\nHost:", b"\r\n%b: %b\r\nHost:" % (header, tags), 1)))
    return _after(target, tally(outcomes), set(outcomes) <= {"200", "201", "412"})


# -- requests -------------------------------------------------------------------------------------------------------------


def _after(target: Target, told: str, ok: bool) -> Seen:
    """Whether an ordinary write is answered after an attack, and found. A catalogue that an attack has filled may say 507."""
    wire, give_up = target.connect(), time.monotonic() + 3 * SLACK_S
    while (status := wire.ask(_put(target, "ordinary", _evidence(target, 0)), 3 * SLACK_S)) in NOT_NOW and time.monotonic() < give_up:
        target.wait(0.1)
    if status not in WRITTEN | {"507"}:
        return Seen(False, f"{told}; then a write: {status}")
    found = target.ask(post(target.retrieval(m=1, filter={"id": ["ordinary"]})))
    items = orjson.loads(found.body)["results"][0]["items"] if found and found.status == 200 else None
    there = items is not None and (status == "507" or [item["id"] for item in items] == ["ordinary"])
    return Seen(ok and there, f"{told}; then a write: {status}, {'found' if there else items}")


def _spell(target: Target, writes: Iterator[tuple[str, dict[str, object] | None]]) -> Seen:
    """Writes, one after the other, as long as an attack lasts; None deletes."""
    wire, outcomes = target.connect(), []
    for _, (item, body) in zip(target.spell(), writes, strict=False):
        if wire.ended:
            break
        outcomes.append(wire.ask(_put(target, item, body)))
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
    return target.ask(_bulk_head(target) + _chunk(b"\n".join(lines)) + b"0\r\n\r\n", 30)


def _sequence(target: Target) -> int:
    """The last operation of the catalogue."""
    found = target.ask(LIVEZ.replace(b"livez", f"models/{target.model}".encode()))
    return int(orjson.loads(found.body)["live"]["sequence"]) if found else 0


def _statuses(answer: Answer | None) -> list[str]:
    """The status of each line of a bulk; of a bulk that was refused or not answered, that alone."""
    if answer is None or answer.status != 200:
        return [str(answer.status) if answer else "none"]
    return [str(orjson.loads(line)["status"]) for line in answer.body.splitlines()]
