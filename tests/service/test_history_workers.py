"""The last 24 hours are the same from every worker, and outlive a worker that is killed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.checks.random_bundles import make_bundle
from espalier.tree import complete_tree
from service.watch import unknown_ids
from service.watch.history import History
from tests.service.processes import Service, service
from tests.waiting import until

pytestmark = pytest.mark.slow


def asked(running: Service, item_id: str, requests: int = 40) -> None:
    """Ask for an unknown id, of all workers: eight at a time."""

    def ask() -> None:
        for _ in range(requests // 8):
            assert running.request("POST", "/retrieve", {"queries": [{"history": [item_id]}]})[0] == 200

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def healths(running: Service) -> list[dict[str, Any]]:
    """What is answered to some requests, by any worker."""
    return [running.request("GET", "/models/books/health")[1] for _ in range(8)]


def counts(health: dict[str, Any]) -> dict[str, int]:
    return {one["id"]: one["count"] for one in health["unknown_ids"]}


def published(folder: Path) -> dict[str, int]:
    """What the workers have written for each other."""
    [history] = folder.glob("espalier-*/history")
    return dict(unknown_ids.most_asked(unknown_ids.summed(unknown_ids.read(history)), "books", time.time()))


def test_a_worker_that_is_killed_takes_no_history_with_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    make_bundle(tmp_path / "models", rng, complete_tree(rng.permutation(32), 2), name="books")
    with service(tmp_path / "models", 2) as running:
        asked(running, "lost")
        until(lambda: published(tmp_path) == {"lost": 40}, "each worker has told the others")
        assert [counts(health) for health in healths(running)] == [{"lost": 40}] * 8
        since = {health["since"] for health in healths(running)}
        running.replace_workers()  # whichever of them is the recorder
        asked(running, "gone")
        until(lambda: published(tmp_path) == {"gone": 40, "lost": 40}, "each worker has told the others")
        assert [counts(health) for health in healths(running)] == [{"gone": 40, "lost": 40}] * 8
        until(lambda: all("ended and w" in str(health["events"]) for health in healths(running)), "it is an event")
        found = healths(running)
        assert {health["since"] for health in found} == since
        assert len(since) == 1
        [written] = tmp_path.glob("espalier-*/history/history_books.json")
        requests = History.from_json(written.read_bytes()).columns()["requests"]
        assert requests[0] == 0
        assert (np.diff(requests) >= 0).all()  # what a killed worker has counted stays
        assert requests[-1] >= 40
