"""Today says what is wrong first, in a sentence; what it shows comes from the service's last 24 hours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from playwright.sync_api import CDPSession, Page, expect

from tests.console.browsing import Watched
from tests.console.showing import serious_findings, settled
from tests.service.processes import Service

pytestmark = [pytest.mark.slow, pytest.mark.console]

NOW = 1_795_000_000
AT = [NOW - 60 * step for step in range(5, -1, -1)]
SERIES = {
    "recall": [None, 0.75, 0.75, 0.75, 0.75, 0.75],
    "expected_recall": [None, 0.75, 0.75, 0.75, 0.75, 0.75],
    "requests_per_s": [0, 10, 12, 11, 12, 12],
    "shed_per_s": [0, 0, 0, 0, 0, 0],
    "errors_per_s": [0, 0, 0, 0, 0, 0],
}
UNKNOWN = {name: [None] * 6 for name in SERIES}
WHAT = "Recall at export less that of the probe."
ALERT = {"name": "EspalierRecallDrop", "firing": False, "since": None, "value": 0.0, "threshold": 0.02, "what": WHAT}
HEALTH: dict[str, Any] = {
    "model": "debian-depends", "version": 3, "now": NOW, "since": AT[0], "step_s": 60, "at": AT, "recall_m": 50, "series": SERIES,
    "alerts": [ALERT], "events": [{"at": AT[2], "what": "Version 3 is the default now."}],
    "unknown_ids": [{"id": "<b>bold</b>\u202e", "count": 7}],
}  # fmt: skip


def show(watched: Watched, **changes: Any) -> Page:
    page = watched.page
    page.route("**/health", lambda route: route.fulfill(json=HEALTH | changes))
    page.goto(f"{watched.origin}/#/today?model=debian-depends")
    expect(page.locator(".today-said")).to_be_visible()
    settled(page)
    return page


def sentence(page: Page) -> str:
    return str(page.locator(".today-said p").first.inner_text())


def test_a_quiet_day_is_said_to_be_one(watched: Watched) -> None:
    page = show(watched)
    assert sentence(page) == "All is well: recall@50 .750 as expected, 12 requests a second."
    expect(page.locator(".chart .event")).not_to_have_count(0)
    expect(page.get_by_text("<b>bold</b>")).to_be_visible()
    assert serious_findings(page) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"alerts": [ALERT | {"firing": True, "since": NOW - 600, "value": 0.05}]}, f"1 alert holds: {WHAT.lower()}"),
        ({"series": SERIES | {"shed_per_s": [0, 0, 0, 0, 0, 2.5]}}, "2.5 requests a second are refused (429), 12 requests a second"),
        ({"series": SERIES | {"errors_per_s": [0, 0, 0, 0, 0, 0.5]}}, "0.5 requests a second fail (5xx)"),
        ({"series": SERIES | {"requests_per_s": [0] * 6}}, "All is well: recall@50 .750 as expected, and nobody asks now."),
        ({"series": SERIES | {"recall": [None] * 6}}, "recall is not watched (ESPALIER_PROBE_PER_S=1"),
        ({"series": SERIES | {"recall": [0.7] * 6}}, "recall@50 .700 against .750 expected"),
        ({"alerts": [], "series": UNKNOWN}, "Nothing is watched: no condition of an alert has a value."),
        ({"alerts": [ALERT | {"value": None}], "series": UNKNOWN}, "Nothing is watched: no condition of an alert has a value."),
    ],
)  # fmt: skip
def test_what_is_wrong_comes_first(watched: Watched, changes: dict[str, Any], expected: str) -> None:
    assert expected in sentence(show(watched, **changes))


def test_it_reads_again_by_itself_and_a_service_that_has_just_begun_says_so(watched: Watched) -> None:
    page = watched.page
    page.clock.install()
    show(watched)
    page.unroute("**/health")
    begun = {"at": [NOW], "series": {name: [None] for name in SERIES}, "events": [], "unknown_ids": []}
    page.route("**/health", lambda route: route.fulfill(json=HEALTH | begun))
    page.clock.run_for(31_000)
    expect(page.get_by_text("The service has just begun")).to_be_visible()


def test_the_services_own_figures_are_shown(watched: Watched) -> None:
    page = watched.page
    page.goto(f"{watched.origin}/#/today?model=debian-depends")
    expect(page.locator(".today-said")).to_be_visible()
    page.get_by_text("All 2").click()
    expect(page.get_by_role("region", name="Conditions of alerts")).to_contain_text("EspalierRecallDrop")


# -- a page that stays open does not grow: simulated time, real memory, and an answer with every minute of the last 24 hours --


STEP_S = 60
FULL_HEALTH = """(template) => {
  const asked = window.fetch;
  let answers = 0;
  window.healthAnswers = () => answers;
  window.fetch = (resource, options) => {
    const url = String(resource.url ?? resource);
    if (!/\\/models\\/[^/]+\\/health/.test(url)) return asked(resource, options);
    answers += 1;
    const now = Math.floor(Date.now() / 1000);
    const at = Array.from({length: 1440}, (_, minute) => now - now % 60 - 60 * (1439 - minute));
    const series = Object.fromEntries(Object.keys(template.series).map((name, place) =>
      [name, at.map((second) => (second / 60 + place) % 97 < 3 ? null : Math.abs(Math.sin(second / 3600 + place)))]));
    const events = Array.from({length: 100}, (_, place) => ({at: now - 800 * place, what: `event ${now}-${place}`}));
    const unknown_ids = Array.from({length: 50}, (_, place) => ({id: `unknown-${now}-${place}`, count: 50 - place}));
    const content = {...template, now, since: at[0], step_s: 60, at, series, events, unknown_ids};
    return Promise.resolve(new Response(JSON.stringify(content), {headers: {"Content-Type": "application/json"}}));
  };
}"""
"""Replaces the service's answers of /health inside the page: a young service does not have 24 hours. Their names are a real answer's."""


@dataclass(frozen=True)
class Grown:
    """What a page has more at the end than at the beginning; `answers` of /health came in between."""

    heap_mb: float
    nodes: int
    listeners: int
    answers: int


def watched_for_hours(page: Page, address: str, health: dict[str, Any], hours: float) -> Grown:
    """Open the address with a simulated clock and let the hours pass. health: an answer of the service.

    Both measurements follow a garbage collection. The first is taken after five simulated minutes, when everything has been loaded.
    """
    page.clock.install()
    page.add_init_script(f"({FULL_HEALTH})({json.dumps(health)})")
    page.goto(address)
    page.locator("main h1").wait_for()
    session = page.context.new_cdp_session(page)
    _pass(page, 300)
    before, first = _measured(session), int(page.evaluate("healthAnswers()"))
    _pass(page, round(hours * 3600))
    after, last = _measured(session), int(page.evaluate("healthAnswers()"))
    session.detach()
    return Grown((after[0] - before[0]) / 1e6, after[1] - before[1], after[2] - before[2], last - first)


def _pass(page: Page, seconds: int) -> None:
    for _ in range(0, seconds, STEP_S):
        page.clock.run_for(STEP_S * 1000)


def _measured(session: CDPSession) -> tuple[int, int, int]:
    """(bytes of the heap, DOM nodes, event listeners)."""
    for _ in range(3):
        session.send("HeapProfiler.collectGarbage")
    counters = session.send("Memory.getDOMCounters")
    return int(session.send("Runtime.getHeapUsage")["usedSize"]), int(counters["nodes"]), int(counters["jsEventListeners"])


def test_today_open_for_hours_does_not_grow(console: Service, watched: Watched) -> None:
    status, health = console.request("GET", "/models/debian-depends/health")
    assert status == 200
    grown = watched_for_hours(watched.page, f"{watched.origin}/#/today", health, hours=1)
    assert grown.answers >= 60 / 5, "it asks every few minutes at least"
    assert grown.heap_mb <= 4, "all answers would be more"
    assert grown.nodes < 2000
    assert grown.listeners < 100
