"""What held-out queries a service shows, to whom, and that they are queries which it answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from espalier.bundle import Bundle
from espalier.checks.random_bundles import make_linear_bundle
from espalier.engines import open_engine
from espalier.manifest import Ranking
from espalier.tree import complete_tree
from service.http import console_routes
from service.http.console_routes import heldout_queries
from tests.service.running import Json, Running, bearer, problem, run
from tests.service.test_probe import HELD_OUT, exported

ADMIN, RETRIEVE = "admin-key-00000001", "retrieve-key-000001"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return exported(tmp_path_factory.mktemp("heldout"), np.random.default_rng(5))


@pytest.fixture(scope="module")
def running(bundle: Bundle) -> Iterator[Running]:
    with run(bundle.path.parents[1], lambda opened: open_engine(opened, "cpu")) as started:
        yield started


def shown(running: Running, **params: int) -> list[Json]:
    answer = running.client.get("/models/books/heldout", params=params)
    assert answer.status_code == 200, answer.text
    found: list[Json] = answer.json()["queries"]
    return found


def test_all_queries_come_with_what_they_should_find(running: Running, bundle: Bundle) -> None:
    table = bundle.heldout().to_pylist()
    assert len(table) == HELD_OUT
    wanted = [
        {
            "query": {"history": row["history"]},
            "relevant": row["relevant"],
            "recall": {m: row[f"recall@{m}"] for m in ("2", "5")},
        }
        for row in table
    ]
    assert shown(running, limit=1000) == wanted
    assert shown(running) == [wanted[i] for i in np.linspace(0, HELD_OUT - 1, 20).astype(int)]
    assert shown(running, limit=1) == [wanted[0]]


def test_they_are_queries_that_the_service_takes_and_finds_what_it_found_at_export(running: Running) -> None:
    for one in shown(running, limit=5):
        items = running.retrieve(queries=[one["query"]], m=5, beam_size=8)["results"][0]["items"]
        found = {item["id"] for item in items}
        assert len(found & set(one["relevant"])) / len(set(one["relevant"])) == pytest.approx(one["recall"]["5"])


def test_features_are_queries_too_and_unknown_relevant_items_are_left_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    features = [{"indices": [i], "values": [0.5]} for i in range(3)]
    kind = pa.struct({"indices": pa.list_(pa.int64()), "values": pa.list_(pa.float32())})
    relevant = [["item-1", "no-item"], ["no-item"], ["item-2"]]
    table = pa.table({"features": pa.array(features, kind), "relevant": pa.array(relevant)})
    ranking = Ranking(own="log_activation", gamma=1.0)
    make_linear_bundle(tmp_path, rng, complete_tree(rng.permutation(8), 2), ranking, heldout=table)
    with run(tmp_path, lambda opened: open_engine(opened, "cpu")) as running:
        found = running.client.get("/models/linear/heldout").json()["queries"]
        assert found == [
            {"query": {"features": features[0]}, "relevant": ["item-1"], "recall": {}},
            {"query": {"features": features[2]}, "relevant": ["item-2"], "recall": {}},
        ]
        body = {"model": "linear", "queries": [one["query"] for one in found]}
        assert running.client.post("/retrieve", json=body).status_code == 200


def test_the_list_ends_where_it_is_large(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = heldout_queries(bundle, 1000)
    monkeypatch.setattr(console_routes, "MAX_HELDOUT_BYTES", sum(map(len, whole[:3])))
    assert heldout_queries(bundle, 1000) == whole[:4]


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", str(1 << 64)])
def test_a_limit_outside_its_range_is_refused(running: Running, limit: str) -> None:
    answer = running.client.get("/models/books/heldout", params={"limit": limit})
    assert problem(answer)["status"] == 422
    assert problem(answer)["errors"][0]["field"] == "limit"


@pytest.mark.parametrize(
    ("name", "version", "status"), [("films", 1, 404), ("books", 2, 404), ("books", 0, 422), ("a%2Fb", 1, 404), ("books", 1 << 70, 422)]
)
def test_of_a_version_that_is_not_loaded_there_are_none(running: Running, name: str, version: int, status: int) -> None:
    assert problem(running.client.get(f"/models/{name}/heldout", params={"version": version}))["status"] == status


def test_they_are_private_where_there_are_keys(models: Path) -> None:
    with run(models, admin_keys=ADMIN, retrieve_keys=RETRIEVE) as running:
        path = "/models/books/heldout"
        assert problem(running.client.get(path))["status"] == 401
        assert problem(running.client.get(path, headers=bearer(RETRIEVE)))["status"] == 403
        assert running.client.get(path, headers=bearer(ADMIN)).status_code == 200
    with run(models, retrieve_keys=RETRIEVE) as running:
        refused = problem(running.client.get(path, headers=bearer(RETRIEVE)))
        assert (refused["status"], "ESPALIER_ADMIN_KEYS" in refused["detail"]) == (403, True)
    with run(models, write_keys="write-key-00000001") as running:
        assert problem(running.client.get(path))["status"] == 403
