"""Bodies that are too large, never end, come slowly, or never begin; and JSON that costs more than it says."""

from __future__ import annotations

from collections.abc import Set

import orjson

from tests.hostile.attacks.target import SLACK_S, STALL_S, Seen, Target, drip, flood, judged
from tests.hostile.attacks.wire import Wire, head, post

MIB = 1 << 20
TAKEN = 16 << 20
ECHO = 1 << 16
"""A refusal is shorter than this, whatever was asked."""


def oversized_bodies(target: Target) -> Seen:
    """Four megabytes where one is allowed, from clients that send all of it before they read: each should read its 413."""
    wires = target.send_many(10, head(4 * MIB))
    flood(target, wires, b"x" * MIB, 4 * MIB, until_answered=False)
    return _and_ended(wires, {"413"})


def endless_bodies(target: Target) -> Seen:
    """Ten gigabytes announced."""
    return _endless(target, head(10 << 30), b"x" * MIB, {"413"})


def endless_chunks(target: Target) -> Seen:
    """Chunks without end."""
    return _endless(target, head(None), b"10000\r\n" + b"x" * 0x10000 + b"\r\n", {"413"})


def endless_small_chunks(target: Target) -> Seen:
    """Chunks of one byte without end: each costs the service more than the client."""
    return _endless(target, head(None), b"1\r\nx\r\n" * 10_000, {"400", "408", "413"})


def _endless(target: Target, head: bytes, block: bytes, expected: Set[str]) -> Seen:
    wires = target.send_many(10, head)
    most = max(flood(target, wires, block, 64 * MIB), default=0)
    return _and_ended(wires, expected, f"after at most {most / 1e6:.1f} MB ", most < TAKEN)


def _and_ended(wires: list[Wire], expected: Set[str], before: str = "", held: bool = True) -> Seen:
    """Each connection is answered so, and then ended."""
    outcomes = [wire.outcome(5) for wire in wires]
    ended = sum(wire.ends(2 * SLACK_S) for wire in wires)
    return judged(outcomes, expected, f"{ended} of {len(wires)} connections ended, {before}", held and ended == len(wires))


def held_bodies(target: Target) -> Seen:
    """Four hundred bodies of one megabyte, each without its last byte: some may be refused, the rest ends in time."""
    wires = target.send_many(400, head(MIB) + b"x" * (MIB - 1), within_s=1)
    return _in_time(wires, target.limits.body_timeout_s + SLACK_S, {"408", "503", "closed"})


def slow_bodies(target: Target) -> Seen:
    """Two hundred bodies of which a byte comes four times a second."""
    wires = target.send_many(200, head(1000))
    drip(target, wires, b" ", 0.25, target.limits.body_timeout_s + SLACK_S)
    return _in_time(wires, STALL_S, {"408"})


def expected_bodies(target: Target) -> Seen:
    """Two hundred clients that ask for 100 Continue and then send nothing."""
    wires = target.send_many(200, head(1000, "Expect: 100-continue\r\n"))
    target.wait(target.limits.body_timeout_s)
    return _in_time(wires, SLACK_S, {"408"})


def slow_streams(target: Target) -> Seen:
    """A hundred streams that never say a whole line: they end once they are silent, or in time."""
    wires = target.send_many(100, head(None, path="/retrieve/stream", kind="application/x-ndjson") + b"1\r\n{\r\n")
    return _in_time(wires, target.limits.stream_idle_s + SLACK_S, {"200", "408", "429", "503", "closed"})


def _in_time(wires: list[Wire], within_s: float, expected: Set[str]) -> Seen:
    """Each connection has one of these outcomes; the first may take its time."""
    return judged([wire.outcome(within_s if i == 0 else STALL_S) for i, wire in enumerate(wires)], expected)


def bombs() -> dict[str, bytes]:
    """Bodies of up to one megabyte that are cheap to write: all of them are wrong."""
    numbers = b",".join([b"1"] * 400_000)
    return {
        "open brackets": b"[" * (MIB - 1),
        "nested objects": b'{"queries":' * (MIB // 11 - 1),
        "nested in a filter": b'{"queries":[{"history":[]}],"filter":{"a":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}}",
        "empty queries": b'{"queries":[' + b",".join([b"{}"] * 340_000) + b"]}",
        "a long history": b'{"queries":[{"history":[' + b",".join([b'""'] * 340_000) + b"]}]}",
        "a long vector": b'{"queries":[{"vector":[' + numbers + b"]}]}",
        "a number of a million digits": b'{"queries":[{"history":[]}],"m":' + b"9" * (MIB - 100) + b"}",
        "a fraction of a million digits": b'{"queries":[{"history":[]}],"m":0,"min_score":0.' + b"9" * (MIB - 100) + b"}",
        "escapes": b'{"queries":[{"history":["' + b"\\u0000" * 170_000 + b'"]}],"m":0}',
        "repeated keys": b"{" + b",".join([b'"m":1'] * 170_000) + b"}",
        "unknown keys": b"{" + b",".join(b'"k%d":1' % i for i in range(100_000)) + b"}",
        "item features": b'{"queries":[{"history":[],"item_features":{' + b",".join(b'"k%d":{}' % i for i in range(80_000)) + b"}}]}",
        "unknown columns": b'{"queries":[{"history":[]}],"filter":{' + b",".join(b'"c%d":[1]' % i for i in range(70_000)) + b"}}",
        "filter values": b'{"queries":[{"history":[]}],"filter":{"c":[' + numbers + b"]}}",
        "no text": bytes(range(256)) * 4000,
        "one long string": orjson.dumps({"queries": [{"history": []}], "model": "x" * 1_000_000}),
    }


def json_bombs(target: Target) -> Seen:
    """Each of them four times at once: refused, and in few words."""
    wrong = []
    for name, body in bombs().items():
        wires = target.send_many(4, post(body))
        for wire in wires:
            answers = wire.answers(1, 10)
            status, size = (answers[0].status, len(answers[0].body)) if answers else (0, 0)
            if status not in (400, 404, 413, 422, 429, 503) or size > ECHO:
                wrong.append(f"{name}: {status or wire.outcome(0)}, {size} bytes")
            wire.close()
        if not wires:
            wrong.append(f"{name}: not sent")
    return Seen(not wrong, "; ".join(wrong) or f"{len(bombs())} kinds refused, each in less than {ECHO >> 10} KiB")
