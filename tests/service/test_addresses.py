"""Two addresses: what customers reach, and what operators alone do."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from service.__main__ import listen_on
from service.http.routes import _routes, for_customers
from service.settings import Settings
from tests.service.listening import get, listening, post, retrieval
from tests.service.models.registry import Held
from tests.service.running import run

ADMIN = "an-admin-key-of-a-test"
TWO: dict[str, Any] = {"admin_address": "127.0.0.1:0", "admin_keys": (SecretStr(ADMIN),)}
KEY = f"Authorization: Bearer {ADMIN}"
PAGES = ("/", "/console/app.js", "/docs", "/openapi.json", "/static-offline-docs/swagger-ui.css", "/metrics")


def path_of(template: str) -> str:
    """A path of a route."""
    return re.sub(r"\{(\w+)(:\w+)?\}", lambda found: {"name": "books", "node": "1"}.get(found[1], "item/1"), template)


def test_the_address_of_customers_answers_no_route_of_admins_and_nothing_that_people_did() -> None:
    for route in _routes():
        shown = for_customers().fullmatch(path_of(route.path)) is not None
        inside = route.access in ("admin", "private") or route.path == "/metrics"
        assert shown is not inside, route.path
    for path in (*PAGES, "/models/books/load/", "/models/books/loa\nd", "/retrieve\n", "//metrics", "/models/books/items/"):
        assert not for_customers().fullmatch(path), path
    assert for_customers().fullmatch("/models/books/items/a\n/b")


def test_operators_alone_reach_metrics_pages_and_admin_routes(models: Path) -> None:
    with listening(models, **TWO) as running:
        for path in PAGES:
            found = running.ask(get(path))
            assert found.status == 404, path
            assert found.problem["detail"] == "No such route; see /docs."
            assert running.ask(get(path), address=running.admin).status == 200, path
        for request, answered in (
            (get("/models/books/removed", KEY), 200),
            (get("/models/books/heldout", KEY), 200),
            (get("/models/books/removed"), 401),
            (post("/models/books/unload", b'{"version": 7}', KEY), 404),
            (post("/models/books/frontier", b"{}", KEY), 422),
        ):
            assert running.ask(request).problem["detail"] == "No such route; see /docs."
            reply = running.ask(request, address=running.admin)
            assert reply.status == answered
            assert b"No such route" not in reply.body


def test_both_addresses_answer_probes_and_customers_requests(models: Path) -> None:
    with listening(models, **TWO) as running:
        for address in (running.address, running.admin):
            for request in (get("/livez"), get("/readyz"), get("/models"), get("/models/books"), retrieval()):
                assert running.ask(request, address=address).status == 200
            assert running.ask(get("/models/books/items/item-1"), address=address).status == 403  # nobody may write
            assert running.ask(get("/none"), address=address).status == 404


def test_a_full_service_answers_probes_on_both_addresses(models: Path) -> None:
    with listening(models, **TWO, max_connections=1) as running, running.connected() as busy:
        assert busy.ask(get("/livez")).status == 200
        busy.send(b"GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n")
        assert busy.reply().status == 200
        assert running.ask(get("/metrics"), address=running.admin).status == 200
        assert running.ask(get("/metrics")).status in (404, 503)


def test_both_addresses_end_with_the_service(models: Path) -> None:
    with listening(models, **TWO) as running:
        addresses = running.address, running.admin
        with running.connected(address=running.admin) as wire:
            assert wire.ask(get("/livez")).status == 200
            running.server.leave()
            assert wire.ended()
    for address in addresses:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


def test_a_change_that_waits_for_a_version_is_answered_when_the_service_ends(versions: Path) -> None:
    held = Held(of=1)
    with listening(versions, held.open, **TWO, drain_s=30) as running, running.connected(address=running.admin) as wire:
        wire.send(post("/models/books/load", b'{"version": 1}', KEY))
        assert held.opening.wait(10)
        running.server.leave()
        reply = wire.reply()
        held.let_go.set()
    assert (reply.status, reply.problem["detail"]) == (503, "The service is shutting down.")


@pytest.mark.parametrize(
    ("settings", "status", "warned"),
    [
        ({"host": "0.0.0.0", "admin_address": "127.0.0.1:0"}, 200, [True]),
        ({"host": "127.0.0.1", "admin_address": "0.0.0.0:0"}, 403, [True]),
        ({"host": "127.0.0.1", "admin_address": "127.0.0.1:0"}, 200, []),
        ({"host": "0.0.0.0", "admin_address": "0.0.0.0:0"}, 403, [True, True]),
        ({"host": "127.0.0.1"}, 200, []),
        ({"host": "0.0.0.0"}, 403, [True]),
        ({"host": "0.0.0.0", "open": True}, 200, [False]),
        ({"host": "0.0.0.0", "write_keys": (SecretStr("a-write-key-of-a-test"),)}, 403, []),
    ],
)
def test_without_keys_people_are_shown_to_this_machine_alone(
    versions: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], status: int, warned: list[bool]
) -> None:
    with run(versions, **settings) as running:
        assert running.client.get("/models/books/heldout").status_code == status
        assert running.client.get("/models/books").status_code == 200
    for listener in listen_on(Settings(port=0, **settings)):
        listener.close()
    assert ["may retrieve." in message for message in caplog.messages if "WITHOUT KEYS" in message] == warned
