"""Today says what is wrong first, in a sentence; what it shows comes from the service's last 24 hours."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.console.browsing import Watched
from tests.console.hours import watched_for_hours
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


# -- a page that stays open does not grow ---------------------------------------------------------------------------------


def test_today_open_for_hours_does_not_grow(console: Service, watched: Watched) -> None:
    status, health = console.request("GET", "/models/debian-depends/health")
    assert status == 200
    grown = watched_for_hours(watched.page, f"{watched.origin}/#/today", health, hours=1)
    assert grown.answers >= 60 / 5, "it asks every few minutes at least"
    assert grown.heap_mb <= 4, "all answers would be more"
    assert grown.nodes < 2000
    assert grown.listeners < 100
