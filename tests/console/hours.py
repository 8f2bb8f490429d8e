"""A page of the console that stays open for hours: simulated time, real memory.

The page's clock is Playwright's, so that eight hours take half a minute. The service's answer of /health is replaced inside the page by one
with every minute of the last 24 hours, which a young service does not have; it is made of the names in a real answer.
Knows Chromium's heap. Does not know what the view shows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import CDPSession, Page

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
