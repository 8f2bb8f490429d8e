"""The recall probe: it says what a version finds of what it found when it was exported, and disturbs nobody."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from espalier.bundle import Bundle
from espalier.bundle_writer import write_bundle
from espalier.checks.heldout import read_heldout
from espalier.engines import open_engine
from espalier.errors import BundleCorrupt
from espalier.queries import QueryBatch
from espalier.search import NO_CONTEXT, SearchContext, SearchParams, SearchResult
from service.batching.batcher import Batcher
from service.batching.priority import Priority
from service.batching.request_parts import Answer
from service.live import live_version
from service.models import probe
from service.models.live_replay import CANARY_ANSWERS, MIN_CANARY_ANSWERS
from service.models.probe import PATIENCE_S, Probe, Replay
from service.watch.metrics import Metrics
from tests.espalier.bundle.parts import content_of, draft_of
from tests.service.damaged_models import DAMAGES, damaged
from tests.service.exported_models import GOLDEN, HELD_OUT, MS, exported
from tests.service.live_running import Live, Nearest, open_reference
from tests.service.own_time import pass_time, settled
from tests.service.probing import Probing, sample
from tests.service.running import Json, Running, bearer, counted, ids, run

__all__ = ["exported"]

ROUND = HELD_OUT + GOLDEN
KEY = "an-admin-key-of-tests"


class Spoilt:
    """The reference, until it is told to return something else than it has found."""

    def __init__(self, bundle: Bundle) -> None:
        self._engine = open_engine(bundle, "cpu", "reference")
        self.name, self.rounding = self._engine.name, self._engine.rounding
        self.warm_up, self.close = self._engine.warm_up, self._engine.close
        self.items = len(bundle.items)
        self.spoil: Callable[[SearchResult], SearchResult] = lambda result: result

    def search(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
        return self.spoil(self._engine.search(queries, params, context))


class Service:
    """One that runs, and its engines by version."""

    def __init__(self, models: Path, running: Running, engines: dict[int, Spoilt]) -> None:
        self.models, self.running, self.engines = models, running, engines

    @property
    def engine(self) -> Spoilt:
        return self.engines[1]

    def admin(self, change: str, body: Json) -> int:
        return self.running.client.post(f"/models/books/{change}", json=body, headers=bearer(KEY)).status_code

    def load(self, version: int, damage: str = "noise on all rows") -> None:
        """A version that is wrong, whose checksums and golden queries are right."""
        damaged(Bundle.open(self.models / "books" / "1"), self.models, version, damage)
        assert self.admin("load", {"version": version, "default": False}) == 200

    def unload(self, version: int) -> None:
        """It is gone for good."""
        assert self.admin("unload", {"version": version}) == 200
        del self.engines[version]
        shutil.rmtree(self.models / "books" / str(version))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Not to be written to."""
    return exported(tmp_path_factory.mktemp("exported"), np.random.default_rng(5))


@pytest.fixture(scope="module")
def shared(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    models, engines = tmp_path_factory.mktemp("models"), dict[int, Spoilt]()
    shutil.copytree(bundle.path.parents[1], models, dirs_exist_ok=True)

    def open_model(opened: Bundle) -> Spoilt:
        return engines.setdefault(opened.manifest.version, Spoilt(opened))

    with run(models, open_model, admin_keys=KEY) as running:
        yield Service(models, running, engines)


@pytest.fixture
def service(shared: Service) -> Iterator[Service]:
    """With version 1 alone, unspoilt, before and after."""
    yield shared
    for engine in shared.engines.values():
        engine.spoil = lambda result: result
    for version in [*shared.engines][1:]:
        shared.unload(version)


@pytest.fixture
def probing(service: Service) -> Probing:
    return Probing(service.running)


# -- recall ---------------------------------------------------------------------------------------------------------------


def test_a_good_model_finds_what_it_found_when_it_was_exported(probing: Probing, bundle: Bundle) -> None:
    probing.ask(2 * ROUND)
    expected = {m: recall_B.mean() for m, recall_B in read_heldout(bundle).recall_by_m.items()}
    assert 0.1 < expected[2] < expected[5] < 0.9
    assert probing.recall() == pytest.approx(expected, abs=1e-12)
    assert probing.recall(metric="expected_recall") == pytest.approx(expected, abs=1e-12)
    assert probing.drift() < 1e-5
    assert probing.queries("answered") == 2 * ROUND


def test_recall_does_not_depend_on_which_queries_have_been_answered_yet(
    probing: Probing, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MIN_ANSWERS", 1)
    expected = {m: recall_B.mean() for m, recall_B in read_heldout(bundle).recall_by_m.items()}
    seen = []
    for _ in range(ROUND):
        probing.ask(1)
        seen.append(probing.recall())
    assert seen[0] == {} or seen[0] == pytest.approx(expected)  # golden queries say nothing of recall
    assert all(found == pytest.approx(expected) for found in seen[1:])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_version_beside_the_default_is_seen(service: Service, probing: Probing, damage: str) -> None:
    service.load(2, damage)
    probing.ask(ROUND)
    expected = probing.recall(metric="expected_recall")
    assert probing.recall(2, "expected_recall") == expected
    assert max(expected[m] - found for m, found in probing.recall(2).items()) > 0.02
    assert probing.recall() == pytest.approx(expected)


def test_an_engine_that_returns_other_items_since_it_was_loaded_is_seen(service: Service, probing: Probing, caplog: Any) -> None:
    def logged() -> list[str]:
        return [record.levelname for record in caplog.records if "recall of the probe" in record.message]

    caplog.set_level("INFO")
    probing.ask(ROUND)
    before = probing.recall()
    service.engine.spoil = lambda result: replace(result, item_rows_BM=(result.item_rows_BM + 1) % service.engine.items)
    probing.ask(ROUND)
    assert probing.recall()[5] < before[5] - 0.02
    assert logged() == ["ERROR"]
    service.engine.spoil = lambda result: result
    probing.ask(ROUND)
    assert probing.recall() == pytest.approx(before)
    assert logged() == ["ERROR", "INFO"]


def test_an_engine_that_scores_differently_since_it_was_loaded_is_seen(service: Service, probing: Probing) -> None:
    service.engine.spoil = lambda result: replace(result, scores_BM=result.scores_BM - np.float32(0.25))
    probing.ask(ROUND)
    assert probing.drift() == pytest.approx(0.25, abs=1e-4)
    assert probing.recall() == pytest.approx(probing.recall(metric="expected_recall"))  # the order is as it was
    service.engine.spoil = lambda result: replace(result, scores_BM=result.scores_BM * np.float32("nan"))
    probing.ask(ROUND)
    assert probing.drift() == 1  # as far off as can be


def test_missing_items_count_as_scores_of_zero_once_enough_queries_are_answered(service: Service, probing: Probing) -> None:
    def nothing(result: SearchResult) -> SearchResult:
        return replace(result, item_rows_BM=result.item_rows_BM[:, :0], scores_BM=result.scores_BM[:, :0], count_B=result.count_B * 0)

    service.engine.spoil = nothing
    probing.ask(ROUND - GOLDEN)
    assert probing.recall() == {}
    probing.ask(GOLDEN)
    assert probing.drift() > 0.05
    assert probing.recall() == {2: 0, 5: 0}


def test_without_what_recall_was_at_export_it_says_what_it_is(tmp_path: Path) -> None:
    with run(exported(tmp_path, np.random.default_rng(6), said=False).path.parents[1], Spoilt) as running:
        probing = Probing(running)
        probing.ask(ROUND)
        assert probing.recall(metric="expected_recall") == {}
        found = [probing.value("probe_recall", m=m) for m in (10, 50, 100)]
        assert all(number is not None and 0 < number <= 1 for number in found)


# -- versions come and go -------------------------------------------------------------------------------------------------


def test_an_unloaded_version_leaves_no_series_and_is_freed(service: Service, probing: Probing) -> None:
    def series() -> set[str]:
        """In the probe's metrics, and in the service's."""
        own = {line.rpartition(" ")[0] for line in probing.text().splitlines() if not line.startswith("#")}
        return own | counted(service.running).keys()

    probing.ask(ROUND)
    service.load(2)
    probing.ask(ROUND)
    before = {name for name in series() if 'version="2"' not in name}
    assert len(series() - before) == 8  # info, when it was made, two recalls, as many expected ones, drift, answered probe queries
    assert probing.recall(2).keys() == probing.recall(2, "expected_recall").keys() == {*MS}
    held = weakref.ref(service.running.app.state.service.registry.entries["books"].ready[2])
    service.unload(2)
    probing.ask(1)
    assert series() == before
    assert list(probing.recall()) == MS
    gc.collect()
    assert held() is None
    (service.models / "books" / "3").mkdir()
    (service.models / "books" / "3" / "manifest.json").write_text("{}")
    assert service.admin("load", {"version": 3}) == 409
    assert series() == before
    shutil.rmtree(service.models / "books" / "3")


def test_an_answer_that_comes_after_its_version_has_gone_leaves_no_series(service: Service, probing: Probing) -> None:
    service.load(4)
    searching, let_go = threading.Event(), threading.Event()

    def slow(result: SearchResult) -> SearchResult:
        searching.set()
        assert let_go.wait(10)
        return result

    async def late() -> None:
        task = probing.probe.query(("books", 4))
        await asyncio.to_thread(searching.wait, 10)
        await service.running.app.state.service.registry.changes.unload("books", 4)
        del service.engines[4]
        probing.probe.forget(probing.probe.ready())
        assert not task.done()
        let_go.set()
        await task
        probing.probe.forget(probing.probe.ready())

    service.engines[4].spoil = slow
    service.running.client.runner.run(late())
    assert 'version="4"' not in probing.text()


# -- what it does not disturb, and what does not disturb it ---------------------------------------------------------------


def test_its_queries_are_no_requests_and_lines_of_streams_are_counted_and_not_timed(service: Service, probing: Probing) -> None:
    def changed(do: Callable[[], object]) -> dict[str, float]:
        before = counted(service.running)
        do()
        return {name: value - before.get(name, 0) for name, value in counted(service.running).items() if value != before.get(name, 0)}

    found = changed(lambda: probing.ask(ROUND))
    assert found['espalier_engine_seconds_total{model="books"}'] > 0
    assert found['espalier_batch_queries_sum{model="books"}'] == ROUND
    assert not [name for name in found if name.startswith(("espalier_requests", "espalier_request_", "espalier_quer"))]
    found = changed(lambda: service.running.retrieve(queries=[{"history": []}, {"history": ["item-1"]}]))
    assert found['espalier_queries_total{model="books"}'] == 2
    lines = b'{"model": "books", "queries": [{"history": []}]}\n' * 3
    headers = {"Content-Type": "application/x-ndjson"}
    found = changed(lambda: service.running.client.post("/retrieve/stream", content=lines, headers=headers))
    assert found['espalier_requests_total{model="books",status="200"}'] == 3
    assert 'espalier_request_seconds_count{model="books"}' not in found


def test_a_failing_engine_is_counted_and_asked_again(service: Service, probing: Probing) -> None:
    def fail(result: SearchResult) -> SearchResult:
        raise RuntimeError("out of order")

    def twice(result: SearchResult) -> SearchResult:
        return replace(result, item_rows_BM=np.repeat(result.item_rows_BM[:, :1], result.item_rows_BM.shape[1], 1))

    service.engine.spoil = fail
    probing.ask(3)
    assert probing.queries("failed") == 3
    service.engine.spoil = lambda result: result
    probing.ask(ROUND)
    assert probing.recall() == pytest.approx(probing.recall(metric="expected_recall"))
    service.engine.spoil = twice  # a model that returns an item twice fails, where items are compared
    probing.ask(ROUND)
    assert probing.queries("failed") == 3 + HELD_OUT


async def test_a_probe_that_waits_asks_nothing_more_and_gives_up(running: Running) -> None:
    probing, engine = Probing(running), running.engines["books"]
    await asyncio.gather(*(probing.probe.query(key) for key in probing.probe.ready()))
    asked = len(engine.calls)
    engine.go.clear()
    waits, answered = (probing.probe.query(key) for key in probing.probe.ready())
    assert {probing.probe.query(key) for key in probing.probe.ready()} == {waits, answered}  # nobody is asked twice at a time
    await answered
    await pass_time(PATIENCE_S)
    await waits
    engine.go.set()
    assert probing.queries("late") == 1
    assert probing.queries("answered", "points") == 2
    assert len(engine.calls) <= asked + 1


def test_answers_of_a_smaller_beam_say_nothing(probing: Probing, monkeypatch: pytest.MonkeyPatch) -> None:
    search = Batcher.search

    async def degraded(*arguments: Any, **options: Any) -> Answer:
        assert arguments[-1] is Priority.PATIENT  # refused it would be as soon as there is a queue
        return replace(await search(*arguments, **options), degraded=True)

    monkeypatch.setattr(Batcher, "search", degraded)
    probing.ask(ROUND)
    assert probing.queries("late") == ROUND
    assert probing.recall() == {}


def test_held_out_queries_that_cannot_be_read_are_read_once(
    probing: Probing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any) -> Any:
        raise BundleCorrupt("heldout.parquet: no column relevant")

    monkeypatch.setattr(probe, "read_heldout", broken)
    probing.ask(5)
    assert len([record for record in caplog.records if "cannot be replayed" in record.message]) == 1
    assert "espalier_probe_queries_total{" not in probing.text()


# -- its task -------------------------------------------------------------------------------------------------------------


async def test_versions_take_turns(running: Running) -> None:
    """Never two at a time, so that requests wait for one query of the probe at most."""
    asked: list[tuple[str, int]] = []

    class Noting(Probe):
        def query(self, key: tuple[str, int]) -> asyncio.Task[None]:
            asked.append(key)
            return super().query(key)

    task = asyncio.create_task(Noting(running.app.state.service.registry, Metrics(), per_s=0.01).run())
    for turn in range(1, 7):
        await settled()
        assert len(asked) == turn
        await pass_time(50)  # of 100 s each of the two has half
    task.cancel()
    assert asked[:6] == [("books", 1), ("points", 1)] * 3


async def test_what_has_been_asked_is_not_waited_for_at_the_end(running: Running) -> None:
    engine = running.engines["books"]
    task = asyncio.create_task(Probe(running.app.state.service.registry, Metrics(), 1000.0).run())
    engine.go.clear()
    assert await asyncio.to_thread(engine.started.wait, 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await settled()
    assert not any("Probe" in name for name in tasks())
    engine.go.set()


async def test_it_runs_with_the_service_where_it_is_wanted(bundle: Bundle) -> None:
    async def until_probed(running: Running) -> list[str]:
        while sample((await running.client.http.get("/metrics")).text, "espalier_probe_recall", model="books", version=1, m=2) is None:
            await asyncio.sleep(0.01)
        return tasks()

    def watched(per_s: float | None) -> list[str]:
        with run(bundle.path.parents[1], Spoilt, probe_per_s=per_s) as running:
            return running.client.runner.run(until_probed(running) if per_s else named_tasks())

    assert any("Probe.run" in name for name in await asyncio.to_thread(watched, 500.0))
    for off in (None, 0):
        assert not any("Probe" in name for name in await asyncio.to_thread(watched, off))


def tasks() -> list[str]:
    return [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]


async def named_tasks() -> list[str]:
    return tasks()


# -- what is asked --------------------------------------------------------------------------------------------------------


def test_golden_queries_are_asked_evenly_among_held_out_ones_of_which_some_at_even_distances_are(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, few = read_heldout(bundle), read_heldout(bundle, 7)
    assert len(few.queries) == len(few.relevant) == 7
    assert few.table_row_B.tolist() == [0, 3, 7, 11, 15, 19, 23]
    np.testing.assert_array_equal(few.queries.array, whole.queries.array[few.table_row_B])
    np.testing.assert_array_equal(few.recall_by_m[5], whole.recall_by_m[5][few.table_row_B])
    kinds = [kind for kind, _ in Replay(bundle).query_order]
    places = [i for i, kind in enumerate(kinds) if kind == "golden"]
    assert (len(kinds), len(places)) == (ROUND, GOLDEN)
    assert {*np.diff(places)} <= {ROUND // GOLDEN}
    monkeypatch.setattr(probe, "WINDOW", 7)
    assert len(Replay(bundle).query_order) == 7 + GOLDEN


def test_golden_queries_of_a_memory_drift_by_their_keys(tmp_path: Path) -> None:
    bundle = exported(tmp_path, np.random.default_rng(7), remembers=True)
    golden = bundle.golden()
    assert golden.column("keys").to_pylist() != golden.column("ranks").to_pylist()
    replay, engine = Replay(bundle), open_engine(bundle, "cpu", "reference")
    for _ in range(ROUND):
        replay.take(engine.search(*replay.next()))
    assert replay.drift is not None
    assert replay.drift < 1e-5
    assert replay.recall == pytest.approx(replay.expected)


def test_recall_at_more_than_the_model_returns_is_not_expected(bundle: Bundle, tmp_path: Path) -> None:
    table = bundle.heldout().append_column("recall@500", pa.array([1.0] * HELD_OUT))
    made = write_bundle(tmp_path / "books" / "2", draft_of(bundle, version=2), content_of(bundle, heldout=table))
    assert bundle.manifest.search.max_m < 500
    assert list(Replay(made).expected) == MS


# -- of a service with live items: its recall is that of the trained version, and it says what they gain and cost ---------


M = 5
"""The largest m of recall at export."""


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    bundle = exported(tmp_path, np.random.default_rng(5))
    monkeypatch.setattr(live_version, "Placer", Nearest)
    with run(bundle.path.parents[1], open_reference) as running:
        yield Live(running)


def displacement(live: Live, bundle: Bundle, gone: set[str]) -> float:
    """Mean recall of the held-out queries with live items less that without, asked over HTTP; items that are gone are wanted by nobody."""
    gains = []
    for query in bundle.heldout().to_pylist():
        wanted = {*query["relevant"]} - gone
        if not wanted:
            continue
        body = {"queries": [{"history": query["history"]}], "m": M, "beam_size": 8}
        found = [{*ids(live.running.retrieve(**body, live=sees)["results"][0])} for sees in (True, False)]
        with_live, without = (len(wanted & own) / len(wanted) for own in found)
        gains.append(with_live - without)
    assert len(gains) == HELD_OUT
    return float(np.mean(gains))


def test_writes_are_no_damage_and_what_they_displace_is_measured(live: Live) -> None:
    probing = Probing(live.running)
    probing.ask(2 * ROUND)
    expected = probing.recall()
    assert probing.recall(metric="expected_recall") == pytest.approx(expected, abs=1e-12)
    assert probing.value("live_displacement") is None  # nothing was ever written
    bundle = live.running.app.state.service.registry.entries["books"].loaded.bundle
    gone = {item for query in bundle.heldout().to_pylist()[:3] for item in query["relevant"][:1]}
    for item in gone:
        live.delete(item)
    for i in range(0, 64, 2):
        live.put(f"copy-{i}", like=(f"item-{i}",))
    probing.ask(3 * ROUND)
    found = probing.value("live_displacement")
    assert found is not None
    assert found == pytest.approx(displacement(live, bundle, gone), abs=1e-12)
    assert found < -0.05
    assert probing.recall() == pytest.approx(expected, abs=1e-12)
    assert probing.drift() == pytest.approx(0, abs=1e-7)


def test_the_canary_asks_for_new_items_by_their_histories_until_they_are_deleted(live: Live) -> None:
    probing = Probing(live.running)
    found = live.found("item-3", m=60, beam_size=8)
    missed = next(f"item-{i}" for i in range(64) if f"item-{i}" not in found)
    live.put("near", like=(found[0],), events=(["item-3"],))  # its place and row are those of what it is like
    probing.ask(4 * MIN_CANARY_ANSWERS)
    assert probing.value("live_canary_recall") == 1.0
    live.put("far", like=(missed,), events=(["item-3"],))
    probing.ask(4 * 2 * CANARY_ANSWERS)
    assert probing.value("live_canary_recall") == 0.5
    live.delete("near")
    live.delete("far")
    probing.ask(3)
    assert np.isnan(probing.value("live_canary_recall") or 0.0)
    assert probing.queries("failed") == 0
