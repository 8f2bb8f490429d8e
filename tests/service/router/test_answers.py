"""The router answers as the service that holds the whole bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.engines import open_engine
from tests.rankers import add_ranker
from tests.service.router.cluster import cluster, shard_folders
from tests.service.running import Json, run
from tests.service.shards.cutting import queries_of, whole_bundle


def plain(document: Json) -> Json:
    """An answer without timing, coverage and the engine's name."""
    return {name: value for name, value in document.items() if name not in ("timing", "coverage", "engine")}


def asked(whole: Any) -> list[Json]:
    """Queries of the bundle's kind as JSON."""
    queries, items = queries_of(whole, 6), whole.items
    if whole.manifest.query.kind == "history":
        return [{"history": items.ids_of(row[row >= 0])} for row in queries.array]
    if whole.manifest.query.kind == "vector":
        return [{"vector": row.tolist()} for row in queries.array]
    rows = queries.features
    spans = zip(rows.indptr[:-1], rows.indptr[1:], strict=True)
    return [{"features": {"indices": rows.indices[a:b].tolist(), "values": rows.values[a:b].tolist()}} for a, b in spans]


@pytest.mark.parametrize("kind", ["product memory", "vector", "forest"])
def test_one_shard_answers_as_the_whole_bundle(tmp_path: Path, kind: str) -> None:
    whole = whole_bundle(tmp_path / "models", kind)
    queries = asked(whole)
    folders = shard_folders(whole, tmp_path / "shards", 1)
    with (
        run(tmp_path / "models", lambda bundle: open_engine(bundle, "cpu")) as service,
        cluster(tmp_path / "models", folders) as shards,
    ):
        for body in ({}, {"m": 40}, {"beam_size": 1, "m": 3}, {"explain": True}, {"explain_items": whole.items.ids_of(np.array([0, 3]))}):
            expected, found = (running.retrieve(queries=queries, **body) for running in (service, shards))
            assert plain(found) == plain(expected)
            assert found["coverage"] == {"items": 1.0, "shards": 1, "answered": 1, "missing": []}


def test_a_request_keeps_its_id_and_its_trace_on_its_way_to_shards(tmp_path: Path) -> None:
    whole = whole_bundle(tmp_path / "models")
    trace = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    with cluster(tmp_path / "models", shard_folders(whole, tmp_path / "shards", 2)) as shards:
        shards.transport.sent.clear()
        for headers in ({"X-Request-Id": "r-1", "traceparent": trace}, {"X-Request-Id": "r-2"}):
            answer = shards.client.post("/retrieve", json={"queries": [{"history": []}]}, headers=headers)
            assert answer.status_code == 200
        sent = [headers for *_, headers in shards.transport.sent]
        assert [headers["X-Request-Id"] for headers in sent] == ["r-1", "r-1", "r-2", "r-2"]
        assert [headers["traceparent"] for headers in sent[:2]] == [trace, trace]
        assert sent[2]["traceparent"] == sent[3]["traceparent"] != trace


def test_a_ranker_orders_what_shards_found(tmp_path: Path) -> None:
    whole = whole_bundle(tmp_path / "models")
    ranked = add_ranker(whole, {"retrieval.score": -1.0}, depth=8, max_depth=40)
    folders = shard_folders(ranked, tmp_path / "shards", 3)
    body = {"queries": asked(ranked), "rerank": True, "m": 20, "beam_size": 64, "version": 2}
    with (
        run(tmp_path / "models", lambda bundle: open_engine(bundle, "cpu")) as service,
        cluster(tmp_path / "models", folders) as shards,
    ):
        expected, found = service.retrieve(**body), shards.retrieve(**body)
        assert plain(found)["results"] == plain(expected)["results"]
        scores = [item["rerank_score"] for item in found["results"][0]["items"][:8]]
        assert scores == sorted(scores, reverse=True)
