"""Several workers have one catalogue: what one of them has answered is seen by all, and no kill loses it."""

from __future__ import annotations

import http.client
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.checks.random_bundles import make_bundle
from espalier.tree import complete_tree
from tests.service.processes import Service, service
from tests.service.running import ITEMS, LIMITS
from tests.waiting import until

ALL = {"queries": [{"history": ["item-1"]}], "m": 40, "beam_size": 64}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    rng = np.random.default_rng(0)
    make_bundle(folder, rng, complete_tree(rng.permutation(ITEMS), 2), name="books", kind="product", **LIMITS)
    return folder


def asked(running: Service, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """A request on a connection of its own, and so of any worker."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {WRITE_KEY}"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


WRITE_KEY = "a-write-key-of-a-test"


def found(running: Service) -> set[str]:
    status, answer = running.request("POST", "/retrieve", ALL)
    assert status == 200, answer
    return {item["id"] for item in answer["results"][0]["items"]}


def put(running: Service, item_id: str) -> int:
    status, outcome = asked(running, "PUT", f"/models/books/items/{item_id}", {"events": [["item-1"]]})
    assert status == 201, outcome
    sequence: int = outcome["sequence"]
    return sequence


def test_what_is_answered_is_seen_by_every_worker_at_once(models: Path) -> None:
    with service(models, 2, ESPALIER_WRITE_KEYS=WRITE_KEY) as running:
        items: set[str] = set()
        for i in range(20):
            assert put(running, f"new-{i}") == i + 1
            items.add(f"new-{i}")
            for _ in range(4):
                assert items <= found(running)
        for i in range(0, 20, 2):
            assert asked(running, "DELETE", f"/models/books/items/new-{i}")[0] == 200
            assert not {f"new-{i}"} & (found(running) | found(running))


def test_a_killed_worker_loses_nothing_and_its_replacement_has_everything(models: Path) -> None:
    with service(models, 2, ESPALIER_WRITE_KEYS=WRITE_KEY) as running:
        put(running, "first")
        os.kill(running.workers()[0], signal.SIGKILL)
        put(running, "during")
        until(lambda: "".join(running.log).count("is ready on") == 3, "the replacement is ready")
        put(running, "after")
        for _ in range(8):
            assert {"first", "during", "after"} <= found(running)
        for pid in [*running.workers(), running.process.pid]:
            os.kill(pid, signal.SIGKILL)
    with service(models, 1, ESPALIER_WRITE_KEYS=WRITE_KEY) as running:
        assert {"first", "during", "after"} <= found(running)
        assert put(running, "last") == 4
