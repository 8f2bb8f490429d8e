"""Debian's Chromium with pages that watch themselves: whatever a page does wrong is noted, and fails the test at its end.

Knows Playwright. Does not know the console.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request

PATIENCE_MS = 15_000.0
"""Longest wait for what must come. Generous, since a machine may be busy; nothing is judged by it."""

WIDE = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}

LISTEN_FOR_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) =>
  console.error(`refused by the content security policy: ${event.violatedDirective} ${event.blockedURI}`));
"""


@dataclass
class Watched:
    """A page; `faults` is what it did wrong, and `requests` everything that it asked for."""

    page: Page
    origin: str
    faults: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def watch(self) -> None:
        self.page.on("console", self._logged)
        self.page.on("pageerror", lambda error: self.faults.append(f"not caught: {error}"))
        self.page.on("request", self._requested)

    def expect_failures(self, *texts: str) -> None:
        """Chromium reports each answer of 4xx or 5xx as an error. Those that contain one of these texts are part of the test."""
        self.expected += texts

    def paths(self) -> list[str]:
        """Paths asked for so far."""
        return [urlsplit(request.url).path for request in self.requests]

    def check(self) -> None:
        assert not self.faults, "\n".join(self.faults)

    def _logged(self, message: ConsoleMessage) -> None:
        if message.type not in ("error", "warning"):
            return
        text = f"{message.type}: {message.text} ({message.location.get('url', '')})"
        if not any(part in text for part in self.expected):
            self.faults.append(text)

    def _requested(self, request: Request) -> None:
        self.requests.append(request)
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and f"{parts.scheme}://{parts.netloc}" != self.origin:
            self.faults.append(f"asked another host: {request.url}")


@contextmanager
def visit(browser: Browser, origin: str, **options: Any) -> Iterator[Watched]:
    """A page in a context of its own: no cookies or storage of another. It fails the test for what it did wrong, unless the test failed."""
    context: BrowserContext = browser.new_context(**({"viewport": WIDE, "reduced_motion": "reduce"} | options))
    context.add_init_script(LISTEN_FOR_VIOLATIONS)
    context.set_default_timeout(PATIENCE_MS)
    try:
        page = context.new_page()
        watched = Watched(page, origin)
        watched.watch()
        yield watched
        watched.check()
    finally:
        context.close()
