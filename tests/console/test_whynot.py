"""Why not: the answer comes first, in a sentence, and says what to change."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page, expect

from tests.console.browsing import Watched
from tests.console.showing import serious_findings, settled

pytestmark = [pytest.mark.slow, pytest.mark.console]

QUERY = {"history": ["libsdl2-2.0-0", "libgl1"], "exclude_seen": True}


def ask(watched: Watched, item: str, query: dict[str, Any] = QUERY, **more: Any) -> Page:
    state = {"model": "debian-depends", "q": json.dumps(query), "item": item, "m": 20} | more
    watched.page.goto(f"{watched.origin}/#/whynot?{urlencode(state)}")
    expect(watched.page.locator(".whynot-sentence")).to_be_visible()
    settled(watched.page)
    return watched.page


def test_an_item_that_a_wider_beam_finds(watched: Watched) -> None:
    page = ask(watched, "python3-numpy", beam=10)
    expect(page.locator(".whynot-sentence")).to_have_text("It fell out on level 5 of 14: its branch was 17th of 20, and the beam keeps 10.")
    expect(page.locator(".whynot-ladder")).to_contain_text("the smallest that was tried")
    beam = page.locator(".whynot-ladder strong").inner_text()
    page.get_by_role("link", name="See it in the Lab").click()
    assert f"beam={beam}" in page.url


def test_an_item_that_was_scored_but_not_among_the_results(watched: Watched) -> None:
    page = ask(watched, "libgtk-3-0")
    expect(page.locator(".whynot-sentence")).to_have_text(
        "The beam found it, but the scorer has it only 81st of 163, and 20 items came back."
    )
    page.get_by_role("link", name="Ask for 81 results").click()
    assert "m=81" in page.url


def test_an_item_that_came_and_another_that_is_asked_for_by_typing(watched: Watched) -> None:
    page = ask(watched, "libc6")
    assert "It comes, at place 1 of 20." in str(page.locator(".whynot-verdict").inner_text())
    expect(page.get_by_role("heading", name="What the history says for it")).to_be_visible()
    assert serious_findings(page) == []
    box = page.get_by_role("combobox", name="Why did this item not come?")
    box.fill("libgtk-3-0")
    page.get_by_role("option").filter(has_text="libgtk-3-0").first.click()
    expect(page.locator(".whynot-sentence")).to_contain_text("81st")
    page.go_back()
    expect(page.locator(".whynot-sentence")).to_contain_text("It comes, at place 1")


@pytest.mark.parametrize(
    ("item", "query", "more", "sentence", "remedy"),
    [
        ("libgl1", QUERY, {}, "The query itself excludes it.", "exclude_seen is on"),
        ("libc6", QUERY | {"exclude": ["libc6"]}, {}, "The query itself excludes it.", "in the list exclude"),
        ("libc6", QUERY, {"filter": '{"section": ["python"]}'}, "The filter forbids it", 'section: ["python"] forbids it'),
        ("no-such-thing", QUERY, {}, "The catalogue does not have it.", "Is the id right"),
    ],
)
def test_what_forbids_an_item_is_named(
    watched: Watched, item: str, query: dict[str, Any], more: dict[str, str], sentence: str, remedy: str
) -> None:
    page = ask(watched, item, query, **more)
    expect(page.locator(".whynot-verdict")).to_contain_text(sentence)
    expect(page.locator(".whynot-verdict")).to_contain_text(remedy)


def test_only_the_condition_that_forbids_it_is_taken_out(watched: Watched) -> None:
    page = ask(watched, "libc6", filter='{"section": ["python", "libs"]}', without='{"section": ["libs"]}')
    expect(page.locator(".whynot-forbidden")).to_contain_text("allows it")
    page.get_by_role("link", name="Ask without this condition").click()
    assert "filter=" in page.url
    assert "without=" not in page.url
