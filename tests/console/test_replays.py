"""Many queries over two sides: what B loses comes first, and leads to the Lab."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.console.browsing import Watched
from tests.console.showing import serious_findings, settled

pytestmark = [pytest.mark.slow, pytest.mark.console]

FOUND = {"a": ["x", "y"], "b": ["x", "z"], "same": ["x", "y"]}


def answers(page: Page) -> None:
    """A service whose side B, beam 20, finds other items for the history `b` than for side A."""
    heldout = [{"query": {"history": [name]}, "relevant": ["y"], "recall": {}} for name in ("same", "b")]
    page.route("**/heldout*", lambda route: route.fulfill(json={"queries": heldout}))

    def retrieve(route: Any) -> None:
        asked = route.request.post_data_json
        names = [query["history"][0] for query in asked["queries"]]
        found = [FOUND[name if name == "same" or asked.get("beam_size") == 20 else "a"] for name in names]
        route.fulfill(json={"model": "debian-depends", "results": [{"items": [{"id": item} for item in items]} for items in found]})

    page.route("**/retrieve", retrieve)


def rows(page: Page) -> list[list[str]]:
    found = page.get_by_role("region", name="Queries of the replay").locator("tbody tr").all()
    return [[cell.strip() for cell in row.locator("td").all_inner_texts()] for row in found]


def test_what_b_loses_comes_first_and_leads_to_the_lab(watched: Watched) -> None:
    page = watched.page
    answers(page)
    page.goto(f"{watched.origin}/#/replays?model=debian-depends&b.beam=20")
    page.get_by_role("button", name="Replay", exact=True).click()
    settled(page)
    assert rows(page) == [["b", "50 %", "1.000", ".000", "−1.000"], ["same", "100 %", "1.000", "1.000", ".000"]]
    expect(page.locator(".replays-figures")).to_contain_text("0, 1, 1")
    assert serious_findings(page) == []
    page.unroute("**/retrieve")
    page.get_by_role("link", name="b", exact=True).click()
    assert "b.beam=20" in page.url
    assert "side=b" in page.url


def test_pasted_queries_have_no_recall_and_a_line_that_cannot_be_read_is_named(watched: Watched) -> None:
    page = watched.page
    answers(page)
    page.goto(f"{watched.origin}/#/replays?model=debian-depends&from=pasted&b.beam=20")
    box = page.get_by_label("Queries, one a line")
    box.fill('b\n{"history": ')
    page.get_by_role("button", name="Replay", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("Line 2")
    box.fill('same\n{"history": ["b"]}')
    page.get_by_role("button", name="Replay", exact=True).click()
    settled(page)
    assert rows(page) == [["b", "50 %"], ["same", "100 %"]]
    expect(page.locator(".replays-said")).to_contain_text("75.0 % of their items in common")


def test_a_replay_of_the_sample_is_told_apart_by_its_interval(watched: Watched) -> None:
    page = watched.page
    page.goto(f"{watched.origin}/#/replays?model=debian-depends&b.beam=5&count=100")
    page.get_by_role("button", name="Replay", exact=True).click()
    expect(page.locator(".replays-figures")).to_contain_text("Queries100")
    expect(page.locator(".replays-said")).to_contain_text("B finds less: recall@50 −")
