"""The console by the keyboard alone: no pointer is used here."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.console.browsing import Watched
from tests.console.showing import STATES, VIEWS, settled, show, state

pytestmark = [pytest.mark.slow, pytest.mark.console]

MOST_STOPS = 400
WHERE = """() => {
  const focused = document.activeElement;
  if (focused === document.body || focused === document.documentElement) return null;
  const style = getComputedStyle(focused);
  const box = focused.getBoundingClientRect();
  const all = [...document.querySelectorAll("*")];
  return {
    place: all.indexOf(focused),
    name: `${focused.tagName} ${focused.getAttribute("aria-label") ?? focused.textContent.slice(0, 60)}`,
    marked: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0,
    seen: box.width > 1 && box.height > 1,
    inside: box.left < innerWidth && box.top < innerHeight && box.right > 0 && box.bottom > 0,
  };
}"""


def stops(page: Page) -> list[dict[str, Any]]:
    """Where Tab leads, from the beginning of the page until it is through."""
    found: list[dict[str, Any]] = []
    for _ in range(MOST_STOPS):
        page.keyboard.press("Tab")
        where = page.evaluate(WHERE)
        if where is None or (found and where["place"] == found[0]["place"]):
            return found
        found.append(where)
    raise AssertionError(f"more than {MOST_STOPS} stops: {found[-5:]}")


def expect_history(page: Page, ids: list[str]) -> None:
    expect(page.locator("ol.history bdi.mono")).to_have_text(ids)


@pytest.mark.parametrize("view", VIEWS)
def test_tab_goes_through_a_view_in_its_order_and_shows_where_it_is(watched: Watched, view: str) -> None:
    page = watched.page
    show(page, f"{watched.origin}/", *STATES[view])
    found = stops(page)
    places = [stop["place"] for stop in found]
    assert places == sorted(places)
    assert [stop["name"] for stop in found if not stop["marked"]] == []
    assert [stop["name"] for stop in found if not (stop["seen"] and stop["inside"])] == []
    assert found[0]["name"] == "A Skip to the content"


def test_a_query_is_made_asked_and_followed_without_a_pointer(watched: Watched) -> None:
    page, press = watched.page, watched.page.keyboard.press
    show(page, f"{watched.origin}/", "lab")
    expect(page.locator(".results .result").first).to_be_visible()
    page.wait_for_url(re.compile("q="))

    press("Tab")
    press("Enter")  # skips the navigation
    expect(page.get_by_role("main")).to_be_focused()

    press("/")
    field = page.get_by_role("combobox", name="Add an item to the history")
    expect(field).to_be_focused()
    page.keyboard.type("python3-nump")
    expect(field).to_have_attribute("aria-expanded", "true")
    options = page.get_by_role("listbox").get_by_role("option")
    expect(options.first).to_contain_text("python3-nump")
    press("ArrowDown")
    press("ArrowUp")
    active = field.get_attribute("aria-activedescendant")
    expect(page.locator(f"[id='{active}']")).to_have_attribute("aria-selected", "true")
    press("Escape")
    expect(field).to_have_attribute("aria-expanded", "false")
    press("ArrowDown")
    expect(field).to_have_attribute("aria-expanded", "true")
    chosen = options.first.locator("bdi").first.inner_text()
    press("Enter")
    page.wait_for_url(re.compile(re.escape(chosen)))
    history = json.loads(state(page)["q"])["history"]
    assert history[-1] == chosen

    grip = re.compile(rf", {len(history)} of {len(history)}$")
    press("Shift+Tab")  # "Remove", and then the item itself
    press("Shift+Tab")
    expect(page.get_by_role("button", name=grip)).to_be_focused()
    press("Alt+ArrowUp")
    moved = [*history[:-2], history[-1], history[-2]]
    expect_history(page, moved)
    expect(page.get_by_role("button", name=re.compile(rf", {len(history) - 1} of {len(history)}$"))).to_be_focused()
    press("Delete")
    expect_history(page, history[:-1])
    expect(page.get_by_role("button", name=re.compile(r" of \d+$")).locator("nth=-1")).to_be_focused()


def test_sliders_follow_the_arrows_and_a_result_leads_to_why_not_and_back(watched: Watched) -> None:
    page = watched.page
    show(page, f"{watched.origin}/", "lab", {"model": "debian-depends", "beam": "20"})
    expect(page.locator(".results .result").first).to_be_visible()
    page.get_by_role("slider").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "PageUp", "Home", "ArrowRight"):
        page.keyboard.press(key)
    page.wait_for_url(re.compile(r"beam=2\b"))
    settled(page)
    expect(page.get_by_role("slider").first).to_be_focused()
    page.locator(".results .result a").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("#/whynot"))
    settled(page)
    expect(page.get_by_role("main")).to_be_focused()
    expect(page.locator(".whynot-sentence")).to_contain_text("It comes, at place 1")
    page.go_back()
    page.wait_for_url(re.compile("#/(lab)?"))
    expect(page.locator(".results .result").first).to_be_visible()
