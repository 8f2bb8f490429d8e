"""A service that fails, is slow, or goes away: the page says so where it belongs, in the service's words, and goes on when it can."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.console.browsing import Watched, visit
from tests.console.conftest import OPEN
from tests.console.showing import VIEWS, settled, show
from tests.http_servers import reserved_port
from tests.service.processes import service
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.console]

FAILED = "Failed to load resource"
LASTING = "The engine has failed: see the log."


def refusing(status: int, title: str, detail: str) -> Callable[[Route], None]:
    document = {"type": "about:blank", "title": title, "status": status, "detail": detail, "errors": []}
    headers = {"Content-Type": "application/problem+json", "Retry-After": "1"}
    return lambda route: route.fulfill(status=status, headers=headers, body=json.dumps(document))


def bad_gateway(route: Route) -> None:
    """What a proxy says for a service that is not there."""
    route.fulfill(status=502, headers={"Content-Type": "text/html"}, body="<html><h1>502 Bad Gateway</h1></html>")


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        (refusing(500, "Internal Server Error", LASTING), LASTING),
        (refusing(429, "Too Many Requests", "16 background requests wait."), "16 background requests wait."),
        (bad_gateway, "502"),
        (lambda route: route.abort(), "does not answer"),
    ],
    ids=["500", "429", "a proxy's 502", "no answer"],
)
def test_a_failure_at_the_start_is_told_and_what_passes_is_tried_again(
    watched: Watched, failing: Callable[[Route], None], said: str
) -> None:
    page = watched.page
    watched.expect_failures(FAILED)
    page.route("**/models", failing)
    page.goto(f"{watched.origin}/")
    expect(page.get_by_role("alert")).to_contain_text(said)
    page.route("**/models", lambda route: route.continue_())  # unroute would lose the modules that are being loaded
    if said == LASTING:
        page.get_by_role("alert").get_by_role("button", name="Try again").click()
    settled(page)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_service_that_was_killed_and_started_again_is_used_again(sample: Path, browser: Browser) -> None:
    with (
        reserved_port() as port,
        service(sample, 1, ESPALIER_PORT=str(port), **OPEN) as first,
        visit(browser, f"http://127.0.0.1:{port}") as watched,
    ):
        page = watched.page
        watched.expect_failures(FAILED)
        show(page, f"{watched.origin}/", "lab")
        expect(page.locator(".results .result").first).to_be_visible()
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        page.get_by_role("slider").nth(1).fill("3")
        expect(page.get_by_role("alert").first).to_contain_text("does not answer")
        with service(sample, 1, ESPALIER_PORT=str(port), **OPEN):
            expect(page.locator(".results .result")).to_have_count(3)
            expect(page.get_by_role("alert")).to_have_count(0)
            page.get_by_role("link", name="Models", exact=True).click()  # which had not been loaded
            settled(page)


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_whose_requests_fail_says_why_and_stays_of_use(watched: Watched, view: str) -> None:
    """All requests but that for the models, without which there is no view."""
    page = watched.page
    watched.expect_failures(FAILED)
    page.route(re.compile("//[^/]+/(retrieve|models/.*)$"), refusing(500, "Internal Server Error", LASTING))
    page.goto(f"{watched.origin}/#/{view}")
    settled(page)
    if any(path.startswith(("/models/", "/retrieve")) for path in watched.paths()):
        expect(page.get_by_role("alert").first).to_contain_text(LASTING)
    page.get_by_role("link", name="Lab", exact=True).click()
    settled(page)


def test_a_slow_answer_leaves_the_last_one_and_the_page_in_use(watched: Watched) -> None:
    page = watched.page
    waiting: list[Route] = []
    show(page, f"{watched.origin}/", "lab")
    results = page.locator(".results .result")
    expect(results).to_have_count(50)
    page.route("**/retrieve", lambda route: waiting.append(route))
    page.get_by_role("slider").nth(1).fill("3")
    expect(page.locator(".summary")).to_have_attribute("aria-busy", "true")
    expect(results).to_have_count(50)
    page.get_by_role("slider").nth(1).fill("4")
    until(lambda: page.evaluate("true") and len(waiting) == 2, "the second does not wait for the first")
    waiting[1].continue_()
    expect(results).to_have_count(4)
    expect(page.locator(".summary")).to_have_attribute("aria-busy", "false")


# -- what a page does wrong is noticed: otherwise the other tests here could not fail by it -------------------------------


ORIGIN = "http://console.test"
POLICY = "default-src 'self'; script-src 'self' 'unsafe-inline'; connect-src *"


def answered_with(text: str) -> Callable[[Route], None]:
    headers = {"Content-Type": "text/html", "Content-Security-Policy": POLICY}
    return lambda route: route.fulfill(status=404 if route.request.url.endswith("/missing") else 200, headers=headers, body=text)


def show_script(page: Page, script: str) -> None:
    """A page with the script, on a host that is not there; the script says when it has done."""
    page.route(f"{ORIGIN}/**", answered_with(f"<!doctype html><title>x</title><script>{script}; document.title = 'done'</script>"))
    page.goto(f"{ORIGIN}/")
    page.wait_for_function("document.title == 'done'")


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("console.error('broken')", "error: broken"),
        ("console.warn('odd')", "warning: odd"),
        ("setTimeout(() => { throw new Error('thrown'); })", "not caught: thrown"),
        ("document.body.innerHTML = '<p style=\"color: red\">'", "refused by the content security policy: style-src-attr"),
        ("fetch('http://elsewhere.test/').catch(() => 0)", "asked another host: http://elsewhere.test/"),
        ("fetch('/missing')", "status of 404"),
    ],
)
def test_a_fault_of_a_page_is_noted(browser: Browser, script: str, fault: str) -> None:
    with visit(browser, ORIGIN) as watched:
        show_script(watched.page, f"document.documentElement.append(document.createElement('body')); {script}")
        until(lambda: watched.page.evaluate("true") and any(fault in found for found in watched.faults), lambda: watched.faults)
        watched.faults.clear()


def test_a_page_with_a_fault_fails_its_test_unless_the_failure_belongs_to_it(browser: Browser) -> None:
    with pytest.raises(AssertionError, match="broken"), visit(browser, ORIGIN) as watched:
        show_script(watched.page, "console.error('broken')")
    with visit(browser, ORIGIN) as watched:
        watched.expect_failures("status of 404")
        with watched.page.expect_response(f"{ORIGIN}/missing"):
            show_script(watched.page, "fetch('/missing')")
        assert "/missing" in watched.paths()
