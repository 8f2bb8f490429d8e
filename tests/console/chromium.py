"""Debian's Chromium without a window, as the tests of the console start it.

Knows Playwright. Does not know the console.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

ARGUMENTS = (
    "--no-sandbox",  # which root in a container does not have
    "--disable-dev-shm-usage",  # /dev/shm may be small there
    "--js-flags=--expose-gc",  # heaps are compared after a collection
    "--enable-precise-memory-info",
)


class NoChromium(RuntimeError):
    """Chromium is not installed."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """One browser. Raises NoChromium."""
    program = shutil.which("chromium")
    if program is None:
        raise NoChromium("chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()
