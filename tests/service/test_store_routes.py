"""What HTTP says of a service whose models come from a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from espalier.store.models import set_default
from espalier.store.objects import Objects
from espalier.store.publishing import publish
from tests.service.running import Running, bearer, problem, run
from tests.waiting import until

KEY = "an-admin-key-of-a-test"


def model(running: Running) -> dict[str, Any]:
    found: dict[str, Any] = running.client.get("/models/books").json()
    return found


def test_models_and_readyz_say_what_is_missing(versions: Path, tmp_path: Path) -> None:
    store = Objects(f"file://{tmp_path}/store", create=True)
    with run(tmp_path / "cache", store=store.url, store_poll_s=0.05, admin_keys=(KEY,)) as running:
        until(lambda: running.client.get("/readyz").json()["reasons"] == ["the store has no model for this service"])
        refused = running.client.post("/retrieve", json={"queries": [{"history": []}]})
        assert (refused.status_code, "from the store" in problem(refused)["detail"]) == (503, True)
        assert running.client.get("/models").json()["models"] == []
        publish(store, [versions / "books" / "1", versions / "books" / "2"])
        until(lambda: running.client.get("/readyz").status_code == 200)
        until(lambda: running.retrieve(queries=[{"history": ["item-3"]}])["version"] == 2)  # version 1 may come first
        assert model(running)["store"] is None
        set_default(store, "books", 1)
        until(lambda: model(running)["version"] == 1)
        missing = b'{"generation": 9, "versions": [7], "default": 7}'
        store.write("models/books/serving.json", iter([missing]), len(missing))
        lacking = {"version": 7, "came": 0, "size": 0, "reason": "the store: no version 7 of 'books'", "damaged": True}
        until(lambda: model(running)["store"] == lacking)
        assert running.client.get("/readyz").status_code == 200
        answer = running.client.post("/models/books/default", json={"version": 2}, headers=bearer(KEY))
        assert (answer.status_code, "follows the store" in problem(answer)["detail"]) == (409, True)
        answer = running.client.request("PUT", "/models/books/removed", json={"ids": ["item-3"]}, headers=bearer(KEY))
        assert answer.status_code == 200  # these are the host's own
