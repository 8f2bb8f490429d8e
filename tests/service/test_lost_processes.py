"""Workers that are killed by what they load, or stopped: real processes, with a real engine."""

from __future__ import annotations

import http.client
import json
import os
from pathlib import Path

import numpy as np
import pytest

from espalier.checks.random_bundles import make_bundle
from espalier.tree import complete_tree
from tests.service.models.registry import add_version
from tests.service.processes import paused, service
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A models folder with version 1 of `books`."""
    rng = np.random.default_rng(0)
    make_bundle(tmp_path / "models", rng, complete_tree(rng.permutation(32), 2), name="books")
    return tmp_path / "models"


def test_a_load_that_kills_every_worker_is_taken_back_and_the_others_serve_on(models: Path) -> None:
    add_version(models, 2)
    serving = models / "books" / "serving.json"
    serving.write_text('{"generation": 1, "versions": [1, 2], "default": 2}')
    with service(models, 2, ("tests.service.deadly_service",), DEADLY="4") as running:
        until(lambda: _opened(running.log) == 2, "both workers serve", within_s=60)
        until(lambda: running.request("POST", "/models/books/load", {"version": 1, "default": False})[0] == 200, "and say so")
        add_version(models, 4)
        try:
            status, _ = running.request("POST", "/models/books/load", {"version": 4})
            assert status == 409  # by a worker that outlived the other one
        except (http.client.HTTPException, OSError):
            pass  # the worker that was asked was killed
        until(lambda: json.loads(serving.read_text())["versions"] == [1, 2], "what served before is what should", within_s=60)
        until(lambda: 2 < _opened(running.log) == 2 + _killed(running.log), "who was killed is replaced and serves", within_s=60)
        workers = running.workers()
        assert running.served()[0] == {2}
        assert running.request("POST", "/retrieve", {"queries": [{"history": []}], "version": 1})[0] == 200
        assert running.workers() == workers


def _opened(log: list[str]) -> int:
    """How many workers have opened all versions that served, so far."""
    return "".join(log).count("books version 1 is ready on")


def _killed(log: list[str]) -> int:
    return "".join(log).count("ended with exit code -9 and is replaced")


def test_a_stopped_worker_holds_up_no_removal_and_shows_nothing_removed_when_it_goes_on(models: Path) -> None:
    def remove(item_id: str) -> tuple[int, list[int]]:
        status, answer = running.request("PUT", f"/models/books/removed/{item_id}")
        return status, answer.get("behind", answer)

    with service(models, 2, ESPALIER_LOAD_TIMEOUT_S="5") as running:
        until(lambda: running.request("PUT", "/models/books/removed/item-0")[0] == 200, "both workers have begun")
        stopped = running.workers()[0]
        with paused(stopped):
            assert remove("item-1") == (202, [stopped])
            assert remove("item-2") == (202, [stopped])
            status, answer = running.request("PUT", "/models/books/removed", {"ids": [f"item-{i}" for i in range(4)]})
            assert (status, answer["behind"]) == (202, [stopped])
            assert {f"item-{i}" for i in range(4)}.isdisjoint(running.served(8)[1])
            assert running.request("DELETE", "/models/books/removed/item-0")[0] == 202
        shown = running.served()[1]  # from the first request on
        assert "item-0" in shown
        assert {"item-1", "item-2", "item-3"}.isdisjoint(shown)
        until(lambda: remove("item-4") == (200, []), "both follow again")
        assert os.listdir(models / "books").count("removed.json") == 1
