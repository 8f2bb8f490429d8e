"""The router answers as the service that holds the whole bundle."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from benchmarks.random_bundles import graphs_of, make_bundle, query_graph, random_tree
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.scorer_weights import ScorerWeights
from espalier.live.journal import Journal
from espalier.live.operations import ItemBody, Operation
from espalier.shards.messages import decode_query
from service.errors import ShardsMissing
from service.live import journal_thread, placing
from service.live.catalogue_types import Delete, Put
from service.router.fleet import Fleet
from service.router.shard_search import ShardSearch, whole_of
from tests.rankers import add_ranker
from tests.service.router.cluster import Cluster, cluster, serve_shards, shard_folders
from tests.service.running import Json, bearer, ids, run
from tests.service.shards.cutting import LIMITS, cut, queries_of, whole_bundle
from tests.waiting import until


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


@pytest.mark.parametrize("number", [1e37, 3e38])
def test_a_vector_with_infinite_states_or_scores_is_refused_as_by_the_whole_bundle(tmp_path: Path, number: float) -> None:
    nodes = [helper.make_node("Mul", ["vector", "ten"], ["scaled"]), helper.make_node("Unsqueeze", ["scaled", "one"], ["query_state"])]
    query = query_graph(nodes, ["vector"], {"ten": np.array([10], np.float32), "one": np.array([1])}, 4)
    rng = np.random.default_rng(1)
    graphs = graphs_of(query, ScorerWeights(), 4, 4)
    whole = make_bundle(tmp_path / "models", rng, random_tree(rng, 3, 4), "vector", graphs=graphs, name="books", **LIMITS)
    usual, folders = asked(whole)[:2], shard_folders(whole, tmp_path / "shards", 2)
    body = {"queries": [*usual, {"vector": [number] * 4}]}
    with (
        run(tmp_path / "models", lambda bundle: open_engine(bundle, "cpu")) as service,
        cluster(tmp_path / "models", folders) as shards,
    ):
        expected, found = (running.client.post("/retrieve", json=body) for running in (service, shards))
        assert (found.status_code, found.json()) == (422, expected.json())
        assert "expected numbers whose scores are finite" in found.text
        assert shards.retrieve(queries=usual)["coverage"]["answered"] == 2


def test_the_stages_of_a_request_whose_calls_overlap_take_no_longer_than_the_request(tmp_path: Path) -> None:
    async def slow(_: bytes) -> None:
        await asyncio.sleep(0.1)

    whole = whole_bundle(tmp_path / "models")
    folders = shard_folders(whole, tmp_path / "shards", 2)
    with cluster(tmp_path / "models", folders) as shards:
        shards.transport.faults = dict.fromkeys(shards.transport.registries, slow)
        timing = shards.retrieve(queries=[{"history": []}] * 64, timeout_ms=30_000)["timing"]
        assert timing["batch"] == 64
        assert timing["search_ms"] >= 100
        assert sum(timing[f"{stage}_ms"] for stage in ("queue", "encode", "search", "serialise")) <= timing["total_ms"]


def test_the_beams_of_all_shards_count_in_the_limit_of_explained_nodes(tmp_path: Path) -> None:
    whole = whole_bundle(tmp_path / "models")
    body: Json = {"queries": [{"history": []}], "m": 1, "beam_size": 2, "explain": True, "explain_nodes": True}
    folders = shard_folders(whole, tmp_path / "shards", 3)
    with cluster(tmp_path / "models", folders, widen=1.0) as shards:
        levels = shards.retrieve(**body)["results"][0]["explain"]["levels"]
        nodes = sum(len(level["nodes"]) for level in levels)
    with cluster(tmp_path / "models", folders, widen=1.0, max_answer_values=2 * nodes + 1) as shards:  # no room for an id and a score
        assert shards.client.post("/retrieve", json=body).status_code == 422


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


# -- items come and go at the router while its shards know nothing of it --------------------------------------------------


KEY = "a-key-that-may-write"
EVENT: Json = {"indices": [1, 4], "values": [1.0, 2.0]}
FEATURES: Json = {"queries": [{"features": EVENT}], "m": 40, "beam_size": 64}


def put(shards: Cluster, item: str, **body: object) -> Json:
    answer = shards.client.request("PUT", f"/models/books/items/{item}", json=body, headers=bearer(KEY))
    assert answer.status_code in (200, 201), answer.text
    document: Json = answer.json()
    return document


@pytest.mark.parametrize("kind", ["linear", "forest"])
def test_items_are_put_and_deleted_at_the_router(tmp_path: Path, kind: str) -> None:
    whole = whole_bundle(tmp_path / "models", kind)
    with cluster(tmp_path / "models", shard_folders(whole, tmp_path / "shards", 2), write_keys=KEY, timeout_ms=5000) as shards:
        before = ids(shards.retrieve(**FEATURES)["results"][0])
        sequence = put(shards, "new", events=[EVENT])["sequence"]
        answer = shards.retrieve(**FEATURES, min_sequence=sequence, explain_items=["new"])
        assert set(ids(answer["results"][0])) == {*before, "new"}
        (explained,) = answer["results"][0]["explain"]["items"]
        assert explained["outcome"] == "returned"
        assert {entry["feature"] for entry in explained["features"]} == {"1", "4"}
        assert shards.client.request("DELETE", f"/models/books/items/{before[0]}", headers=bearer(KEY)).status_code == 200
        assert before[0] not in ids(shards.retrieve(**FEATURES)["results"][0])
        assert before[0] in ids(shards.retrieve(**FEATURES, live=False)["results"][0])


@contextmanager
def with_an_item(folder: Path, placing_s: float = 3.0) -> Iterator[Cluster]:
    """A router of two shards at which an item was put."""
    whole = whole_bundle(folder / "models", "linear")
    folders = shard_folders(whole, folder / "shards", 2)
    with cluster(folder / "models", folders, {"placing_s": placing_s}, write_keys=KEY, timeout_ms=2000) as shards:
        put(shards, "new", events=[EVENT])
        yield shards


def test_without_a_shard_nothing_is_placed_and_without_any_nothing_is_found(tmp_path: Path) -> None:
    with with_an_item(tmp_path) as shards:
        shards.transport.dead.add("http://shard-1-0")
        refused = shards.client.request("PUT", "/models/books/items/other", json={"events": [EVENT]}, headers=bearer(KEY))
        assert refused.status_code == 503
        assert "shard 1 of 2" in refused.json()["detail"]
        shards.transport.dead.add("http://shard-0-0")
        refused = shards.client.post("/retrieve", json=FEATURES)
        assert refused.status_code == 503, refused.text
        assert "coverage: got 0" in refused.json()["detail"]


def test_a_shard_that_hangs_holds_up_writes_for_seconds_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "PLACED_AT_ONCE", 16)
    with with_an_item(tmp_path, placing_s=0.5) as shards:
        asked_before = shards.asked("http://shard-0-0")
        shards.transport.hung.add("http://shard-1-0")
        catalogue = shards.app.state.service.registry.catalogue("books")
        puts = [Put(f"other-{i}", ItemBody(events=(EVENT,))) for i in range(40)]
        *refused, deleted = shards.client.runner.run(catalogue.bulk([*puts, Delete("new")]))
        assert {type(error) for error in refused} == {ShardsMissing}
        assert deleted.outcome == "deleted"
        assert shards.asked("http://shard-0-0") <= asked_before + 2, "all in one search, or the first beside the others"
        *_, (_, body, _) = shards.transport.sent
        assert 0 < decode_query(body).timeout_ms <= 500


def test_items_that_others_wrote_wait_for_a_shard_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their places are not stored: no process that served this version wrote them."""
    monkeypatch.setattr(journal_thread, "SHARDS_S", 0.2)
    with with_an_item(tmp_path, placing_s=0.2) as shards:
        shards.transport.hung.add("http://shard-1-0")
        with Journal(tmp_path / "models" / "books" / "live.db").writing() as transaction:
            transaction.append(Operation(0, "late", "put", ItemBody(events=(EVENT,))))
        until(lambda: shards.metric("espalier_live_lag") == 1)
        assert shards.client.request("DELETE", "/models/books/items/new", headers=bearer(KEY)).status_code == 202
        shards.transport.heal()
        until(lambda: "late" in ids(shards.retrieve(**FEATURES)["results"][0]))
        assert "new" not in ids(shards.retrieve(**FEATURES)["results"][0])
        until(lambda: shards.metric("espalier_live_lag") == 0)
        assert put(shards, "late", events=[EVENT])["outcome"] == "unchanged"


# -- versions wait for their shards, are served when all are there, and never meet in one answer --------------------------


QUERY: Json = {"queries": [{"history": ["item-1"]}], "m": 40, "beam_size": 64}


@contextmanager
def served(folder: Path, shards: Cluster, address: str) -> Iterator[None]:
    """Another replica, which serves a folder of shards."""
    registry = shards.transport.registries[address] = serve_shards(folder)
    yield
    asyncio.run(registry.drain(1.0))


def test_a_version_waits_until_every_shard_is_there(tmp_path: Path) -> None:
    whole = whole_bundle(tmp_path / "models")
    folders = shard_folders(whole, tmp_path / "shards", 2)
    with cluster(tmp_path / "models", {"shard-0-0": folders["shard-0-0"]}, ready=False) as shards:
        answer = shards.client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["reasons"] == ["books version 1: loading: waiting for shard 1 of 2"]
        until(lambda: shards.metric("espalier_router_replicas") == 1)
        assert shards.client.post("/retrieve", json=QUERY).status_code == 503
        with served(folders["shard-1-0"], shards, "http://late"):
            shards.transport.names["http://shard-0-0"] = ["http://shard-0-0", "http://late"]
            until(lambda: shards.client.get("/readyz").status_code == 200)
            assert shards.retrieve(**QUERY)["coverage"]["answered"] == 2


def test_shards_of_another_bundle_do_not_count(tmp_path: Path) -> None:
    whole_bundle(tmp_path / "models")
    other = whole_bundle(tmp_path / "elsewhere", seed=9)
    with cluster(tmp_path / "models", shard_folders(other, tmp_path / "shards", 2), ready=False) as shards:
        (reason,) = shards.client.get("/readyz").json()["reasons"]
        assert "digest differs" in reason


def test_the_next_version_serves_when_its_shards_do_and_no_answer_mixes_two(tmp_path: Path) -> None:
    first = whole_bundle(tmp_path / "models", version=1)
    second = whole_bundle(tmp_path / "published", version=2, seed=6)
    cut(first, tmp_path / "shards", 2)
    with cluster(tmp_path / "models", {"all": tmp_path / "shards"}, of_shards={"poll_s": 0.1}, poll_s=0.1) as shards:
        expected = {1: shards.retrieve(**QUERY)["results"]}
        found: list[Json] = []
        publish(second, tmp_path / "models")
        until(lambda: "waiting" in str(shards.client.get("/models").json()))
        assert shards.retrieve(**QUERY)["version"] == 1
        cut(second, tmp_path / "hidden", 2)
        for index in ("0", "1"):
            shutil.move(tmp_path / "hidden" / index / "2", tmp_path / "shards" / index / "2")
            found.append(shards.retrieve(**QUERY))

        def is_new() -> bool:
            found.append(shards.retrieve(**QUERY))
            return bool(found[-1]["version"] == 2)

        until(is_new)
        expected[2] = found[-1]["results"]
        assert expected[1] != expected[2]
        assert all(answer["results"] == expected[answer["version"]] for answer in found)
        assert all(answer["coverage"]["items"] == 1 for answer in found)
        assert shards.metric("espalier_router_mixed_total") == 0


def test_a_router_over_a_folder_of_shards_says_so(tmp_path: Path) -> None:
    cut(whole_bundle(tmp_path / "models"), tmp_path / "shards", 2)
    with cluster(tmp_path / "shards", {"all": tmp_path / "shards"}, ready=False) as shards:
        until(lambda: "shard 0 of 2; a router opens the whole bundle, books" in shards.client.get("/models").text)


def test_a_version_that_is_cut_into_another_number_is_opened_anew_once_all_of_it_is_there(tmp_path: Path) -> None:
    """Until then the metric is of the layout that is searched."""
    whole = whole_bundle(tmp_path / "models")
    cut(whole, tmp_path / "three", 3)
    shutil.move(tmp_path / "three" / "2", tmp_path / "aside")
    with cluster(tmp_path / "models", shard_folders(whole, tmp_path / "shards", 2)) as shards:

        def up() -> dict[str, float]:
            samples = shards.app.state.service.metrics.samples()
            return {labels["shard"]: float(value) for name, labels, value in samples if name == "espalier_router_replicas"}

        before = shards.retrieve(**QUERY)
        with served(tmp_path / "three", shards, "http://three"):
            shards.transport.names["http://shard-0-0"] = ["http://three"]
            until(lambda: up() == {"0": 0, "1": 1})
            assert shards.transport.forgotten == ["http://shard-0-0"]
        shutil.move(tmp_path / "aside", tmp_path / "three" / "2")
        with served(tmp_path / "three", shards, "http://all"):
            shards.transport.names["http://shard-0-0"] = shards.transport.names["http://shard-1-0"] = ["http://all"]
            until(lambda: shards.client.post("/retrieve", json=QUERY).json().get("coverage", {}).get("shards") == 3)
            after = shards.retrieve(**QUERY)
            assert after["coverage"] == {"items": 1.0, "shards": 3, "answered": 3, "missing": []}
            assert after["version"] == before["version"]
            assert shards.client.get("/readyz").status_code == 200
            until(lambda: up() == {"0": 1, "1": 1, "2": 1})


@pytest.mark.parametrize(("kind", "query"), [("product", {"history": []}), ("forest", {"features": {"indices": [1], "values": [1.0]}})])
def test_the_layout_of_a_version_is_the_one_that_its_engine_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, query: Json
) -> None:
    whole = whole_bundle(tmp_path / "models", kind)
    cut(whole, tmp_path / "three", 3)
    three = serve_shards(tmp_path / "three")

    opened = ShardSearch.__init__

    def cut_anew(search: ShardSearch, bundle: Bundle, fleet: Fleet) -> None:
        transport: Any = fleet.transport
        transport.registries["http://three"] = three
        transport.names |= {f"http://shard-{index}-0": ["http://three"] for index in range(2)}
        until(lambda: fleet.count_of(whole_of(bundle)) == 3)
        opened(search, bundle, fleet)

    monkeypatch.setattr(ShardSearch, "__init__", cut_anew)
    with cluster(tmp_path / "models", shard_folders(whole, tmp_path / "shards", 2), poll_s=60.0) as shards:
        loaded = shards.app.state.service.registry.entries["books"].loaded
        assert loaded.engine.tree_search.count == 3
        assert shards.retrieve(queries=[query])["coverage"]["shards"] == 3
        asyncio.run(three.drain(1.0))


def publish(bundle: Bundle, models: Path) -> None:
    shutil.copytree(bundle.path, models / "books" / ".new")
    (models / "books" / ".new").rename(models / "books" / str(bundle.manifest.version))
