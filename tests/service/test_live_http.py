"""The live catalogue over a socket: an item that was put is found by the next request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.bundle import Bundle
from espalier.checks.random_bundles import make_bundle
from espalier.engines import open_engine
from espalier.search import Engine
from espalier.tree import complete_tree
from tests.service.listening import Listening, listening, post, retrieval
from tests.service.running import ITEMS, LIMITS

KEY = "a-key-that-may-write"
EVENTS = [["item-1", "item-2"], ["item-3"]]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    make_bundle(tmp_path, rng, complete_tree(rng.permutation(ITEMS), 2), name="books", kind="product", **LIMITS)
    return tmp_path


def asked(running: Listening, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    content = b"" if body is None else json.dumps(body).encode()
    request = post(path, content, f"Authorization: Bearer {KEY}").replace(b"POST", method.encode(), 1)
    reply = running.ask(request)
    return reply.status, reply.document


def found(running: Listening, **body: Any) -> list[str]:
    answer = running.ask(retrieval(queries=[{"history": EVENTS[0]}], m=40, beam_size=64, **body)).document
    return [item["id"] for item in answer["results"][0]["items"]]


def test_an_item_is_found_by_the_request_after_its_put(models: Path) -> None:
    def opened(bundle: Bundle) -> Engine:
        return open_engine(bundle, "cpu")

    with listening(models, opened, write_keys=KEY) as running:
        before = found(running)
        status, outcome = asked(running, "PUT", "/models/books/items/new%2Fone", {"events": EVENTS, "fields": {"title": "New"}})
        assert (status, outcome["sequence"], outcome["outcome"], outcome["visible"]) == (201, 1, "inserted", True)
        assert outcome["placed"]["by"] == "events"
        assert sorted(found(running)) == sorted([*before, "new/one"])
        assert asked(running, "GET", "/models/books/items/new%2Fone")[1]["fields"] == {"title": "New"}
        assert asked(running, "DELETE", "/models/books/items/new%2Fone")[0] == 200
        assert asked(running, "DELETE", "/models/books/items/item-5")[0] == 200
        assert found(running) == [item for item in before if item != "item-5"]
    with listening(models, opened) as running:
        assert found(running) == [item for item in before if item != "item-5"]
