"""Where a service is and who may use it: behind a path prefix, and with API keys."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, expect

from tests.console.browsing import visit
from tests.console.prefix_proxy import behind_prefix
from tests.console.showing import settled, show
from tests.service.processes import Service

pytestmark = [pytest.mark.slow, pytest.mark.console]

PREFIX = "/tools/espalier"


def test_every_view_works_behind_a_path_prefix(console: Service, browser: Browser) -> None:
    with behind_prefix(console.port, PREFIX) as base, visit(browser, base.removesuffix(f"{PREFIX}/")) as watched:
        page = watched.page
        show(page, base, "lab")
        for link in page.get_by_role("navigation", name="Views").get_by_role("link").all():
            link.click()
            settled(page)
            expect(page.get_by_role("alert")).to_have_count(0)
        assert {path for path in watched.paths() if not path.startswith(f"{PREFIX}/")} == set()
        assert urlsplit(page.url).path == f"{PREFIX}/"
