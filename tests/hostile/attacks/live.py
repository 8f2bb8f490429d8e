"""What somebody with a write key that leaked, or a careless feed, does to the live catalogue of a model of histories.

After each attack an ordinary write must be answered, and the item found.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime

import orjson

from tests.hostile.attacks.target import SLACK_S, Seen, Target, tally
from tests.hostile.attacks.wire import Answer, head, post

LINES = 256
"""Of a bulk that wait at a time."""
NOT_NOW = {"429", "503"}
WRITTEN = {"200", "201", "202"}


def one_item_for_ever(target: Target) -> Seen:
    """One item, changed as often as there is time for."""
    return _spell(target, (("one", {"fields": {target.filter_column: f"{i}" * 100}} | _evidence(target, i)) for i in range(1 << 30)))


def items_that_expire_together(target: Target) -> Seen:
    """Thousands of items that expire at one moment."""
    at = time.time() + 2 * target.spell_s
    until = datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
    rest = orjson.dumps({"valid_until": until})[1:]
    statuses = []
    for number in target.spell():
        lines = [_line(target, f"brief-{number * LINES + i}")[:-1] + b"," + rest for i in range(LINES)]
        statuses += _statuses(_bulk(target, lines))
    target.wait(max(at - time.time(), 0) + 1)
    return _after(target, f"{tally(statuses)}, then expired", set(statuses) <= WRITTEN | {"507"})


def items_that_come_and_go(target: Target) -> Seen:
    """Ever new items, each deleted at once."""
    return _spell(target, ((f"gone-{i // 2}", None if i % 2 else _evidence(target, i)) for i in range(1 << 30)))


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


def _evidence(target: Target, i: int) -> dict[str, object]:
    return {"events": [[target.ids[(7 * i + j) % len(target.ids)] for j in range(3)]]}


def _line(target: Target, item: str) -> bytes:
    return orjson.dumps({"id": item} | _evidence(target, zlib.crc32(item.encode())))


def _put(target: Target, item: str, body: dict[str, object] | None) -> bytes:
    content = b"" if body is None else orjson.dumps(body)
    method = "DELETE" if body is None else "PUT"
    return head(len(content), _authorised(target), f"/models/{target.model}/items/{item}", method=method) + content


def _authorised(target: Target) -> str:
    return f"Authorization: Bearer {target.limits.write_key}\r\n"


def _bulk(target: Target, lines: list[bytes]) -> Answer | None:
    """The answer to a whole bulk; None where there is none."""
    body = b"\n".join(lines)
    return target.ask(head(len(body), _authorised(target), f"/models/{target.model}/items", "application/x-ndjson") + body, 30)


def _statuses(answer: Answer | None) -> list[str]:
    """The status of each line of a bulk; of a bulk that was refused or not answered, that alone."""
    if answer is None or answer.status != 200:
        return [str(answer.status) if answer else "none"]
    return [str(orjson.loads(line)["status"]) for line in answer.body.splitlines()]
