"""A page that stays open does not grow."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Page, Route

from tests.console.browsing import Watched, visit
from tests.console.hours import watched_for_hours
from tests.service.processes import Service

pytestmark = [pytest.mark.slow, pytest.mark.console]

ORIGIN = "http://console.test"
HEALTH = {"model": "m", "series": {"recall": [0.5], "p99_ms": [None]}, "alerts": []}


def polling(page: Page, keeps: bool) -> None:
    """A page that asks for the health every minute, and keeps all answers or only the last."""
    kept = "kept.push(document_)" if keeps else "kept = [document_]"
    script = (
        f"let kept = []; setInterval(async () => {{ const document_ = await (await fetch('/models/m/health')).json(); {kept}; }}, 60000)"
    )
    body = f"<!doctype html><main><h1>x</h1></main><script>{script}</script>"
    page.route(f"{ORIGIN}/", lambda route: _answer(route, body))


def _answer(route: Route, body: str) -> None:
    route.fulfill(headers={"Content-Type": "text/html"}, body=body)


def test_what_a_page_keeps_is_measured(browser: Browser) -> None:
    grown = {}
    for keeps in (False, True):
        with visit(browser, ORIGIN) as watched:
            polling(watched.page, keeps)
            grown[keeps] = watched_for_hours(watched.page, f"{ORIGIN}/", HEALTH, hours=1)
    assert grown[False].answers == grown[True].answers == 60
    assert grown[False].heap_mb < 1 < grown[True].heap_mb


def test_today_open_for_hours_does_not_grow(console: Service, watched: Watched) -> None:
    status, health = console.request("GET", "/models/debian-depends/health")
    assert status == 200
    grown = watched_for_hours(watched.page, f"{watched.origin}/#/today", health, hours=3)
    assert grown.answers >= 3 * 60 / 5, "it asks every few minutes at least"
    assert grown.heap_mb <= 5
    assert grown.nodes < 2000
    assert grown.listeners < 100
