"""The audit log: who was not let in, and who changed what is served."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.serving import MAX_VERSION
from service.errors import Conflict, Unauthorized
from service.watch.audit import Audit, BeforeAfter, Origin
from service.watch.logs import BURST, MAX_PLAIN, PER_S, SUMMARY_S, TEXT, JsonFormatter
from service.watch.metrics import AUTH_FAILURES, Metrics
from tests import ROOT
from tests.service.models.registry import damage
from tests.service.own_time import pass_time, settled
from tests.service.running import Json, Running, bearer, run

RETRIEVE, ADMIN, NAMED = "retrieve-key-0001", "admin-key-00000001", "admin-key-of-alice"
ADMIN_ID = "63ec3cbf"
"""The first hex digits of the key's SHA-256: printf %s KEY | sha256sum."""


@pytest.fixture
def guarded(versions: Path) -> Iterator[Running]:
    with run(versions, retrieve_keys=(RETRIEVE,), admin_keys=(ADMIN, f"alice:{NAMED}")) as running:
        yield running


def lines(caplog: pytest.LogCaptureFixture) -> list[Json]:
    """What the audit log holds, as JSON, without what changes from run to run."""
    records = [record for record in caplog.records if record.name == "service.audit"]
    found: list[Json] = [orjson.loads(JsonFormatter().format(record)) for record in records]
    for line in found:
        assert {"time", "level", "logger"} <= line.keys()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", line.pop("time"))
    return found


def failures(running: Running) -> dict[tuple[str, str], float]:
    text = running.client.get("/metrics").text
    found = re.findall(r'^espalier_auth_failures_total\{reason="(\w+)",role="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {(role, reason): float(count) for reason, role, count in found}


# -- who was not let in ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "headers", "role", "reason", "key"),
    [
        ("POST", "/retrieve", {}, "retrieve", "missing", None),
        ("POST", "/retrieve", {"Authorization": "Basic abc"}, "retrieve", "malformed", None),
        ("POST", "/retrieve/stream", bearer("wrong-key-00000000"), "retrieve", "unknown", None),
        ("HEAD", "/models/books", {}, "retrieve", "missing", None),
        ("POST", "/models/books/load", bearer(RETRIEVE), "admin", "role", "1a65f76b"),
        ("DELETE", "/models/books/items/item-1", bearer(ADMIN), "write", "off", None),
    ],
)
def test_whoever_is_not_let_in_leaves_one_line_and_one_count(
    guarded: Running, caplog: pytest.LogCaptureFixture, method: str, path: str, headers: Json, role: str, reason: str, key: str | None
) -> None:
    assert failures(guarded) == dict.fromkeys(AUTH_FAILURES, 0)
    answer = guarded.client.request(method, f"{path}?secret=of-the-query", headers=headers | {"X-Request-Id": "asked-1"})
    assert answer.status_code in (401, 403)
    [line] = lines(caplog)
    sent = "GET" if method == "HEAD" else method  # as which it is answered
    expected = {"action": "authenticate", "outcome": "denied", "role": role, "reason": reason, "method": sent, "path": path, "key": key}
    expected |= {"client": "127.0.0.1:123", "request_id": "asked-1", "level": "WARNING", "logger": "service.audit"}
    assert line == {name: value for name, value in expected.items() if value is not None}
    assert failures(guarded) == dict.fromkeys(AUTH_FAILURES, 0) | {(role, reason): 1}


def test_who_is_let_in_leaves_no_line_and_no_line_holds_a_key(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "service.audit")
    for key in (RETRIEVE, ADMIN, NAMED):
        assert guarded.client.get("/models", headers=bearer(key)).status_code == 200
        assert guarded.client.post("/retrieve", json={"queries": [{"history": []}]}, headers=bearer(key)).status_code == 200
    assert guarded.client.get("/models/books/removed", headers=bearer(ADMIN)).status_code == 200
    assert lines(caplog) == []
    assert failures(guarded) == dict.fromkeys(AUTH_FAILURES, 0)
    caplog.set_level(logging.DEBUG)
    wrong = "wrong-key-00000000"
    for key in (ADMIN, NAMED, RETRIEVE, wrong):
        guarded.client.post("/models/books/load", json={"version": 1}, headers=bearer(key))
        guarded.client.request("PUT", "/models/books/removed/item-1", headers=bearer(key))
    assert len(lines(caplog)) == 8
    told = caplog.text + str(lines(caplog)) + guarded.client.get("/metrics").text
    assert [key for key in (ADMIN, NAMED, RETRIEVE, wrong) if key in told] == []


def scope(**rest: Any) -> Json:
    return {"type": "http", "method": "GET", "path": "/models", "raw_path": b"/models", "client": ("10.0.0.7", 4711)} | rest


DENIED = Unauthorized("The key is not known.", "admin", "unknown")


async def test_a_flood_of_wrong_keys_writes_few_lines_and_says_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    metrics, flood = Metrics(), 1000
    audit = Audit(metrics, asyncio.get_running_loop().time)

    def deny() -> None:
        for _ in range(flood):
            audit.denied(scope(), "r", DENIED)

    deny()
    assert len(lines(caplog)) == BURST
    assert all("left_out" not in line for line in lines(caplog))
    await pass_time(1 / PER_S)
    deny()
    assert len(lines(caplog)) == BURST + 1
    assert lines(caplog)[-1]["left_out"] == flood - BURST
    await pass_time(SUMMARY_S)  # what is left out is told after the flood has ended, too
    assert lines(caplog)[-1]["left_out"] == flood - 1
    audit.write_left_out()
    assert len(lines(caplog)) == BURST + 2
    await pass_time(1e6)  # a long peace saves up no more than one burst
    deny()
    assert len(lines(caplog)) == 2 * BURST + 2
    audit.write_left_out()
    assert f'espalier_auth_failures_total{{reason="unknown",role="admin"}} {3 * flood:.1f}' in metrics.render().decode()


def test_a_shutdown_tells_what_was_left_out(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    with run(models, retrieve_keys=(RETRIEVE,)) as running:
        for _ in range(3 * BURST):
            running.client.get("/models")
        written = len(lines(caplog))
        assert written < 3 * BURST
    assert written + lines(caplog)[-1]["left_out"] + sum(line.get("left_out", 0) for line in lines(caplog)[:written]) == 3 * BURST


# -- who changed what -----------------------------------------------------------------------------------------------------


def test_every_change_says_who_made_it_and_what_it_did(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    both, first, second = ({"versions": found, "default": default} for found, default in (([1, 2], 2), ([1, 2], 1), ([2], 2)))
    only_1 = {"versions": [1], "default": 1}

    def change(method: str, path: str, key: str = ADMIN, **body: Any) -> Json:
        before = len(lines(caplog))
        answer = guarded.client.request(method, f"/models/books/{path}", json=body or None, headers=bearer(key) | {"X-Request-Id": "c-1"})
        assert answer.status_code == 200, answer.text
        [line] = lines(caplog)[before:]
        origin = {"client": "127.0.0.1:123", "request_id": "c-1", "key": ADMIN_ID if key == ADMIN else "alice"}
        assert line.items() >= ({"level": "INFO", "logger": "service.audit", "model": "books"} | origin).items()
        return {name: value for name, value in line.items() if name not in {"level", "logger", "model", *origin}}

    def told(action: str, outcome: str, before: Json, after: Json, **what: Any) -> Json:
        return {"action": action, "outcome": outcome, "before": before, "after": after} | what

    assert change("POST", "load", version=1, default=False) == told("load", "changed", second, both, version=1)
    assert change("POST", "default", NAMED, version=1) == told("default", "changed", both, first, version=1)
    assert change("POST", "load", version=1) == told("load", "unchanged", first, first, version=1)
    assert change("POST", "unload", version=2) == told("unload", "changed", first, only_1, version=2)

    def listed(line: Json) -> tuple[Any, ...]:
        return line["action"], line["outcome"], line["before"]["ids"], line["after"]["ids"]

    put = change("PUT", "removed", ids=["item-1", "item-2", "item-1"])
    assert listed(put) == ("set_removed", "changed", 0, 2)
    added = change("PUT", "removed/item%2F3", NAMED)
    assert (listed(added), added["id"]) == (("remove_item", "changed", 2, 3), "item/3")
    again = change("PUT", "removed/item%2F3")
    assert listed(again) == ("remove_item", "unchanged", 3, 3)
    gone = change("DELETE", "removed/item%2F3")
    assert listed(gone) == ("restore_item", "changed", 3, 2)
    assert put["after"] == added["before"] == gone["after"]
    assert put["after"]["etag"] != added["after"]["etag"]
    assert re.fullmatch("[0-9a-f]{32}", put["after"]["etag"])


def test_a_change_that_fails_is_told_with_its_reason(guarded: Running, versions: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage(versions / "books" / "1")
    for method, path, body, status, detail in (
        ("POST", "load", {"version": 1}, 409, "SHA-256"),
        ("POST", "load", {"version": 9}, 404, "no version 9"),
        ("POST", "load", {"version": MAX_VERSION}, 404, f"no version {MAX_VERSION}"),
        ("POST", "unload", {"version": 2}, 409, "is the default"),
        ("PUT", "removed", {"ids": []}, 412, "If-Match"),
    ):
        before = len(lines(caplog))
        headers = bearer(ADMIN) | ({"If-Match": '"another"'} if status == 412 else {})
        assert guarded.client.request(method, f"/models/books/{path}", json=body, headers=headers).status_code == status
        [line] = lines(caplog)[before:]
        assert (line["outcome"], line["status"], line["key"], line["level"]) == ("failed", status, ADMIN_ID, "WARNING")
        assert detail in line["detail"]
        assert "before" not in line
    for path in ("load", "unload", "default"):  # JSON lines have no larger numbers
        answer = guarded.client.post(f"/models/books/{path}", json={"version": MAX_VERSION + 1}, headers=bearer(ADMIN))
        assert answer.status_code == 422, answer.text


async def test_a_change_whose_client_has_gone_is_told_when_it_is_done(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    audit, let_go, failing = Audit(Metrics()), asyncio.Event(), asyncio.Event()

    async def changing() -> int:
        await let_go.wait()
        return 7

    async def refused() -> int:
        await failing.wait()
        raise Conflict("not now")

    by = Origin("10.0.0.7:4711", "r", "alice")
    for change, event in ((changing(), let_go), (refused(), failing)):
        request = asyncio.create_task(audit.change("load", "books", by, change, lambda found: BeforeAfter(found - 1, found), version=2))
        await settled()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        written = len(lines(caplog))
        event.set()
        await settled()
        assert len(lines(caplog)) == written + 1
    assert [line["outcome"] for line in lines(caplog)] == ["changed", "failed"]


# -- what stands in a line ------------------------------------------------------------------------------------------------

WORDS = st.text(max_size=3 * MAX_PLAIN) | st.sampled_from(
    ["a\nlevel=INFO", 'x" outcome="let in', "\x1b[2J\x9b2J", "\u2028\u202e\x85", "\\n"]
)


@given(path=st.binary(max_size=3 * MAX_PLAIN), method=WORDS, client=WORDS, model=WORDS, item=WORDS, detail=WORDS)
def test_no_value_ends_a_line_or_looks_like_another_field(
    path: bytes, method: str, client: str, model: str, item: str, detail: str
) -> None:
    async def refuse() -> None:
        raise Conflict(detail)

    async def scenario() -> None:
        audit = Audit(Metrics())
        audit.denied(scope(method=method, raw_path=path, client=(client, 1)), "r", DENIED)
        with pytest.raises(Conflict):
            await audit.change("remove_item", model, Origin("10.0.0.7:1", "r"), refuse(), lambda _: BeforeAfter(0, 0), id=item)

    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Keep()
    logger = logging.getLogger("service.audit")
    logger.addHandler(handler)
    try:
        asyncio.run(scenario())
    finally:
        logger.removeHandler(handler)
    assert len(records) == 2
    for record in records:
        text = logging.Formatter(TEXT).format(record)
        assert text.isprintable()
        assert text.isascii()
        values = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\d+)(?: |$)', text)  # a reader that knows JSON's quotes
        assert {name: json.loads(value) for name, value in values} == record.__dict__["fields"]
        document = JsonFormatter().format(record)
        assert document.isprintable()
        assert len(document) < 8 * MAX_PLAIN
        assert "message" not in orjson.loads(document)


@pytest.mark.slow
def test_the_audit_log_is_written_whatever_else_is_logged() -> None:
    said = """
import asyncio, logging
from service.watch import logs
from service.watch.audit import Audit, BeforeAfter, Origin
from service.watch.metrics import Metrics
logs.configure("ERROR", "json")
logging.getLogger("service.registry").warning("not this")
async def change():
    return 1
asyncio.run(Audit(Metrics()).change("load", "books", Origin("a", "b"), change(), lambda found: BeforeAfter(0, found)))
"""
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, cwd=ROOT, check=True)
    [line] = done.stderr.splitlines()
    assert (json.loads(line)["logger"], json.loads(line)["after"]) == ("service.audit", 1)
