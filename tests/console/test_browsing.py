"""What a page does wrong is noticed: otherwise the other tests here could not fail by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Browser, Page, Route

from tests.console.browsing import visit
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.console]

ORIGIN = "http://console.test"
POLICY = "default-src 'self'; script-src 'self' 'unsafe-inline'; connect-src *"


def answered_with(text: str) -> Callable[[Route], None]:
    headers = {"Content-Type": "text/html", "Content-Security-Policy": POLICY}
    return lambda route: route.fulfill(status=404 if route.request.url.endswith("/missing") else 200, headers=headers, body=text)


def show(page: Page, script: str) -> None:
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
        show(watched.page, f"document.documentElement.append(document.createElement('body')); {script}")
        until(lambda: watched.page.evaluate("true") and any(fault in found for found in watched.faults), lambda: watched.faults)
        watched.faults.clear()


def test_a_page_with_a_fault_fails_its_test_unless_the_failure_belongs_to_it(browser: Browser) -> None:
    with pytest.raises(AssertionError, match="broken"), visit(browser, ORIGIN) as watched:
        show(watched.page, "console.error('broken')")
    with visit(browser, ORIGIN) as watched:
        watched.expect_failures("status of 404")
        with watched.page.expect_response(f"{ORIGIN}/missing"):
            show(watched.page, "fetch('/missing')")
        assert "/missing" in watched.paths()
