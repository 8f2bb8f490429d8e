"""The frontier is measured when the view opens, drawn as it comes, and can be stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.console.browsing import Watched
from tests.console.showing import serious_findings, settled

pytestmark = [pytest.mark.slow, pytest.mark.console]


def rows(page: Page) -> list[list[str]]:
    """The cells of the table that is seen."""
    return [row.locator("td").all_inner_texts() for row in page.get_by_role("region", name="Recall and time").locator("tbody tr").all()]


LINE = {"m": 50, "recall_ci": [0.4, 0.6], "ms_per_query": 0.2, "queries": 64, "default": False}


def answered(route: Route) -> None:
    lines = [LINE | {"beam_size": 10, "recall": 0.5}, LINE | {"beam_size": 100, "recall": 0.55, "default": True}]
    route.fulfill(status=200, content_type="application/x-ndjson", body="".join(json.dumps(line) + "\n" for line in lines))


def test_lines_are_drawn_listed_with_the_default_marked_and_saved(watched: Watched) -> None:
    page = watched.page
    page.route("**/frontier", answered)
    page.goto(f"{watched.origin}/#/frontier?beams=10,100")
    settled(page)
    assert [row[:3] for row in rows(page)] == [["10", "", ".500"], ["100", "default", ".550"]]
    expect(page.get_by_text("and no beam that was measured finds more")).to_be_visible()
    expect(page.locator(".chart .event")).to_have_count(2)
    left = page.get_by_role("region", name="Recall by the time that is left").locator("tbody tr")
    assert [row.locator("td").all_inner_texts() for row in left.all()][:2] == [
        ["0.10 ms", "504", "–", "–"],
        ["0.20 ms", "100", ".550", ".000"],
    ]
    assert serious_findings(page) == []
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as CSV").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines == ["beam_size,m,recall,low,high,ms_per_query,queries", "10,50,0.5,0.4,0.6,0.2,64", "100,50,0.55,0.4,0.6,0.2,64"]


def test_a_problem_in_place_of_a_line_is_shown_beside_what_came_and_a_measurement_is_cancelled(watched: Watched) -> None:
    page = watched.page
    lines = [LINE | {"beam_size": 10, "recall": 0.5}, {"title": "Dropped", "status": 503, "detail": "Gone."}]
    body = "".join(json.dumps(line) + "\n" for line in lines)
    page.route("**/frontier", lambda route: route.fulfill(status=200, content_type="application/x-ndjson", body=body))
    page.goto(f"{watched.origin}/#/frontier?beams=10,100")
    expect(page.get_by_role("alert")).to_contain_text("Gone.")
    assert len(rows(page)) == 1
    page.unroute("**/frontier")
    page.route("**/frontier", lambda route: None)  # never answered
    page.goto(f"{watched.origin}/#/frontier?beams=10,200")
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("button", name="Measure again")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_it_is_measured_by_the_service(watched: Watched) -> None:
    page = watched.page
    page.goto(f"{watched.origin}/#/frontier?model=debian-depends&beams=5,100&queries=64&m=20")
    expect(page.get_by_role("region", name="Recall and time").locator("tbody tr")).to_have_count(2)
    narrow, wide = rows(page)
    assert float(narrow[2]) < float(wide[2]) < 1
    assert (narrow[5], wide[1]) == ("64", "default")


# -- many queries over two sides: what B loses comes first, and leads to the Lab ------------------------------------------


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


def replayed(page: Page) -> list[list[str]]:
    found = page.get_by_role("region", name="Queries of the replay").locator("tbody tr").all()
    return [[cell.strip() for cell in row.locator("td").all_inner_texts()] for row in found]


def test_what_b_loses_comes_first_and_leads_to_the_lab(watched: Watched) -> None:
    page = watched.page
    answers(page)
    page.goto(f"{watched.origin}/#/replays?model=debian-depends&b.beam=20")
    page.get_by_role("button", name="Replay", exact=True).click()
    settled(page)
    assert replayed(page) == [["b", "50 %", "1.000", ".000", "−1.000"], ["same", "100 %", "1.000", "1.000", ".000"]]
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
    assert replayed(page) == [["b", "50 %"], ["same", "100 %"]]
    expect(page.locator(".replays-said")).to_contain_text("75.0 % of their items in common")


def test_a_replay_of_the_sample_is_told_apart_by_its_interval(watched: Watched) -> None:
    page = watched.page
    page.goto(f"{watched.origin}/#/replays?model=debian-depends&b.beam=5&count=100")
    page.get_by_role("button", name="Replay", exact=True).click()
    expect(page.locator(".replays-figures")).to_contain_text("Queries100")
    expect(page.locator(".replays-said")).to_contain_text("B finds less: recall@50 −")
