"""Versions are loaded, pinned and dropped from the page, with an admin key that is asked for then."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.console.browsing import Watched, visit
from tests.console.conftest import OPEN
from tests.console.showing import serious_findings, settled
from tests.service.processes import Service, service

pytestmark = [pytest.mark.slow, pytest.mark.console]

ADMIN_KEY = "console-admin-key-1"


@pytest.fixture(scope="module")
def administered(sample: Path, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("administered") / "models"
    shutil.copytree(sample / "strange", folder / "strange", ignore=shutil.ignore_patterns("serving.json"))
    with service(folder, 1, **OPEN | {"ESPALIER_ADMIN_KEYS": ADMIN_KEY}) as running:
        yield running


@pytest.fixture
def administrator(administered: Service, browser: Browser) -> Iterator[Watched]:
    with visit(browser, f"http://127.0.0.1:{administered.port}") as page:
        page.expect_failures("status of 40")  # without a key, or for a version that is not there
        page.page.goto(f"{page.origin}/#/models?model=strange")
        settled(page.page)
        yield page


def give_key(page: Page, key: str) -> None:
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("API key").fill(key)
    dialog.get_by_role("button", name="Use the key").click()


def default_version(page: Page) -> str:
    row = page.get_by_role("region", name="Versions").locator("tbody tr").filter(has_text="default")
    return str(row.locator("td").first.inner_text())


def test_a_version_is_rolled_back_to_and_another_dropped_and_loaded_again(administrator: Watched) -> None:
    page = administrator.page
    assert default_version(page) == "2"
    page.get_by_role("spinbutton", name="Load version").fill("1")
    page.get_by_role("button", name="Load", exact=True).click()
    give_key(page, ADMIN_KEY)
    expect(page.get_by_text("Version 1 is loaded beside the default.")).to_be_visible()
    page.get_by_role("button", name="Roll back to it").click()
    assert serious_findings(page) == []
    page.get_by_role("dialog").get_by_role("button", name="Serve version 1").click()
    expect(page.get_by_text("Version 1 is the default.")).to_be_visible()
    settled(page)
    assert default_version(page) == "1"
    page.get_by_role("button", name="Drop").click()
    page.get_by_role("dialog").get_by_role("button", name="Drop version 2").click()
    expect(page.get_by_text("Version 2 is dropped.")).to_be_visible()
    page.get_by_role("spinbutton", name="Load version").fill("2")
    page.get_by_label("and make it the default").check()
    page.get_by_role("button", name="Load", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Load and serve it").click()
    expect(page.get_by_text("Version 2 is loaded and is the default.")).to_be_visible()


def test_a_change_that_is_not_confirmed_is_not_made(administrator: Watched) -> None:
    page = administrator.page
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.method))
    page.get_by_label("and make it the default").check()
    page.get_by_role("button", name="Load", exact=True).click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert "POST" not in requests


def test_what_the_service_refuses_is_said(administrator: Watched) -> None:
    page = administrator.page
    page.get_by_role("spinbutton", name="Load version").fill("77")
    page.get_by_role("button", name="Load", exact=True).click()
    give_key(page, ADMIN_KEY)
    expect(page.get_by_role("alert")).to_contain_text("77")


def test_a_key_is_kept_in_no_storage(administrator: Watched) -> None:
    page = administrator.page
    page.get_by_role("spinbutton", name="Load version").fill("2")
    page.get_by_role("button", name="Load", exact=True).click()
    give_key(page, ADMIN_KEY)
    expect(page.get_by_text("Version 2 is loaded beside the default.")).to_be_visible()
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href, history.state])")
    assert ADMIN_KEY not in kept
