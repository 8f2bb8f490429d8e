"""A page that stays open does not grow."""

from __future__ import annotations

import pytest

from tests.console.browsing import Watched
from tests.console.hours import watched_for_hours
from tests.service.processes import Service

pytestmark = [pytest.mark.slow, pytest.mark.console]


def test_today_open_for_hours_does_not_grow(console: Service, watched: Watched) -> None:
    status, health = console.request("GET", "/models/debian-depends/health")
    assert status == 200
    grown = watched_for_hours(watched.page, f"{watched.origin}/#/today", health, hours=1)
    assert grown.answers >= 60 / 5, "it asks every few minutes at least"
    assert grown.heap_mb <= 4, "all answers would be more"
    assert grown.nodes < 2000
    assert grown.listeners < 100
