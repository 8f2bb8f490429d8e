"""Queries of every kind in the Lab: made by keyboard, pointer and paste; what leads on from a result; wrong values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote_plus, urlencode

import pytest
from playwright.sync_api import Page, Route, expect

from tests.console.browsing import Watched
from tests.console.showing import settled, show, state

pytestmark = [pytest.mark.slow, pytest.mark.console]

QUERY = {"history": ["libsdl2-2.0-0", "libgl1"]}
SET_RANGE = "(range, value) => { range.value = value; range.dispatchEvent(new Event('input', {bubbles: true})); }"


def lab(watched: Watched, query: dict[str, Any] = QUERY, others: Mapping[str, str] | None = None) -> Page:
    show(watched.page, f"{watched.origin}/", "lab", {"model": "debian-depends", "q": json.dumps(query)} | dict(others or {}))
    expect(watched.page.locator(".result").first).to_be_visible()
    return watched.page


def expect_address(page: Page, text: str) -> None:
    expect(page).to_have_url(re.compile(re.escape(quote_plus(text))))


def expect_history(page: Page, history: list[str]) -> None:
    """In the list and, a moment later, in the address."""
    expect(page.locator(".history bdi.mono")).to_have_text(history)
    expect_address(page, json.dumps(history, separators=(",", ":"))[1:-1])


def ids(page: Page) -> list[str]:
    return page.locator(".result .about bdi.mono").all_inner_texts()


def test_a_history_is_dragged_and_pasted(watched: Watched) -> None:
    page = lab(watched)
    grips = [page.locator(".grip").nth(place).bounding_box() for place in (0, 1)]
    assert grips[0]
    assert grips[1]
    page.mouse.move(grips[0]["x"] + 5, grips[0]["y"] + 5)
    page.mouse.down()
    page.mouse.move(grips[1]["x"] + 5, grips[1]["y"] + 12, steps=4)
    page.mouse.up()
    expect_history(page, ["libgl1", "libsdl2-2.0-0"])
    page.get_by_role("combobox", name="Add an item to the history").evaluate(
        """(field) => {
          const pasted = new DataTransfer();
          pasted.setData("text", "libc6, zlib1g\\nlibgl1");
          field.dispatchEvent(new ClipboardEvent("paste", {clipboardData: pasted, bubbles: true, cancelable: true}));
        }"""
    )
    expect_history(page, ["libgl1", "libsdl2-2.0-0", "libc6", "zlib1g"])
    page.get_by_role("button", name="Remove libsdl2-2.0-0").click()
    expect_history(page, ["libgl1", "libc6", "zlib1g"])


def test_a_result_leads_to_why_and_can_be_added_or_left_out(watched: Watched) -> None:
    page = lab(watched)
    first, second = ids(page)[:2]
    page.get_by_role("button", name=f"Leave out {first}", exact=True).click()
    expect(page.locator(".result .about bdi.mono").first).to_have_text(second)
    page.get_by_role("button", name=f"Add {second} to the history").click()
    expect_history(page, [*QUERY["history"], second])
    page.locator(".result .name").nth(1).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Why not")
    assert json.loads(state(page)["q"])["exclude"] == [first]
    page.go_back()
    page.get_by_role("combobox", name="Why is an item not here?").fill("zsh")
    page.locator(".combobox").get_by_role("option").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Why not")
    assert state(page)["item"].startswith("zsh")


def test_a_wrong_value_is_told_in_the_words_of_the_service(watched: Watched) -> None:
    watched.expect_failures("status of 422")
    page = watched.page
    page.goto(f"{watched.origin}/#/lab?{urlencode({'q': json.dumps(QUERY), 'beam': '1001'})}")
    expect(page.get_by_role("alert")).to_contain_text("beam_size is 1001; expected at most 1000")
    page.get_by_role("slider", name="Beam").first.evaluate(SET_RANGE, "10")
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator(".result").first).to_be_visible()


def test_an_address_that_cannot_be_read_is_as_if_it_said_nothing(watched: Watched) -> None:
    page = watched.page
    page.goto(f"{watched.origin}/#/lab?{urlencode({'q': '[1', 'filter': '7', 'without': '{', 'beam': 'wide', 'm': '9'})}")
    expect(page.locator(".result")).to_have_count(9)
    expect(page.get_by_role("alert")).to_have_count(0)


VECTORS = {"name": "points", "state": "ready", "reason": None, "version": 1, "versions": [{"version": 1, "state": "ready"}], "engine": "e"}


@pytest.mark.parametrize(
    ("kind", "typed", "query", "wrong", "said"),
    [
        ({"kind": "vector", "width": 3}, "[1, 2.5 -3]", {"vector": [1, 2.5, -3]}, "1, 2", "These are 2 numbers; the model takes 3."),
        ({"kind": "vector", "width": 3}, "1e-3,0,0", {"vector": [0.001, 0, 0]}, "1, x, 3", "“x” is not a number."),
        (
            {"kind": "features", "width": 9},
            "8:0.5 1",
            {"features": {"indices": [8, 1], "values": [0.5, 1]}},
            "9:1",
            "Expected feature numbers from 0 to 8.",
        ),
        (
            {"kind": "features", "width": 9},
            '{"indices": [3], "values": [2]}',
            {"features": {"indices": [3], "values": [2]}},
            "3:1 3:2",
            "A feature number stands there twice.",
        ),
        ({"kind": "text", "width": 9}, "red shoes", {"text": "red shoes"}, None, None),
    ],
    ids=["vector", "numbers", "features", "features as JSON", "text"],
)
def test_other_kinds_of_queries_are_typed(
    watched: Watched, kind: dict[str, Any], typed: str, query: dict[str, Any], wrong: str | None, said: str | None
) -> None:
    """Against a fake service: what is sent is all that matters here."""
    page = watched.page
    search = {"beam_size": 10, "m": 5, "max_beam_size": 100, "max_m": 100}
    model = VECTORS | {"query": kind, "search": search, "fields": ["id", "title"], "ranker": None, "live": None}
    sent: list[Any] = []

    def answer(route: Route) -> None:
        sent.append((route.request.post_data_json or {})["queries"][0])
        result = {"items": [], "complete": True, "beam_size": 10, "degraded": False, "unknown": []}
        times = ("queue_ms", "encode_ms", "search_ms", "rerank_ms", "serialise_ms", "total_ms", "ms_per_query")
        route.fulfill(
            json={"model": "points", "version": 1, "engine": "e", "results": [result], "timing": dict.fromkeys(times, 0) | {"batch": 1}}
        )

    page.route("**/models", lambda route: route.fulfill(json={"models": [model], "keys": []}))
    page.route("**/heldout?**", lambda route: route.fulfill(json={"queries": []}))
    page.route("**/items?**", lambda route: route.fulfill(json={"items": []}))
    page.route("**/retrieve", answer)
    page.goto(f"{watched.origin}/")
    field = page.get_by_label(kind["kind"].capitalize())
    field.fill(typed)
    settled(page)
    expect(page.locator(".summary")).to_be_visible()
    assert sent[-1] == query
    if wrong is not None:
        count = len(sent)
        field.fill(wrong)
        expect(page.get_by_text(str(said))).to_be_visible()
        assert len(sent) == count
