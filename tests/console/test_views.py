"""Each view, looked at once: it opens by its address, without a fault, readable for all, on a phone too, and still where that is asked."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from tests.console.browsing import PHONE, WIDE, Watched, visit
from tests.console.showing import (
    MADE_OF_TITLES,
    MOVING,
    NOT_ISOLATED,
    STATES,
    WIDER_THAN_THE_PAGE,
    serious_findings,
    settled,
    show,
)
from tests.service.processes import Service

pytestmark = [pytest.mark.slow, pytest.mark.console]


@pytest.mark.parametrize("state", STATES)
def test_a_view_opens_by_its_address_is_readable_for_all_and_takes_titles_as_text(watched: Watched, state: str) -> None:
    """Axe finds nothing serious in light or dark; nothing is wider than a page or a phone; markup and scripts in titles are text, and
    marks of direction turn nothing but themselves.
    """
    page = watched.page
    show(page, f"{watched.origin}/", *STATES[state])
    expect(page.get_by_role("alert")).to_have_count(0)
    assert "Espalier" in page.title()
    assert page.evaluate(MOVING) == [], "nothing moves by itself where less motion is asked for"
    assert page.evaluate(MADE_OF_TITLES) == []
    assert page.evaluate(NOT_ISOLATED) == []
    light = page.evaluate("getComputedStyle(document.body).color")
    assert serious_findings(page) == []
    page.emulate_media(color_scheme="dark")
    settled(page)
    assert page.evaluate("getComputedStyle(document.body).color") != light
    assert serious_findings(page, only="color-contrast") == []
    for size in (WIDE, PHONE):
        page.set_viewport_size({"width": size["width"], "height": size["height"]})
        settled(page)
        assert page.evaluate(WIDER_THAN_THE_PAGE) == []


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
