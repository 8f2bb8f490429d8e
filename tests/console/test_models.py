"""Versions are loaded, pinned and dropped from the page, with an admin key that is asked for then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.console.browsing import Watched, visit
from tests.console.conftest import ADMIN_KEY, RETRIEVE_KEY
from tests.console.showing import give_key, kept, serious_findings, settled
from tests.service.processes import Service

pytestmark = [pytest.mark.slow, pytest.mark.console]


@pytest.fixture
def administrator(guarded: Service, browser: Browser) -> Iterator[Watched]:
    with visit(browser, f"http://127.0.0.1:{guarded.port}") as page:
        page.expect_failures("status of 40")  # without a key, or for a version that is not there
        page.page.goto(f"{page.origin}/#/models?model=strange")
        give_key(page.page, "a retrieval key", RETRIEVE_KEY)
        settled(page.page)
        yield page


def default_version(page: Page) -> str:
    row = page.get_by_role("region", name="Versions").locator("tbody tr").filter(has_text="default")
    return str(row.locator("td").first.inner_text())


def load(page: Page, version: str) -> None:
    page.get_by_role("spinbutton", name="Load version").fill(version)
    page.get_by_role("button", name="Load", exact=True).click()


def test_a_version_is_rolled_back_to_and_another_dropped_and_loaded_again(administrator: Watched) -> None:
    page = administrator.page
    assert default_version(page) == "2"
    load(page, "1")
    give_key(page, "an admin key", ADMIN_KEY)
    expect(page.get_by_text("Version 1 is loaded beside the default.")).to_be_visible()
    assert ADMIN_KEY not in kept(page)
    page.get_by_role("button", name="Roll back to it").click()
    assert serious_findings(page) == []
    page.get_by_role("dialog").get_by_role("button", name="Serve version 1").click()
    expect(page.get_by_text("Version 1 is the default.")).to_be_visible()
    settled(page)
    assert default_version(page) == "1"
    page.get_by_role("button", name="Drop").click()
    page.get_by_role("dialog").get_by_role("button", name="Drop version 2").click()
    expect(page.get_by_text("Version 2 is dropped.")).to_be_visible()
    page.get_by_label("and make it the default").check()
    load(page, "2")
    page.get_by_role("dialog").get_by_role("button", name="Load and serve it").click()
    expect(page.get_by_text("Version 2 is loaded and is the default.")).to_be_visible()


def test_a_change_that_is_not_confirmed_is_not_made_and_what_the_service_refuses_is_said(administrator: Watched) -> None:
    page = administrator.page
    before = len(administrator.requests)
    page.get_by_label("and make it the default").check()
    load(page, "1")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert "POST" not in [request.method for request in administrator.requests[before:]]
    page.get_by_label("and make it the default").uncheck()
    load(page, "77")
    give_key(page, "an admin key", ADMIN_KEY)
    expect(page.get_by_role("alert")).to_contain_text("77")
