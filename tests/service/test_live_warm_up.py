"""What the first requests after the first write would wait for is compiled and opened before a version serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.bundle import Bundle
from espalier.engines.live.engine import LiveEngine
from espalier.queries import QueryBatch
from espalier.search import Engine, SearchParams, SearchResult
from service.models import loading
from tests.service.live_running import ITEMS, Nearest, models, open_reference
from tests.service.running import run

__all__ = ["models"]


class Recorded(LiveEngine):
    """What was searched while something was live: the highest item row in histories, and that in exclusions."""

    def __init__(self, bundle: Bundle) -> None:
        opened = open_reference(bundle)
        assert isinstance(opened, LiveEngine)
        super().__init__(bundle, opened.inner)
        self.calls: list[tuple[int, int]] = []

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        if self._now is not None:
            excluded = -1 if params.exclude_BE is None else int(params.exclude_BE.max())
            self.calls.append((int(np.max(queries.array)), excluded))
        return super().search(queries, params)


def calls(models: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[tuple[int, int]]:
    engines: list[Recorded] = []

    def opened(bundle: Bundle) -> Engine:
        engines.append(Recorded(bundle))
        return engines[-1]

    monkeypatch.setattr(loading, "Placer", Nearest)
    with run(models, opened, **settings) as running:
        assert running.client.post("/retrieve", json={"model": "books", "queries": [{"history": ["item-1"]}]}).status_code == 200
    return engines[0].calls


def test_searches_with_live_items_in_histories_and_exclusions_are_tried(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = calls(models, monkeypatch, write_keys="a-key-for-writing")
    assert {(-1, -1), (ITEMS, -1), (ITEMS, ITEMS)} == set(found)  # ITEMS is the row of the item that was tried


def test_a_service_without_writers_tries_nothing(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls(models, monkeypatch) == []
