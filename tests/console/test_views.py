"""Each view, looked at once: it opens by its address, without a fault, readable for all, on a phone too, and still where that is asked."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from tests.console.browsing import PHONE, Watched, visit
from tests.console.showing import MOVING, STATES, VIEWS, WIDER_THAN_THE_PAGE, address, serious_findings, settled, show
from tests.service.processes import Service

pytestmark = [pytest.mark.slow, pytest.mark.console]


def test_the_navigation_leads_to_every_view(watched: Watched) -> None:
    page = watched.page
    show(page, f"{watched.origin}/", "lab")
    links = page.get_by_role("navigation", name="Views").get_by_role("link")
    assert sorted(view for view in VIEWS for link in links.all() if f"#/{view}" in str(link.get_attribute("href"))) == VIEWS
    for link in links.all():
        link.click()
        settled(page)
        expect(link).to_have_attribute("aria-current", "page")
        assert page.get_by_role("heading", level=1).inner_text().startswith(link.inner_text())
        expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.parametrize("state", STATES)
def test_a_view_opens_by_its_address_and_axe_finds_nothing_serious_in_light_or_dark(watched: Watched, state: str) -> None:
    page = watched.page
    show(page, f"{watched.origin}/", *STATES[state])
    expect(page.get_by_role("alert")).to_have_count(0)
    assert "Espalier" in page.title()
    assert page.evaluate(MOVING) == [], "nothing moves by itself where less motion is asked for"
    colours = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme="light" if scheme == "light" else "dark")
        settled(page)
        assert serious_findings(page) == [], scheme
        colours.add(page.evaluate("getComputedStyle(document.body).color"))
    assert len(colours) == 2


@pytest.mark.parametrize("state", STATES)
def test_a_view_fits_a_phone(console: Service, browser: Browser, state: str) -> None:
    with visit(browser, f"http://127.0.0.1:{console.port}", viewport=PHONE, has_touch=True) as watched:
        show(watched.page, f"{watched.origin}/", *STATES[state])
        assert watched.page.evaluate(WIDER_THAN_THE_PAGE) == []


@pytest.mark.parametrize(("motion", "moves"), [("reduce", False), ("no-preference", True)])
def test_what_is_under_way_appears_slowly_unless_less_motion_is_asked_for(
    console: Service, browser: Browser, motion: str, moves: bool
) -> None:
    with visit(browser, f"http://127.0.0.1:{console.port}", reduced_motion=motion) as watched:
        page = watched.page
        page.route("**/models", lambda route: None)  # no answer comes
        page.goto(f"{watched.origin}/")
        expect(page.get_by_role("status").first).to_be_visible()
        assert bool(page.evaluate(MOVING)) == moves


def test_an_address_that_names_no_view_leads_back(watched: Watched) -> None:
    watched.page.goto(address(f"{watched.origin}/", "nothing"))
    watched.page.get_by_role("link", name="Lab").last.click()
    settled(watched.page)
