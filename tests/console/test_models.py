"""Versions are loaded, pinned and dropped from the page, with an admin key that is asked for then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.console.browsing import Watched, visit
from tests.console.conftest import ADMIN_KEY, RETRIEVE_KEY, WRITE_KEY
from tests.console.showing import give_key, kept, serious_findings, settled
from tests.service.processes import Service

pytestmark = [pytest.mark.slow, pytest.mark.console]


def opened(view: str, guarded: Service, browser: Browser) -> Iterator[Watched]:
    """A page of a service with keys, with a retrieval key."""
    with visit(browser, f"http://127.0.0.1:{guarded.port}") as watched:
        watched.expect_failures("status of 40")  # without a key, or for a version that is not there
        watched.page.goto(f"{watched.origin}/#/{view}")
        give_key(watched.page, "a retrieval key", RETRIEVE_KEY)
        settled(watched.page)
        yield watched


@pytest.fixture
def administrator(guarded: Service, browser: Browser) -> Iterator[Watched]:
    yield from opened("models?model=strange", guarded, browser)


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


def test_a_version_is_tried_on_some_users_promoted_and_taken_back(administrator: Watched) -> None:
    page = administrator.page
    region = page.locator("section").filter(has=page.get_by_role("heading", name="Trial"))
    load(page, "1")
    give_key(page, "an admin key", ADMIN_KEY)
    expect(page.get_by_text("Version 1 is loaded beside the default.")).to_be_visible()
    region.get_by_role("spinbutton", name="% of the users").fill("30")
    region.get_by_role("spinbutton", name="% of the others unseen").fill("10")
    region.get_by_role("button", name="Try it").click()
    expect(region.get_by_text("answers 30 % of the users, 10 % of the others unseen; all else goes to version 2.")).to_be_visible()
    expect(region.get_by_role("region", name="Since they were loaded").locator("tbody tr")).to_have_count(2)
    expect(page.get_by_role("region", name="Versions").get_by_text("candidate")).to_be_visible()
    settled(page)
    assert serious_findings(page) == []
    region.get_by_role("button", name="End the trial").click()
    expect(region.get_by_role("button", name="Try it")).to_be_visible()
    region.get_by_role("button", name="Try it").click()
    region.get_by_role("button", name="Promote version 1").click()
    page.get_by_role("dialog").get_by_role("button", name="Serve version 1").click()
    expect(page.get_by_text("Version 1 is the default.")).to_be_visible()
    settled(page)
    assert default_version(page) == "1"
    expect(region.get_by_text("answers")).to_have_count(0)
    page.get_by_role("button", name="Make it the default").click()
    page.get_by_role("dialog").get_by_role("button", name="Serve version 2").click()
    expect(page.get_by_text("Version 2 is the default.")).to_be_visible()


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


# -- an item is put into the running service from the page, found, looked at and deleted, each with the key that it needs -


TITLE = "<b>Simple</b> \u202eDirectMedia Layer 3"


@pytest.fixture
def writer(guarded: Service, browser: Browser) -> Iterator[Watched]:
    yield from opened("live?model=debian-depends", guarded, browser)


def test_an_item_is_put_found_looked_at_and_deleted(writer: Watched) -> None:
    page = writer.page
    page.get_by_label("Id", exact=True).fill("made/by hand")
    page.get_by_label("title", exact=True).fill(TITLE)
    page.get_by_label("debtags").fill('["role::shared-lib"]')
    page.get_by_label("Events").fill("libsdl2-2.0-0, libgl1\n\nlibsdl2-2.0-0 nowhere")
    page.get_by_role("button", name="Put", exact=True).click()
    give_key(page, "a write", WRITE_KEY)
    outcome = page.locator(".live-outcome")
    expect(outcome).to_contain_text("inserted, operation 1: the next request sees it. Placed by events")
    expect(outcome).to_contain_text("Unknown, and skipped: nowhere")
    expect(page.locator(".live-status")).to_contain_text("1 live item")

    page.get_by_role("button", name="Read the feed").click()
    give_key(page, "an admin", ADMIN_KEY)
    row = page.get_by_role("region", name="Last changes").locator("tbody tr")
    expect(row).to_contain_text("2 events")
    expect(row).to_contain_text(TITLE)
    assert serious_findings(page) == []

    row.get_by_role("link").click()
    page.get_by_role("button", name="Look made/by hand up").click()
    expect(page.locator(".live-body")).to_contain_text('"role::shared-lib"')
    page.get_by_role("link", name="Is it found?").click()
    expect(page.locator(".whynot-sentence")).to_contain_text("It comes, at place")
    expect(page.get_by_role("heading", name="Live")).to_be_visible()
    page.go_back()
    page.get_by_role("button", name="Look made/by hand up").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Delete it").click()
    expect(page.get_by_text("made/by hand: deleted, operation 2.")).to_be_visible()
    expect(page.locator(".live-status")).to_contain_text("0 live items")


def test_what_is_wrong_is_named(writer: Watched) -> None:
    page = writer.page
    writer.expect_failures("status of 4")
    page.get_by_label("Id", exact=True).fill("new")
    page.get_by_label("Events").fill('["libgl1"]\n["libgl1"')
    page.get_by_role("button", name="Put", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("Line 2")
    page.get_by_label("Events").fill("")
    page.get_by_role("button", name="Put", exact=True).click()
    give_key(page, "a write", WRITE_KEY)
    expect(page.get_by_role("alert")).to_contain_text("events")
