"""The recall probe: it says what a version finds of what it found when it was exported, and disturbs nobody."""

from __future__ import annotations

import asyncio
import gc
import re
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest

from espalier.bundle import Bundle
from espalier.bundle_writer import write_bundle
from espalier.checks.heldout import read_heldout
from espalier.checks.random_bundles import make_bundle, random_memory
from espalier.engines import open_engine
from espalier.errors import BundleCorrupt
from espalier.queries import QueryBatch
from espalier.search import SearchParams, SearchResult
from espalier.tree import complete_tree
from service.batching.batcher import Batcher
from service.batching.parts import Answer
from service.live.catalogues import LiveCatalogues
from service.models import probe
from service.models.follower import Follower
from service.models.loading import EngineSource
from service.models.probe import Probe, Replay
from service.models.worker_progress import Workers
from service.settings import Settings
from service.watch import process_usage
from service.watch.metrics import Metrics
from tests.service.damaged_models import DAMAGES, content_of, damaged, draft_of
from tests.service.running import Json, Running, run
from training.evaluate import with_recall
from training.golden import golden_of_histories

HELD_OUT, GOLDEN, MS = 24, 6, [2, 5]
ROUND = HELD_OUT + GOLDEN
KEY = "an-admin-key-of-tests"


def exported(
    folder: Path, rng: np.random.Generator, kind: Literal["history", "vector"] = "history", said: bool = True, remembers: bool = False
) -> Bundle:
    """A bundle as training would export it: golden queries answered by the reference, held-out queries that say their recall if `said`.

    What is relevant to a query is half of what the model finds and as many others, so that recall is neither 0 nor 1.
    """
    tree = complete_tree(rng.permutation(64), 2)
    memory = random_memory(rng, 64, 3, integer=False) if remembers else None
    bare = make_bundle(folder / "bare", rng, tree, kind=kind, integer=False, name="books", memory=memory, beam_size=8, m=5)
    engine = open_engine(bare, "cpu")
    if kind == "history":
        histories = [rng.integers(0, 64, rng.integers(1, 6)) for _ in range(HELD_OUT)]
        column: Any = pa.array([[f"item-{i}" for i in row] for row in histories], pa.list_(pa.string()))
        golden = golden_of_histories(bare, histories[:GOLDEN], [8] * GOLDEN, [5] * GOLDEN)
    else:
        column = pa.array(rng.normal(size=(HELD_OUT, 4)).astype(np.float32).tolist(), pa.list_(pa.float32()))
        golden = bare.golden()
    unknown = pa.table({kind: column, "relevant": pa.array([["item-0"]] * HELD_OUT)})
    first = write_bundle(folder / "first" / "books" / "1", draft_of(bare, 1), replace(content_of(bare), heldout=unknown))
    queries = read_heldout(first).queries
    found_BM = engine.search(queries, SearchParams.uniform(HELD_OUT, 8, max(MS), None)).item_rows_BM
    relevant = [[f"item-{i}" for i in {*row[row >= 0][::2].tolist(), *rng.integers(0, 64, 3).tolist()}] for row in found_BM]
    content = replace(content_of(bare), golden=golden, heldout=pa.table({kind: column, "relevant": pa.array(relevant)}))
    second = write_bundle(folder / "second" / "books" / "1", draft_of(bare, 1), content)
    table = with_recall(second, engine, MS) if said else second.heldout()
    return write_bundle(folder / "models" / "books" / "1", draft_of(bare, 1), replace(content, heldout=table))


@pytest.fixture(scope="module")
def exported_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder. Not to be written to."""
    return exported(tmp_path_factory.mktemp("exported"), np.random.default_rng(5)).path.parents[1]


@pytest.fixture
def bundle(exported_once: Path, tmp_path: Path) -> Bundle:
    """Of a models folder of its own."""
    return Bundle.open(shutil.copytree(exported_once, tmp_path / "models") / "books" / "1")


class Spoilt:
    """The CPU engine, until it is told to return the next item of the table for each that it has found, or to score lower."""

    def __init__(self, bundle: Bundle) -> None:
        self._engine = open_engine(bundle, "cpu")
        self.name, self.rounding = self._engine.name, self._engine.rounding
        self.warm_up, self.prepare, self.close = self._engine.warm_up, self._engine.prepare, self._engine.close
        self.items = len(bundle.items)
        self.spoil: Callable[[SearchResult], SearchResult] = lambda result: result

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        return self.spoil(self._engine.search(queries, params))


@pytest.fixture
def engines() -> list[Spoilt]:
    return []


@pytest.fixture
def running(bundle: Bundle, engines: list[Spoilt]) -> Iterator[Running]:
    def open_model(opened: Bundle) -> Spoilt:
        engines.append(Spoilt(opened))
        return engines[-1]

    with run(bundle.path.parents[1], open_model, admin_keys=KEY) as found:
        yield found


def prober(running: Running) -> Probe:
    service = running.app.state.service
    return Probe(service.registry, service.metrics, per_s=1000.0)


def ask(running: Running, asking: Probe, times: int) -> None:
    """Let the probe ask each version that many queries, one after the other."""

    async def asked() -> None:
        for _ in range(times):
            asking.forget(asking.ready())
            await asyncio.gather(*(asking.query(key) for key in asking.ready()))

    running.client.runner.run(asked())


def admin(running: Running, change: str, body: Json) -> None:
    answer = running.client.post(f"/models/books/{change}", json=body, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200, answer.text


def value(running: Running, metric: str, **labels: Any) -> float | None:
    """Of one series in /metrics, None where it is not there."""
    pattern = ",".join(f'{name}="{text}"' for name, text in sorted(labels.items()))
    found = re.search(rf"^{metric}(?:\{{{pattern}\}})? (\S+)$", running.client.get("/metrics").text, re.MULTILINE)
    return None if found is None else float(found[1])


def recall(running: Running, version: int = 1, metric: str = "recall") -> dict[int, float]:
    found = {m: value(running, f"espalier_probe_{metric}", model="books", version=version, m=m) for m in MS}
    return {m: number for m, number in found.items() if number is not None}


def test_a_good_model_finds_what_it_found_when_it_was_exported(running: Running, bundle: Bundle) -> None:
    asking = prober(running)
    ask(running, asking, 2 * ROUND)
    expected = {m: recall_B.mean() for m, recall_B in read_heldout(bundle).recall_by_m.items()}
    assert 0.1 < expected[2] < expected[5] < 0.9
    assert recall(running) == pytest.approx(expected, abs=1e-12)
    assert recall(running, metric="expected_recall") == pytest.approx(expected, abs=1e-12)
    drift = value(running, "espalier_probe_drift", model="books", version=1)
    assert drift is not None
    assert drift < 1e-5
    assert value(running, "espalier_probe_queries_total", model="books", version=1, outcome="answered") == 2 * ROUND


def test_recall_does_not_depend_on_which_queries_have_been_answered_yet(
    running: Running, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MIN_ANSWERS", 1)
    asking = prober(running)
    expected = {m: recall_B.mean() for m, recall_B in read_heldout(bundle).recall_by_m.items()}
    seen = []
    for _ in range(ROUND):
        ask(running, asking, 1)
        seen.append(recall(running))
    assert {} in seen[:1] or seen[0] == pytest.approx(expected)  # golden queries say nothing of recall
    assert all(found == pytest.approx(expected) for found in seen[1:])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_version_beside_the_default_is_seen(running: Running, bundle: Bundle, tmp_path: Path, damage: str) -> None:
    asking = prober(running)
    damaged(bundle, tmp_path / "models", 2, damage)
    admin(running, "load", {"version": 2, "default": False})  # its checksums and golden queries are right
    ask(running, asking, ROUND)
    expected = recall(running, metric="expected_recall")
    assert recall(running, 2, "expected_recall") == expected
    assert max(expected[m] - found for m, found in recall(running, 2).items()) > 0.02
    assert recall(running) == pytest.approx(expected)


def test_an_engine_that_returns_other_items_since_it_was_loaded_is_seen(running: Running, engines: list[Spoilt], caplog: Any) -> None:
    caplog.set_level("INFO")
    asking = prober(running)
    ask(running, asking, ROUND)
    before = recall(running)
    items = engines[0].items
    engines[0].spoil = lambda result: replace(result, item_rows_BM=(result.item_rows_BM + 1) % items)
    ask(running, asking, ROUND)
    assert recall(running)[5] < before[5] - 0.02
    assert [record.levelname for record in caplog.records if "recall of the probe" in record.message] == ["ERROR"]
    engines[0].spoil = lambda result: result
    ask(running, asking, ROUND)
    assert recall(running) == pytest.approx(before)
    assert [record.levelname for record in caplog.records if "recall of the probe" in record.message] == ["ERROR", "INFO"]


def test_an_engine_that_scores_differently_since_it_was_loaded_is_seen(running: Running, engines: list[Spoilt]) -> None:
    asking = prober(running)
    engines[0].spoil = lambda result: replace(result, scores_BM=result.scores_BM - np.float32(0.25))
    ask(running, asking, ROUND)
    assert value(running, "espalier_probe_drift", model="books", version=1) == pytest.approx(0.25, abs=1e-4)
    assert recall(running) == pytest.approx(recall(running, metric="expected_recall"))  # the order is as it was


def test_missing_items_count_as_scores_of_zero(running: Running, engines: list[Spoilt]) -> None:
    asking = prober(running)
    engines[0].spoil = lambda result: replace(
        result, item_rows_BM=result.item_rows_BM[:, :0], scores_BM=result.scores_BM[:, :0], count_B=result.count_B * 0
    )
    ask(running, asking, ROUND)
    drift = value(running, "espalier_probe_drift", model="books", version=1)
    assert drift is not None
    assert drift > 0.05
    assert recall(running) == {2: 0, 5: 0}


def test_an_unloaded_version_says_nothing_any_more(running: Running, bundle: Bundle, tmp_path: Path) -> None:
    asking = prober(running)
    damaged(bundle, tmp_path / "models", 2, "noise on all rows")
    admin(running, "load", {"version": 2, "default": False})
    ask(running, asking, ROUND)
    admin(running, "unload", {"version": 2})
    ask(running, asking, 1)
    assert (recall(running, 2), recall(running, 2, "expected_recall")) == ({}, {})
    assert value(running, "espalier_probe_drift", model="books", version=2) is None
    assert list(recall(running)) == MS


def test_versions_that_come_and_go_leave_no_series(running: Running, bundle: Bundle, tmp_path: Path) -> None:
    def series() -> set[str]:
        return {line.rpartition(" ")[0] for line in running.client.get("/metrics").text.splitlines() if not line.startswith("#")}

    asking = prober(running)
    ask(running, asking, ROUND)
    damaged(bundle, tmp_path / "models", 2, "noise on all rows")
    admin(running, "load", {"version": 2, "default": False})
    ask(running, asking, ROUND)
    before = {name for name in series() if 'version="2"' not in name}
    assert len(series() - before) == 7  # info, two recalls, as many expected ones, drift, answered probe queries
    admin(running, "unload", {"version": 2})
    ask(running, asking, 1)
    assert series() == before
    (tmp_path / "models" / "books" / "3").mkdir()
    (tmp_path / "models" / "books" / "3" / "manifest.json").write_text("{}")
    answer = running.client.post("/models/books/load", json={"version": 3}, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 409
    assert series() == before


def test_an_answer_that_comes_after_its_version_has_gone_leaves_no_series(
    running: Running, engines: list[Spoilt], bundle: Bundle, tmp_path: Path
) -> None:
    asking, registry = prober(running), running.app.state.service.registry
    damaged(bundle, tmp_path / "models", 2, "noise on all rows")
    admin(running, "load", {"version": 2, "default": False})
    searching, let_go = threading.Event(), threading.Event()

    def slow(result: SearchResult) -> SearchResult:
        searching.set()
        assert let_go.wait(10)
        return result

    async def late() -> None:
        task = asking.query(("books", 2))
        await asyncio.to_thread(searching.wait, 10)
        await registry.changes.unload("books", 2)
        asking.forget(asking.ready())
        assert not task.done()
        let_go.set()
        await task
        asking.forget(asking.ready())

    engines[1].spoil = slow
    running.client.runner.run(late())
    assert 'version="2"' not in running.client.get("/metrics").text


def test_its_queries_are_no_requests(running: Running) -> None:
    ask(running, prober(running), ROUND)
    text = running.client.get("/metrics").text
    assert not re.findall(r"^espalier_(?:requests_total|request_seconds_count|query_seconds_count).*[1-9]", text, re.MULTILINE)
    assert (value(running, "espalier_engine_seconds_total", model="books") or 0) > 0


def test_without_what_recall_was_at_export_it_says_what_it_is(tmp_path: Path) -> None:
    with run(exported(tmp_path, np.random.default_rng(6), said=False).path.parents[1], Spoilt) as running:
        ask(running, prober(running), ROUND)
        assert recall(running, metric="expected_recall") == {}
        found = [value(running, "espalier_probe_recall", model="books", version=1, m=m) for m in (10, 50, 100)]
        assert all(number is not None and 0 < number <= 1 for number in found)


def test_a_model_of_vectors_is_probed_alike(tmp_path: Path) -> None:
    with run(exported(tmp_path, np.random.default_rng(7), kind="vector").path.parents[1], Spoilt) as running:
        ask(running, prober(running), ROUND)
        assert recall(running) == pytest.approx(recall(running, metric="expected_recall"))
        assert 0 < recall(running)[5] < 1


def test_a_failing_engine_is_counted_and_asked_again(running: Running, engines: list[Spoilt]) -> None:
    asking = prober(running)

    def fail(result: SearchResult) -> SearchResult:
        raise RuntimeError("out of order")

    engines[0].spoil = fail
    ask(running, asking, 3)
    assert value(running, "espalier_probe_queries_total", model="books", version=1, outcome="failed") == 3
    engines[0].spoil = lambda result: result
    ask(running, asking, ROUND)
    assert recall(running) == pytest.approx(recall(running, metric="expected_recall"))


def test_a_probe_that_waits_asks_nothing_more_and_gives_up(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PATIENCE_S", 0.05)
    with run(models) as running:
        asking = prober(running)
        ask(running, asking, 1)
        engine = running.engines["books"]
        asked = len(engine.calls)
        engine.go.clear()

        async def wait() -> None:
            first = [asking.query(key) for key in asking.ready()]
            again = [asking.query(key) for key in asking.ready()]
            assert set(first) == set(again)  # nobody is asked twice at a time
            await asyncio.gather(*first)

        running.client.runner.run(wait())
        engine.go.set()
        assert value(running, "espalier_probe_queries_total", model="books", version=1, outcome="late") == 1
        assert value(running, "espalier_probe_queries_total", model="points", version=1, outcome="answered") == 2
        assert len(engine.calls) <= asked + 1


def test_a_model_that_returns_an_item_twice_fails(running: Running, engines: list[Spoilt]) -> None:
    asking = prober(running)
    engines[0].spoil = lambda result: replace(result, item_rows_BM=np.repeat(result.item_rows_BM[:, :1], result.item_rows_BM.shape[1], 1))
    ask(running, asking, ROUND)
    assert value(running, "espalier_probe_queries_total", model="books", version=1, outcome="failed") == HELD_OUT


def test_scores_that_are_no_numbers_are_as_far_off_as_can_be(running: Running, engines: list[Spoilt]) -> None:
    asking = prober(running)
    engines[0].spoil = lambda result: replace(result, scores_BM=result.scores_BM * np.float32("nan"))
    ask(running, asking, ROUND)
    assert value(running, "espalier_probe_drift", model="books", version=1) == 1


def test_answers_of_a_smaller_beam_say_nothing(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asking = prober(running)
    search = Batcher.search

    async def degraded(*arguments: Any, **options: Any) -> Answer:
        assert options["patient"]  # refused it would be as soon as there is a queue
        return replace(await search(*arguments, **options), degraded=True)

    monkeypatch.setattr(Batcher, "search", degraded)
    ask(running, asking, ROUND)
    assert value(running, "espalier_probe_queries_total", model="books", version=1, outcome="late") == ROUND
    assert recall(running) == {}


def test_nothing_is_said_of_recall_before_enough_queries_are_answered(running: Running, engines: list[Spoilt]) -> None:
    asking = prober(running)
    engines[0].spoil = lambda result: replace(result, item_rows_BM=result.item_rows_BM[:, :0], count_B=result.count_B * 0)
    ask(running, asking, ROUND - GOLDEN)
    assert recall(running) == {}
    ask(running, asking, GOLDEN)
    assert recall(running) == {2: 0, 5: 0}


def test_held_out_queries_that_cannot_be_read_are_read_once(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any) -> Any:
        raise BundleCorrupt("heldout.parquet: no column relevant")

    monkeypatch.setattr(probe, "read_heldout", broken)
    ask(running, prober(running), 5)
    assert len([record for record in caplog.records if "cannot be replayed" in record.message]) == 1
    assert "espalier_probe_queries_total{" not in running.client.get("/metrics").text


def test_a_version_that_was_probed_is_freed_once_it_is_unloaded(running: Running, bundle: Bundle, tmp_path: Path) -> None:
    asking = prober(running)
    damaged(bundle, tmp_path / "models", 2, "noise on all rows")
    admin(running, "load", {"version": 2, "default": False})
    ask(running, asking, ROUND)
    held = weakref.ref(running.app.state.service.registry.entries["books"].ready[2])
    admin(running, "unload", {"version": 2})
    ask(running, asking, 1)
    gc.collect()
    assert held() is None


def test_versions_take_turns(models: Path) -> None:
    """Never two at a time, so that requests wait for one query of the probe at most."""
    asked: list[tuple[str, int]] = []

    class Noting(Probe):
        def query(self, key: tuple[str, int]) -> asyncio.Task[None]:
            asked.append(key)
            return super().query(key)

    async def some(asking: Probe) -> None:
        task = asyncio.create_task(asking.run())
        async with asyncio.timeout(20):
            while len(asked) < 6:
                before = len(asked)
                await asyncio.sleep(0)
                assert len(asked) <= before + 1
        task.cancel()

    with run(models) as running:
        service = running.app.state.service
        running.client.runner.run(some(Noting(service.registry, service.metrics, 100.0)))
    assert asked[:6] == [("books", 1), ("points", 1)] * 3


def test_what_has_been_asked_is_not_waited_for_at_the_end(models: Path) -> None:
    async def stop(running: Running) -> None:
        service = running.app.state.service
        task = asyncio.create_task(Probe(service.registry, service.metrics, 1000.0).run())
        engine = running.engines["books"]
        engine.go.clear()
        async with asyncio.timeout(10):
            while not engine.started.is_set():
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(10):
            while any("Probe" in name for name in await _tasks()):
                await asyncio.sleep(0)
        engine.go.set()

    with run(models) as running:
        running.client.runner.run(stop(running))


def test_it_runs_with_the_service_where_it_is_wanted_and_stops_with_it(bundle: Bundle) -> None:
    async def until_probed(running: Running) -> None:
        async with asyncio.timeout(20):
            while (await running.client.http.get("/metrics")).text.count('espalier_probe_recall{m="2"') == 0:
                await asyncio.sleep(0.01)

    with run(bundle.path.parents[1], Spoilt, probe_per_s=500.0) as running:
        running.client.runner.run(until_probed(running))
        tasks = running.client.runner.run(_tasks())
        assert any("Probe.run" in name for name in tasks)
    for off in (None, 0):
        with run(bundle.path.parents[1], Spoilt, probe_per_s=off) as running:
            assert not any("Probe" in name for name in running.client.runner.run(_tasks()))
            assert "espalier_probe_recall{" not in running.client.get("/metrics").text


def test_the_probes_queries_are_not_among_those_of_requests(running: Running) -> None:
    ask(running, prober(running), 3)
    assert value(running, "espalier_queries_total", model="books") == 0
    running.retrieve(queries=[{"history": []}, {"history": ["item-1"]}])
    assert value(running, "espalier_queries_total", model="books") == 2
    assert (value(running, "espalier_batch_queries_sum", model="books") or 0) >= 5


def test_lines_of_streams_are_counted_and_not_timed(running: Running) -> None:
    lines = b'{"model": "books", "queries": [{"history": []}]}\n' * 3
    answer = running.client.post("/retrieve/stream", content=lines, headers={"Content-Type": "application/x-ndjson"})
    assert answer.status_code == 200
    assert value(running, "espalier_requests_total", model="books", status=200) == 3
    assert value(running, "espalier_request_seconds_count", model="books") == 0


def test_a_model_that_came_late_and_never_was_ready_is_nobodys_alarm(bundle: Bundle, tmp_path: Path) -> None:
    async def until_known(running: Running) -> None:
        async with asyncio.timeout(20):
            while "films" not in (text := (await running.client.http.get("/metrics")).text) or 'version{model="films"}' not in text:
                await asyncio.sleep(0.01)

    with run(bundle.path.parents[1], Spoilt, poll_s=0.05) as running:
        broken = tmp_path / "models" / "films" / "1"
        broken.mkdir(parents=True)
        (broken / "manifest.json").write_text("{}")
        running.client.runner.run(until_known(running))
        assert np.isnan(value(running, "espalier_model_default_version", model="films") or 0)
        assert value(running, "espalier_model_default_version", model="books") == 1


async def _tasks() -> list[str]:
    return [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]


def test_golden_queries_are_asked_evenly_among_the_held_out_ones(bundle: Bundle) -> None:
    kinds = [kind for kind, _ in Replay(bundle).questions]
    places = [i for i, kind in enumerate(kinds) if kind == "golden"]
    assert (len(kinds), len(places)) == (ROUND, GOLDEN)
    assert {*np.diff(places)} <= {ROUND // GOLDEN}


def test_golden_queries_of_a_memory_drift_by_their_keys(tmp_path: Path) -> None:
    bundle = exported(tmp_path, np.random.default_rng(7), remembers=True)
    golden = bundle.golden()
    assert golden.column("keys").to_pylist() != golden.column("ranks").to_pylist()
    replay, engine = Replay(bundle), open_engine(bundle, "cpu")
    for _ in range(ROUND):
        replay.take(engine.search(*replay.next()))
    assert replay.drift is not None
    assert replay.drift < 1e-5
    assert replay.recall == pytest.approx(replay.expected)


def test_a_round_is_no_longer_than_the_window(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "WINDOW", 7)
    assert len(Replay(bundle).questions) == 7 + GOLDEN


def test_recall_at_more_than_the_model_returns_is_not_expected(bundle: Bundle, tmp_path: Path) -> None:
    table = bundle.heldout().append_column("recall@500", pa.array([1.0] * HELD_OUT))
    made = write_bundle(tmp_path / "books" / "2", draft_of(bundle, 2), replace(content_of(bundle), heldout=table))
    assert bundle.manifest.search.max_m < 500
    assert list(Replay(made).expected) == MS


def test_of_many_held_out_queries_some_at_even_distances_are_asked(bundle: Bundle) -> None:
    whole, few = read_heldout(bundle), read_heldout(bundle, 7)
    assert len(few.queries) == len(few.relevant) == 7
    assert few.place_B.tolist() == [0, 3, 7, 11, 15, 19, 23]
    np.testing.assert_array_equal(few.queries.array, whole.queries.array[few.place_B])
    np.testing.assert_array_equal(few.recall_by_m[5], whole.recall_by_m[5][few.place_B])


# -- what else is watched -------------------------------------------------------------------------------------------------


def test_the_default_version_is_said_and_0_while_none_is_ready(bundle: Bundle) -> None:
    def broken(opened: Bundle) -> Any:
        raise RuntimeError("no engine")

    async def until(running: Running, number: float) -> None:
        async with asyncio.timeout(10):
            while f'espalier_model_default_version{{model="books"}} {number}' not in (await running.client.http.get("/metrics")).text:
                await asyncio.sleep(0.01)

    with run(bundle.path.parents[1], Spoilt) as running:
        running.client.runner.run(until(running, 1.0))
    with run(bundle.path.parents[1], broken) as running:
        running.client.runner.run(until(running, 0.0))
        assert value(running, "espalier_workers") == 1


def test_a_worker_that_comes_in_for_another_says_nothing_before_it_can_answer(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    settings, workers = Settings(models=models), Workers()
    follower = Follower(settings, metrics, EngineSource(open_engine), workers, LiveCatalogues(settings, metrics))
    monkeypatch.setattr(Workers, "others_serve", lambda self: True)
    follower._report_default(follower.entries["books"])
    assert "espalier_model_default_version{" not in metrics.render().decode()
    monkeypatch.setattr(Workers, "others_serve", lambda self: False)
    follower._report_default(follower.entries["books"])
    assert 'espalier_model_default_version{model="books"} 0.0' in metrics.render().decode()


def test_gpu_memory_is_asked_for_at_each_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {0: 3e9, 1: 5e9}
    nvml = ModuleType("pynvml")
    vars(nvml).update(
        NVMLError=type("NVMLError", (Exception,), {}),
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(used),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=used[handle], total=80e9),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    process_usage._nvml.cache_clear()
    metrics = Metrics()
    metrics.watch_gpus(process_usage.gpu_memory)
    assert 'espalier_gpu_memory_bytes{device="1"} 5e+09' in metrics.render().decode()
    used[1] = 6e9
    text = metrics.render().decode()
    assert 'espalier_gpu_memory_bytes{device="1"} 6e+09' in text
    assert 'espalier_gpu_memory_limit_bytes{device="0"} 8e+10' in text
    process_usage._nvml.cache_clear()


def test_without_the_driver_there_are_no_metrics_of_gpu_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    process_usage._nvml.cache_clear()
    metrics = Metrics()
    metrics.watch_gpus(process_usage.gpu_memory)
    assert "espalier_gpu_memory_bytes{" not in metrics.render().decode()
    metrics.render()
    assert len(caplog.records) == 1
    process_usage._nvml.cache_clear()
