"""Items come and go at the router while its shards know nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.router.cluster import Cluster, cluster, shard_folders
from tests.service.running import Json, bearer, ids
from tests.service.shards.cutting import whole_bundle

KEY = "a-key-that-may-write"
EVENT: Json = {"indices": [1, 4], "values": [1.0, 2.0]}
QUERY: Json = {"queries": [{"features": EVENT}], "m": 40, "beam_size": 64}


def put(shards: Cluster, item: str, **body: object) -> Json:
    answer = shards.client.request("PUT", f"/models/books/items/{item}", json=body, headers=bearer(KEY))
    assert answer.status_code in (200, 201), answer.text
    document: Json = answer.json()
    return document


@pytest.mark.parametrize("kind", ["linear", "forest"])
def test_items_are_put_and_deleted_at_the_router(tmp_path: Path, kind: str) -> None:
    whole = whole_bundle(tmp_path / "models", kind)
    with cluster(tmp_path / "models", shard_folders(whole, tmp_path / "shards", 2), write_keys=KEY, timeout_ms=5000) as shards:
        before = ids(shards.retrieve(**QUERY)["results"][0])
        sequence = put(shards, "new", events=[EVENT])["sequence"]
        answer = shards.retrieve(**QUERY, min_sequence=sequence, explain_items=["new"])
        assert set(ids(answer["results"][0])) == {*before, "new"}
        (explained,) = answer["results"][0]["explain"]["items"]
        assert explained["outcome"] == "returned"
        assert {entry["feature"] for entry in explained["features"]} == {"1", "4"}
        assert shards.client.request("DELETE", f"/models/books/items/{before[0]}", headers=bearer(KEY)).status_code == 200
        assert before[0] not in ids(shards.retrieve(**QUERY)["results"][0])
        assert before[0] in ids(shards.retrieve(**QUERY, live=False)["results"][0])


def test_without_a_shard_nothing_is_placed_and_without_any_nothing_is_found(tmp_path: Path) -> None:
    whole = whole_bundle(tmp_path / "models", "linear")
    with cluster(tmp_path / "models", shard_folders(whole, tmp_path / "shards", 2), write_keys=KEY, timeout_ms=2000) as shards:
        put(shards, "new", events=[EVENT])
        shards.transport.dead.add("http://shard-1-0")
        refused = shards.client.request("PUT", "/models/books/items/other", json={"events": [EVENT]}, headers=bearer(KEY))
        assert refused.status_code == 503
        assert "shard 1 of 2" in refused.json()["detail"]
        shards.transport.dead.add("http://shard-0-0")
        refused = shards.client.post("/retrieve", json=QUERY)
        assert refused.status_code == 503, refused.text
        assert "coverage: got 0" in refused.json()["detail"]
