"""The Lab: a question already asked, sliders that move its results at once, two searches compared, and what can be copied."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, quote_plus, urlencode, urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests import ROOT
from tests.console.browsing import Watched, visit
from tests.console.showing import MADE_OF_TITLES, NOT_ISOLATED, address, settled, show, state
from tests.console.strange_model import RIGHT_TO_LEFT, STRANGE
from tests.service.processes import Service

pytestmark = [pytest.mark.slow, pytest.mark.console]

STRANGE_QUERY = {"model": "strange", "q": '{"history":["item-0"]}', "beam": "64", "m": "32"}

MARK_ANSWERS = """(late) => {
  const asked = window.fetch;
  window.asked = [];
  window.fetch = async (resource, options) => {
    if (!/\\/retrieve$/.test(new URL(resource.url ?? resource, document.baseURI).pathname)) return asked(resource, options);
    const request = JSON.parse(options.body);
    const number = window.asked.push(request);
    const answer = await asked(resource, late ? {...options, signal: undefined} : options);
    if (!answer.ok) return answer;
    const content = await answer.json();
    const item = content.results[0].items[0];
    if (item) item.fields = {...item.fields, title: `beam ${request.beam_size}`};
    if (number % 2 === 0) await new Promise((resolve) => setTimeout(resolve, late));
    return new Response(JSON.stringify(content), {headers: {"Content-Type": "application/json"}});
  };
}"""
"""The first title of an answer becomes "beam N" of its request. `late` > 0: every second answer is so many ms late, and even those
that were cancelled come: a page must drop them itself. `asked` lists the requests."""

SHOWN = "document.querySelector('.results .result .title')?.textContent"

MOVE_MANY = """async ({moves, pause_ms}) => {
  const slider = document.querySelector("main input[type=range]");
  const seen = [];
  const observer = new MutationObserver(() => {
    const title = document.querySelector(".results .result .title")?.textContent;
    if (title !== seen.at(-1)) seen.push(title);
  });
  observer.observe(document.querySelector("main"), {subtree: true, childList: true, characterData: true});
  for (const beam of moves) {
    slider.value = beam;
    slider.dispatchEvent(new Event("input", {bubbles: true}));
    await new Promise((resolve) => setTimeout(resolve, pause_ms));
  }
  await new Promise((resolve) => setTimeout(resolve, 1000));
  observer.disconnect();
  return seen;
}"""
"""Move the first slider through `moves`; gives the first titles that were shown, in their order, until a second after the last move."""


def ids(page: Page) -> list[str]:
    """Ids of the items in the (first) list."""
    found: list[str] = page.evaluate(
        "[...document.querySelector('.results ol').querySelectorAll('.about .mono')].map((id) => id.textContent)"
    )
    return found


def asked(watched: Watched) -> Any:
    """The last retrieval that the page asked for."""
    return next(request for request in reversed(watched.requests) if request.url.endswith("/retrieve")).post_data_json


def retrieved(console: Service, body: Any) -> list[str]:
    status, answer = console.request("POST", "/retrieve", body)
    assert status == 200
    return [item["id"] for item in answer["results"][0]["items"]]


def answered(page: Page) -> None:
    """Wait until what is shown is the answer to what the sliders say."""
    expect(page.locator(".summary")).to_have_attribute("aria-busy", "false")
    settled(page)


def test_a_stranger_sees_results_without_a_click_moves_them_and_keeps_them_by_their_address(
    watched: Watched, console: Service, browser: Browser
) -> None:
    page = watched.page
    page.goto(f"{watched.origin}/")
    expect(page.locator(".results .result").first).to_be_visible()
    answered(page)
    _, heldout = console.request("GET", "/models/debian-depends/heldout?limit=20")
    body = asked(watched)
    assert body["queries"][0] == heldout["queries"][0]["query"]
    assert ids(page) == retrieved(console, body)
    assert page.locator(".results .result .bar").count() == len(ids(page))
    for name, key, value in (("Beam", "beam_size", "7"), ("m", "m", "3")):
        page.get_by_role("slider", name=re.compile(f"^{name}\\b")).fill(value)
        answered(page)
        assert asked(watched)[key] == int(value)
    assert len(ids(page)) == 3
    assert ids(page) == retrieved(console, asked(watched))
    priorities = {request.headers.get("espalier-priority") for request in watched.requests if request.url.endswith("/retrieve")}
    assert priorities == {"background"}
    page.wait_for_url(re.compile("beam=7&m=3"))
    with visit(browser, watched.origin) as other:
        other.page.goto(page.url)
        answered(other.page)
        assert ids(other.page) == ids(page)
        assert asked(other) == asked(watched)


def test_two_hundred_fast_moves_show_nothing_stale(watched: Watched) -> None:
    """Ascending beams: an answer that is overtaken by a later one would show as a smaller number after a larger one."""
    page = watched.page
    page.add_init_script(f"({MARK_ANSWERS})(500)")
    show(page, f"{watched.origin}/", "lab", {"beam": "1"})
    answered(page)
    seen = page.evaluate(MOVE_MANY, {"moves": list(range(1, 201)), "pause_ms": 4})
    beams = [int(str(title).removeprefix("beam ")) for title in seen]
    assert beams == sorted(beams)
    assert beams[-1] == 200
    assert len(beams) >= 2, "nothing was shown while the slider moved"
    assert page.evaluate("asked.length") < 150, "requests are debounced"
    answered(page)
    assert page.evaluate(SHOWN) == "beam 200"


def test_two_versions_are_compared_item_by_item(watched: Watched, console: Service) -> None:
    page = watched.page
    show(page, f"{watched.origin}/", "lab", {**STRANGE_QUERY, "m": "8", "version": "1", "side": "b", "b.version": "2", "b.beam": "64"})
    answered(page)
    body = {"model": "strange", "queries": [{"history": ["item-0"]}], "m": 8, "beam_size": 64}
    a, b = (retrieved(console, {**body, "version": version}) for version in (1, 2))
    both = set(a) & set(b)
    assert 0 < len(both) < 8, "the two must differ for this test"
    expect(page.locator(".summary")).to_contain_text(f"overlap {len(both)} of 8")
    left, right = page.locator(".results ol").all()
    assert left.locator(".lost").count() == 8 - len(both)
    assert right.locator(".new").count() == 8 - len(both)
    assert right.locator(".moved").count() == sum(a.index(item) != b.index(item) for item in both)
    page.get_by_role("button", name="Stop comparing").click()
    answered(page)
    expect(page.locator(".results ol")).to_have_count(1)
    page.get_by_role("button", name="Compare A | B").click()
    answered(page)
    expect(page.locator(".results ol")).to_have_count(2)


def test_what_is_copied_runs_and_gives_what_is_shown(console: Service, browser: Browser) -> None:
    origin = f"http://127.0.0.1:{console.port}"
    with visit(browser, origin, permissions=["clipboard-read", "clipboard-write"]) as watched:
        page = watched.page
        show(page, f"{origin}/", "lab", {"m": "5", "beam": "40"})
        answered(page)
        shown = ids(page)
        copied = {}
        for name in ("Copy as curl", "Copy as Python"):
            page.get_by_role("button", name=name).click()
            expect(page.get_by_role("status").filter(has_text="Copied").first).to_be_attached()
            copied[name] = str(page.evaluate("navigator.clipboard.readText()"))
    run = subprocess.run([sys.executable, "-c", copied["Copy as Python"]], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [line.split()[0] for line in run.stdout.splitlines()[:5]] == shown
    if shutil.which("curl"):
        answer = subprocess.run(["bash", "-c", copied["Copy as curl"]], capture_output=True, text=True, check=True)
        assert [item["id"] for item in json.loads(answer.stdout)["results"][0]["items"]] == shown


def test_values_with_their_counts_filter_the_results(watched: Watched, console: Service) -> None:
    page = watched.page
    show(page, f"{watched.origin}/", "lab")
    answered(page)
    option = page.locator(".facets li").first
    option.get_by_role("checkbox").check()
    answered(page)
    (column, [value]) = next(iter(asked(watched)["filter"].items()))
    status, facets = console.request("GET", f"/models/debian-depends/facets?column={column}&limit=1000")
    assert status == 200
    [count] = [each["count"] for each in facets["values"] if each["value"] == value]
    expect(option).to_contain_text(f"{count:,}")
    assert ids(page) == retrieved(console, asked(watched))
    page.get_by_role("button", name="Clear").click()
    answered(page)
    assert "filter" not in asked(watched)


def test_counts_follow_what_the_query_leaves_out(watched: Watched, console: Service) -> None:
    """A value that is left out keeps its own count, to be taken in again, and leaves those of other columns."""
    page = watched.page
    show(page, f"{watched.origin}/", "lab", {"q": '{"history":["libc6"]}', "without": '{"section":["libs"]}', "live": "0"})
    _, facets = console.request("GET", "/models/debian-depends/facets?column=debtags&exclude_filter=%7B%22section%22%3A%5B%22libs%22%5D%7D")
    _, whole = console.request("GET", "/models/debian-depends/facets?column=debtags")
    assert facets["values"][0]["count"] < whole["values"][0]["count"]
    page.locator(".facets summary").nth(1).click()
    first = page.locator(".facets details").nth(1).locator("li").first
    expect(first).to_contain_text(f"{facets['values'][0]['count']:,}")
    sent = [parse_qs(urlsplit(request.url).query) for request in watched.requests if "/facets" in request.url]
    assert {query["column"][0] for query in sent} == {"section", "debtags"}
    assert all(query["exclude_filter"] == ['{"section":["libs"]}'] and query["live"] == ["false"] for query in sent)


def test_titles_stand_as_they_are(watched: Watched) -> None:
    page = watched.page
    page.goto(address(f"{watched.origin}/", "lab", STRANGE_QUERY))
    answered(page)
    text = page.evaluate("document.querySelector('main').textContent")
    assert [title for title in STRANGE if title.strip() and title not in text] == []
    assert RIGHT_TO_LEFT in page.evaluate("[...document.querySelectorAll('main bdi')].map((element) => element.textContent)")
    assert page.evaluate(MADE_OF_TITLES) == []
    assert page.evaluate(NOT_ISOLATED) == []


# -- queries of every kind in the Lab: made by keyboard, pointer and paste; what leads on from a result; wrong values -----


QUERY = {"history": ["libsdl2-2.0-0", "libgl1"]}
SET_RANGE = "(range, value) => { range.value = value; range.dispatchEvent(new Event('input', {bubbles: true})); }"


def lab(watched: Watched, query: dict[str, Any] = QUERY, others: Mapping[str, str] | None = None) -> Page:
    show(watched.page, f"{watched.origin}/", "lab", {"model": "debian-depends", "q": json.dumps(query)} | dict(others or {}))
    expect(watched.page.locator(".result").first).to_be_visible()
    return watched.page


def expect_address(page: Page, text: str) -> None:
    expect(page).to_have_url(re.compile(re.escape(quote_plus(text))))


def expect_kept_history(page: Page, history: list[str]) -> None:
    """In the list and, a moment later, in the address."""
    expect(page.locator(".history bdi.mono")).to_have_text(history)
    expect_address(page, json.dumps(history, separators=(",", ":"))[1:-1])


def result_ids(page: Page) -> list[str]:
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
    expect_kept_history(page, ["libgl1", "libsdl2-2.0-0"])
    page.get_by_role("combobox", name="Add an item to the history").evaluate(
        """(field) => {
          const pasted = new DataTransfer();
          pasted.setData("text", "libc6, zlib1g\\nlibgl1");
          field.dispatchEvent(new ClipboardEvent("paste", {clipboardData: pasted, bubbles: true, cancelable: true}));
        }"""
    )
    expect_kept_history(page, ["libgl1", "libsdl2-2.0-0", "libc6", "zlib1g"])
    page.get_by_role("button", name="Remove libsdl2-2.0-0").click()
    expect_kept_history(page, ["libgl1", "libc6", "zlib1g"])


def test_a_result_leads_to_why_and_can_be_added_or_left_out(watched: Watched) -> None:
    page = lab(watched)
    first, second = result_ids(page)[:2]
    page.get_by_role("button", name=f"Leave out {first}", exact=True).click()
    expect(page.locator(".result .about bdi.mono").first).to_have_text(second)
    page.get_by_role("button", name=f"Add {second} to the history").click()
    expect_kept_history(page, [*QUERY["history"], second])
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
