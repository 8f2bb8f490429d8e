"""Models and versions: what serves, and how that changes while requests are served. Over a fake engine, in one process."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from espalier.bundle import Bundle
from espalier.checks.random_bundles import make_bundle
from espalier.errors import BundleNotFound, InvalidData, InvalidQuery
from espalier.queries import blank_queries
from espalier.search import Engine, SearchParams
from espalier.tree import complete_tree
from service.errors import Conflict, ModelNotFound, NotReady
from service.models.desired_state import DesiredState, Removed, Serving
from service.models.followed_file import FollowedFile
from service.models.loading import LoadedModel, compare_contents, compare_files, told
from service.models.registry import Entry, Registry
from service.settings import Settings
from service.watch.metrics import Metrics
from tests.service.fake_engine import FakeEngine

ITEMS = 32
Result = TypeVar("Result")


@pytest.fixture(scope="session")
def bundle_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1 of `books`."""
    rng = np.random.default_rng(0)
    return make_bundle(tmp_path_factory.mktemp("bundle"), rng, complete_tree(rng.permutation(ITEMS), 2), name="books").path


@pytest.fixture
def models(tmp_path: Path, bundle_1: Path) -> Path:
    """A models folder with version 1 of `books`."""
    shutil.copytree(bundle_1, tmp_path / "models" / "books" / "1")
    return tmp_path / "models"


def add_version(models: Path, version: int, name: str = "books", damaged: bool = False) -> Path:
    """Another version of a model, as training would put it there."""
    source = next(path for path in sorted((models / "books").iterdir()) if path.name.isdecimal())
    hidden = shutil.copytree(source, models / f".{name}.{version}")
    manifest = json.loads((hidden / "manifest.json").read_text()) | {"version": version, "name": name}
    (hidden / "manifest.json").write_text(json.dumps(manifest))
    if damaged:
        damage(hidden)
    (models / name).mkdir(exist_ok=True)
    return hidden.rename(models / name / str(version))


def damage(bundle: Path) -> None:
    """Change a byte in place."""
    with (bundle / "nodes.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        byte = stream.read(1)
        stream.seek(-1, 2)
        stream.write(bytes([byte[0] ^ 1]))


@dataclass
class Running:
    """A registry that has loaded what should serve. `engines` by version, the latest that was opened."""

    registry: Registry
    metrics: Metrics
    models: Path
    runner: asyncio.Runner
    engines: dict[int, FakeEngine] = field(default_factory=dict)
    opened: list[int] = field(default_factory=list)

    @property
    def books(self) -> Entry:
        return self.registry.entry("books")

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self.runner.run(coroutine)

    def states(self) -> dict[int, str]:
        return {info.version: info.state for info in self.books.states()}

    def served(self, version: int | None = None) -> int:
        return self.registry.choose("books", version).version

    def count(self, outcome: str) -> float:
        """espalier_reload_total."""
        line = f'espalier_reload_total{{model="books",outcome="{outcome}"}} '
        found = [text for text in self.metrics.render().decode().splitlines() if text.startswith(line)]
        return float(found[0].removeprefix(line)) if found else 0.0


@contextmanager
def run(models: Path, open_model: Callable[[Bundle], Engine] | None = None, **settings: Any) -> Iterator[Running]:
    metrics = Metrics()

    def open_fake(bundle: Bundle, device: str, engine: str | None, threads: int, precision: str) -> Engine:
        version = bundle.manifest.version
        running.opened.append(version)
        if open_model is not None:
            return open_model(bundle)
        running.engines[version] = FakeEngine(bundle.tree.item_count, bundle.tree.leaf_of_item)
        return running.engines[version]

    with asyncio.Runner() as runner:
        registry = Registry(Settings(models=models, **settings), metrics, open_fake)
        running = Running(registry, metrics, models, runner)
        registry.start_loading()
        try:
            assert registry.wait_until_loaded(30)
            yield running
        finally:
            runner.run(registry.drain(10))


def until(condition: Callable[[], object], wanted: str) -> None:
    """Poll until it holds."""
    deadline, pause = time.monotonic() + 20, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within 20 s: {wanted}"
        pause.wait(0.01)


def held_back(version: int) -> tuple[Callable[[Bundle], Engine], threading.Event, threading.Event]:
    """How an engine is opened whose version waits: (the opener, set when it has begun, to be set to let it go on)."""
    opening, let_go = threading.Event(), threading.Event()

    def open_late(bundle: Bundle) -> Engine:
        if bundle.manifest.version == version:
            opening.set()
            assert let_go.wait(10)
        return FakeEngine(ITEMS)

    return open_late, opening, let_go


async def search(model: LoadedModel) -> list[int]:
    """Item rows of a search without a filter."""
    queries = blank_queries(model.bundle.manifest.query, 1)
    answer = await model.batcher.search(queries, SearchParams.uniform(1, 10, 3, mask=model.filters.standing))
    rows: list[int] = answer.result.item_rows_BM[0].tolist()
    return rows


# -- the files of desired state -------------------------------------------------------------------------------------------


def test_a_state_is_read_as_it_was_written_and_leaves_no_other_file(tmp_path: Path) -> None:
    state = DesiredState(tmp_path)
    assert (state.read(Serving), state.read(Removed), state.signature(Serving)) == (None, None, None)
    serving, removed = Serving(generation=4, versions=(2, 3), default=3), Removed(generation=2, ids=("b12", "ü"))
    state.write(serving)
    first = state.signature(Serving)
    state.write(removed)
    assert (state.read(Serving), state.read(Removed)) == (serving, removed)
    assert json.loads((tmp_path / "serving.json").read_text()) == {"generation": 4, "versions": [2, 3], "default": 3}
    state.write(serving)
    assert first is not None
    assert state.signature(Serving) != first
    state.delete(Removed)
    state.delete(Removed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["serving.json"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "books/serving.json"),
        ("[]", "books/serving.json"),
        ('{"generation": 1, "versions": [1]}', "default"),
        ('{"generation": 0, "versions": [1], "default": 1}', "generation"),
        ('{"generation": 1, "versions": [], "default": 1}', "versions"),
        ('{"generation": 1, "versions": [0], "default": 0}', "versions.0"),
        ('{"generation": 1, "versions": ["1"], "default": 1}', "versions.0"),
        ('{"generation": 1, "versions": [1, 2], "default": 3}', "default 3 is not among the versions"),
        ('{"generation": 1, "versions": [1], "default": 1, "canary": 2}', "canary"),
        ('{"generation": 1, "versions": [1], "default": 1', "books/serving.json"),
    ],
)
def test_a_malformed_state_is_said(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "serving.json").write_text(content)
    with pytest.raises(InvalidData, match=named):
        DesiredState(tmp_path / "books").read(Serving)


def test_a_pin_is_lifted_by_a_file_that_stays_away(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is deleted and written anew, as some programs replace files, is none."""
    now = [100.0]
    monkeypatch.setattr("service.models.followed_file.time.monotonic", lambda: now[0])
    disk = DesiredState(models / "books")
    pins = [Serving(generation=number, versions=(1,), default=1) for number in (1, 2)]
    watched = FollowedFile(disk, Serving)
    disk.write(pins[0])
    assert watched.look()
    disk.delete(Serving)
    for moment in (100.0, 100.4):
        now[0] = moment
        assert not watched.look()
        assert watched.state == pins[0]
    disk.write(pins[1])
    assert watched.look()
    assert watched.state == pins[1]
    disk.delete(Serving)
    for moment, lifted in ((200.0, False), (200.4, False), (200.5, True)):
        now[0] = moment
        assert watched.look() is lifted
    found: Serving | None = watched.state
    assert found is None
    assert watched.wrong is None


def test_one_change_at_a_time(tmp_path: Path) -> None:
    with DesiredState(tmp_path).locked(), pytest.raises(Conflict, match="under way"), DesiredState(tmp_path).locked():
        pass
    with DesiredState(tmp_path).locked():
        pass


# -- start ----------------------------------------------------------------------------------------------------------------


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleNotFound, match="no model there"):
        Registry(Settings(models=tmp_path), Metrics())


def test_without_a_state_the_highest_version_serves_alone(models: Path) -> None:
    add_version(models, 2)
    add_version(models, 10)
    with run(models) as running:
        assert running.opened == [10]
        assert running.served() == running.served(10) == 10
        until(lambda: running.states() == {1: "available", 2: "available", 10: "ready"}, "the versions are so")
        assert running.registry.choose(None, None) is running.registry.choose("books", 10)
        assert running.registry.not_ready() == []
        with pytest.raises(ModelNotFound, match="Version 2 of 'books' is not loaded; loaded: version 10"):
            running.registry.choose("books", 2)
        with pytest.raises(ModelNotFound, match="no model 'films'"):
            running.registry.choose("films", None)


def test_several_models_need_a_name(models: Path) -> None:
    add_version(models, 1, name="films")
    with run(models) as running, pytest.raises(InvalidQuery, match="one of books, films"):
        running.registry.choose(None, None)


def test_a_state_on_disk_is_served_after_a_start(models: Path) -> None:
    for version in (2, 3):
        add_version(models, version)
    DesiredState(models / "books").write(Serving(generation=7, versions=(1, 2), default=1))
    DesiredState(models / "books").write(Removed(generation=1, ids=("item-0", "gone")))
    with run(models) as running:
        assert running.served() == 1
        assert running.served(2) == 2
        until(lambda: running.states() == {1: "ready", 2: "ready", 3: "available"}, "the versions are so")
        assert running.registry.removed("books") == ["item-0", "gone"]
        assert 0 not in running.run(search(running.registry.choose("books", 2)))


def test_a_failed_newest_version_falls_back_to_the_one_before(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_version(models, 2)
    add_version(models, 3, damaged=True)
    with run(models) as running:
        assert running.served() == 2
        assert running.registry.not_ready() == []
        until(lambda: running.states() == {1: "available", 2: "ready", 3: "failed"}, "the versions are so")
        assert running.books.reason is not None
        assert running.books.reason.startswith("version 3: books/3/nodes.safetensors: its SHA-256")
        assert (running.count("failed"), running.count("loaded")) == (1, 1)
    assert any(
        record.levelno == logging.ERROR and "version 2 serves, because version 3 failed" in record.message for record in caplog.records
    )


def test_a_pinned_version_that_fails_stays_failed_and_the_others_serve(models: Path) -> None:
    add_version(models, 2, damaged=True)
    DesiredState(models / "books").write(Serving(generation=1, versions=(1, 2), default=2))
    with run(models) as running:
        [reason] = running.registry.not_ready()
        assert reason.startswith("books version 2: failed: books/2/nodes.safetensors")
        assert str(models) not in reason
        assert running.served(1) == 1
        with pytest.raises(NotReady):
            running.served()
        running.run(running.registry.set_default("books", 1))  # the way out
        assert running.served() == 1
        assert running.registry.not_ready() == []


@pytest.mark.parametrize("name", ["serving.json", "removed.json"])
def test_a_malformed_state_at_the_start_serves_nothing_until_it_is_repaired(models: Path, name: str) -> None:
    (models / "books" / name).write_text("{")
    with run(models) as running:
        [reason] = running.registry.not_ready()
        assert f"books/{name}" in reason
        (models / "books" / name).unlink()
        until(lambda: not running.registry.not_ready(), "ready")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for requested buffer of size 1073741824"),
        RuntimeError("CUDA failure 2: out of memory ; GPU=0"),
        RuntimeError("CUDA_ERROR_OUT_OF_MEMORY"),
        MemoryError(),
    ],
)
def test_out_of_memory_is_a_clear_refusal_and_frees_what_was_opened(models: Path, error: Exception) -> None:
    opened: list[weakref.ref[FakeEngine]] = []

    class Fat(FakeEngine):
        def warm_up(self) -> None:
            raise error

    def open_fat(bundle: Bundle) -> Engine:
        engine = FakeEngine(ITEMS) if bundle.manifest.version == 1 else Fat(ITEMS)
        opened.append(weakref.ref(engine))
        return engine

    with run(models, open_fat) as running:
        add_version(models, 2)
        with pytest.raises(Conflict, match=r"out of memory while warming up its engine.*Unload another version first"):
            running.run(running.registry.load("books", 2))
        assert running.served() == 1
        assert running.states()[2] == "failed"
        assert 'version="2"' not in running.metrics.render().decode()
        until(lambda: opened[1]() is None, "the failed engine is freed")


# -- changes --------------------------------------------------------------------------------------------------------------


def test_load_default_unload(models: Path) -> None:
    with run(models) as running:
        registry = running.registry
        add_version(models, 2)
        running.run(registry.load("books", 2))
        assert (running.served(), running.served(2)) == (1, 2)
        assert json.loads((models / "books" / "serving.json").read_text()) == {"generation": 1, "versions": [1, 2], "default": 1}
        running.run(registry.load("books", 2))  # nothing to do
        running.run(registry.set_default("books", 2))
        assert (running.served(), running.served(1)) == (2, 1)
        running.run(registry.set_default("books", 1))  # back at once: nothing is loaded
        assert running.served() == 1
        assert running.opened == [1, 2]
        with pytest.raises(Conflict, match="is the default"):
            running.run(registry.unload("books", 1))
        running.run(registry.unload("books", 2))
        with pytest.raises(ModelNotFound):
            running.served(2)
        until(lambda: running.states() == {1: "ready", 2: "available"}, "version 2 is taken apart")
        assert DesiredState(models / "books").read(Serving) == Serving(generation=4, versions=(1,), default=1)
        assert (running.count("loaded"), running.count("unloaded"), running.count("failed")) == (2, 1, 0)
        text = running.metrics.render().decode()
        assert 'espalier_model_info{engine="fake",model="books",version="1"} 1.0\n' in text
        assert 'version="2"' not in text


def test_the_default_can_be_pinned_as_it_is(models: Path) -> None:
    with run(models) as running:
        running.run(running.registry.load("books", 1))
        assert not (models / "books" / "serving.json").exists()
        running.run(running.registry.set_default("books", 1))
        assert DesiredState(models / "books").read(Serving) == Serving(generation=1, versions=(1,), default=1)
        with pytest.raises(Conflict, match="is the default"):
            running.run(running.registry.unload("books", 1))


def test_what_is_not_there_is_said(models: Path) -> None:
    with run(models) as running:
        registry = running.registry
        for change in (registry.load("books", 9), registry.set_default("books", 9), registry.unload("books", 9)):
            with pytest.raises(ModelNotFound, match="9"):
                running.run(change)
        for change in (registry.load("films", 1), registry.unload("films", 1)):
            with pytest.raises(ModelNotFound, match="no model 'films'"):
                running.run(change)
        with pytest.raises(ModelNotFound):
            running.run(registry.set_removed("films", []))
        with pytest.raises(ModelNotFound):
            registry.removed("../books")


def test_a_failed_load_disturbs_nothing_and_is_taken_back(models: Path) -> None:
    with run(models) as running:
        before = running.registry.choose("books", None)
        add_version(models, 2, damaged=True)
        with pytest.raises(Conflict, match=r"Nothing was changed.*books/2/nodes.safetensors: its SHA-256"):
            running.run(running.registry.load("books", 2, default=True))
        assert running.registry.choose("books", None) is before
        assert not (models / "books" / "serving.json").exists()
        until(lambda: running.states() == {1: "ready", 2: "failed"}, "the versions are so")
        assert running.count("rolled_back") == 1
        damage(models / "books" / "2")  # the same bit again: repaired
        running.run(running.registry.load("books", 2, default=True))
        assert running.served() == 2
        assert running.books.reason is None


def test_a_change_that_is_taken_back_brings_no_other_version(models: Path) -> None:
    with run(models) as running:
        add_version(models, 2)
        add_version(models, 3, damaged=True)
        with pytest.raises(Conflict):
            running.run(running.registry.load("books", 3))
        assert running.served() == 1
        running.run(running.registry.set_default("books", 1))
        add_version(models, 4, damaged=True)
        with pytest.raises(Conflict):
            running.run(running.registry.set_default("books", 4))
        assert DesiredState(models / "books").read(Serving) == Serving(generation=3, versions=(1,), default=1)
        until(lambda: running.states() == {1: "ready", 2: "available", 3: "failed", 4: "failed"}, "the versions are so")


def test_one_change_waits_for_no_other(models: Path) -> None:
    async def scenario() -> None:
        loading = asyncio.create_task(running.registry.load("books", 2))
        await asyncio.to_thread(opening.wait, 10)
        with pytest.raises(Conflict, match="under way"):
            await running.registry.set_default("books", 1)
        assert running.states()[2] == "loading"
        assert running.registry.not_ready() == []
        let_go.set()
        await loading

    open_late, opening, let_go = held_back(2)

    with run(models, open_late) as running:
        add_version(models, 2)
        running.run(scenario())


def test_a_change_goes_on_when_its_client_hangs_up(models: Path) -> None:
    async def scenario() -> None:
        loading = asyncio.create_task(running.registry.load("books", 2, default=True))
        await asyncio.to_thread(opening.wait, 10)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        let_go.set()
        while running.served() != 2:
            await asyncio.sleep(0)

    open_late, opening, let_go = held_back(2)

    with run(models, open_late) as running:
        add_version(models, 2)
        running.run(scenario())


def test_a_load_that_takes_too_long_is_taken_back(models: Path) -> None:
    let_go = threading.Event()

    def open_late(bundle: Bundle) -> Engine:
        assert bundle.manifest.version == 1 or let_go.wait(10)
        return FakeEngine(ITEMS)

    async def scenario() -> None:
        loading = asyncio.create_task(running.registry.load("books", 2))
        while running.count("rolled_back") == 0:
            await asyncio.sleep(0.01)
        let_go.set()
        with pytest.raises(Conflict, match=r"did not follow within 0.05 s"):
            await loading

    with run(models, open_late, load_timeout_s=0.05) as running:
        add_version(models, 2)
        running.run(scenario())
        until(lambda: running.states() == {1: "ready", 2: "available"}, "version 2 is dropped again")
        assert running.served() == 1


def test_a_change_that_a_shutdown_interrupts_is_taken_back(models: Path) -> None:
    open_late, opening, let_go = held_back(2)

    async def scenario() -> None:
        loading = asyncio.create_task(running.registry.load("books", 2))
        assert await asyncio.to_thread(opening.wait, 10)
        draining = asyncio.create_task(running.registry.drain(10))
        with pytest.raises(NotReady):
            await loading
        let_go.set()
        await draining

    with run(models, open_late) as running:
        add_version(models, 2)
        running.run(scenario())
        assert not (models / "books" / "serving.json").exists()
        assert running.count("rolled_back") == 1


def test_a_folder_that_cannot_be_written_to_is_said(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **rest: Any) -> None:
        raise OSError(30, "Read-only file system")

    with run(models) as running:
        add_version(models, 2)
        monkeypatch.setattr("service.models.desired_state.os.open", refuse)
        with pytest.raises(Conflict, match=r"'books'.*cannot be written to \(Read-only file system\)"):
            running.run(running.registry.load("books", 2))
        monkeypatch.undo()
        monkeypatch.setattr("service.models.desired_state.tempfile.mkstemp", refuse)
        with pytest.raises(Conflict, match="Read-only file system"):
            running.run(running.registry.set_removed("books", ["item-1"]))
        assert running.registry.removed("books") == []


def test_a_model_that_is_new_is_loaded_when_told(models: Path) -> None:
    with run(models) as running:
        add_version(models, 1, name="films")
        running.run(running.registry.load("films", 1))
        assert running.registry.choose("films", None).name == "films"
        add_version(models, 1, name="songs", damaged=True)
        with pytest.raises(Conflict, match="songs/1"):
            running.run(running.registry.load("songs", 1))
        assert running.registry.entry("songs").state == "failed"
        assert running.registry.not_ready() == []


def test_another_default_does_not_wait_for_what_is_being_loaded(models: Path) -> None:
    opening, let_go = threading.Event(), threading.Event()

    def open_late(bundle: Bundle) -> Engine:
        if bundle.manifest.name == "films":
            opening.set()
            assert let_go.wait(10)
        return FakeEngine(ITEMS)

    async def scenario() -> None:
        loading = asyncio.create_task(running.registry.load("films", 1))
        await asyncio.to_thread(opening.wait, 10)
        await running.registry.set_default("books", 1)
        assert running.served() == 1
        let_go.set()
        await loading

    add_version(models, 2)
    with run(models, open_late) as running:
        running.run(running.registry.load("books", 1))
        add_version(models, 1, name="films")
        running.run(scenario())


def test_a_loader_whose_priority_cannot_be_lowered_loads_all_the_same(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("service.models.loading.os.setpriority", refuse)
    with run(models) as running:  # which waits until what should serve was tried
        add_version(models, 2)
        running.run(running.registry.load("books", 2, default=True))
        assert running.served() == 2
    assert "cannot lower its priority (Operation not permitted)" in caplog.text


# -- swaps under load -----------------------------------------------------------------------------------------------------


def test_no_request_fails_over_twenty_swaps(models: Path) -> None:
    """Requests choose, think, and search, as retrieve.py does, while versions come and go."""
    answered: dict[int, int] = {}
    stop = asyncio.Event()

    async def client(number: int) -> None:
        while not stop.is_set():
            model = running.registry.choose("books", None)
            await asyncio.sleep(0)  # ids become arrays in a thread
            await asyncio.sleep(0.0005 * (number % 3))
            assert await search(model) == [0, 1, 2]
            answered[model.version] = answered.get(model.version, 0) + 1

    async def swaps() -> None:
        clients = [asyncio.create_task(client(number)) for number in range(16)]
        try:
            for swap in range(20):
                new, old = 2 - swap % 2, 1 + swap % 2
                await running.registry.load("books", new, default=True)
                await running.registry.unload("books", old)
                before = sum(answered.values())
                while sum(answered.values()) < before + 32:
                    await asyncio.sleep(0)
                    assert not any(task.done() for task in clients)
        finally:
            stop.set()
            await asyncio.gather(*clients)

    add_version(models, 2)
    with run(models, lambda bundle: FakeEngine(ITEMS)) as running:
        running.run(running.registry.set_default("books", 1))
        running.run(swaps())
        assert sum(answered.values()) >= 640
        assert set(answered) == {1, 2}
        until(lambda: running.count("unloaded") == 20, "all former versions are taken apart")


def test_a_version_is_taken_apart_once_nobody_holds_it(models: Path) -> None:
    add_version(models, 2)
    with run(models) as running:
        assert running.served() == 2
        running.run(running.registry.set_default("books", 1))
        held = running.registry.choose("books", 2)
        engine = weakref.ref(running.engines.pop(2))
        running.run(running.registry.unload("books", 2))
        until(lambda: running.states() == {1: "ready", 2: "draining"}, "the versions are so")
        assert running.run(search(held)) == [0, 1, 2]
        gc.disable()  # it must need no collection
        try:
            del held
            until(lambda: running.states() == {1: "ready", 2: "available"}, "version 2 is taken apart")
            until(lambda: engine() is None, "its engine is freed")
        finally:
            gc.enable()
        assert running.count("unloaded") == 1


# -- removals -------------------------------------------------------------------------------------------------------------


def test_removals_hold_for_every_version_and_need_no_reload(models: Path) -> None:
    with run(models) as running:
        registry = running.registry
        assert registry.removed("books") == []
        assert running.run(registry.set_removed("books", ["item-1", "gone", "item-1", "item-0"])) == ["gone"]
        assert registry.removed("books") == ["item-1", "gone", "item-0"]
        assert running.run(search(registry.choose("books", None))) == [2, 3, 4]
        add_version(models, 2)
        running.run(registry.load("books", 2))
        assert running.run(search(registry.choose("books", 2))) == [2, 3, 4]
        assert running.run(registry.set_removed("books", ["item-2"])) == []
        for version in (1, 2):
            assert running.run(search(registry.choose("books", version))) == [0, 1, 3]
        running.run(registry.set_removed("books", []))
        assert running.run(search(registry.choose("books", None))) == [0, 1, 2]
        assert registry.choose("books", None).filters.standing is None
        assert running.opened == [1, 2]
        assert DesiredState(models / "books").read(Removed) == Removed(generation=3, ids=())


def test_removals_apply_while_a_version_is_loading(models: Path) -> None:
    opening, let_go = threading.Event(), threading.Event()

    def open_late(bundle: Bundle) -> Engine:
        if bundle.manifest.version == 2:
            opening.set()
            assert let_go.wait(10)
        return FakeEngine(ITEMS, bundle.tree.leaf_of_item)

    with run(models, open_late) as running:
        add_version(models, 2)
        DesiredState(models / "books").write(Serving(generation=1, versions=(1, 2), default=2))
        until(opening.is_set, "version 2 is being opened")
        assert running.run(running.registry.set_removed("books", ["item-0"])) == []
        assert running.run(search(running.registry.choose("books", None))) == [1, 2, 3]
        let_go.set()
        until(lambda: running.served() == 2, "version 2 serves")
        assert running.run(search(running.registry.choose("books", None))) == [1, 2, 3]


class Taken:
    """The files of desired state as they may get lost, and come back."""

    def __init__(self, models: Path, how: str) -> None:
        self.models, self.books, self.removed, self.how = models, models / "books", models / "books" / "removed.json", how
        self.aside = models.parent / "aside"

    def take(self) -> None:
        match self.how:
            case "the models folder is renamed":
                self.models.rename(self.aside)
            case "the model's folder is renamed":
                self.books.rename(self.aside)
            case "the model's folder is unmounted":
                self.books.rename(self.aside)
                self.books.mkdir()
            case "the file is deleted":
                self.removed.rename(self.aside)
            case "the file cannot be looked at":
                self.removed.rename(self.aside)
                self.removed.symlink_to(self.removed)  # OSError, for any user
            case "the file cannot be read":
                self.removed.rename(self.aside)
                self.removed.mkdir()  # the same
            case "the file is malformed":
                self.removed.rename(self.aside)
                self.removed.write_text("{")

    def bring_back(self) -> None:
        match self.how:
            case "the models folder is renamed":
                self.aside.rename(self.models)
            case "the model's folder is renamed":
                self.aside.rename(self.books)
            case "the model's folder is unmounted":
                self.books.rmdir()
                self.aside.rename(self.books)
            case "the file cannot be read":
                self.removed.rmdir()
                self.aside.rename(self.removed)
            case _:
                self.aside.rename(self.removed)


LOSSES = [
    "the models folder is renamed",
    "the model's folder is renamed",
    "the model's folder is unmounted",
    "the file is deleted",
    "the file cannot be looked at",
    "the file cannot be read",
    "the file is malformed",
]


@pytest.mark.parametrize("how", LOSSES)
def test_removed_items_stay_removed_when_their_list_is_lost(models: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    taken = Taken(models, how)
    with run(models) as running:
        running.run(running.registry.set_removed("books", ["item-0", "item-1"]))
        taken.take()
        until(lambda: "books/removed.json" in str(running.books.reason), "it is said")
        for _ in range(3):
            running.registry._follower.wake()
            assert running.run(search(running.registry.choose("books", None))) == [2, 3, 4]
        assert running.registry.removed("books") == ["item-0", "item-1"]
        assert running.registry.not_ready() == []  # it answers right, and there may be nowhere else to go
        assert 'espalier_desired_state_wrong{model="books"} 1.0' in running.metrics.render().decode()
        assert len([record for record in caplog.records if "books stays as it is: books/removed.json" in record.message]) == 1
        taken.bring_back()
        until(lambda: running.books.reason is None, "it is over")
        assert running.run(search(running.registry.choose("books", None))) == [2, 3, 4]
        assert 'espalier_desired_state_wrong{model="books"} 0.0' in running.metrics.render().decode()
        running.run(running.registry.set_removed("books", []))
        assert running.run(search(running.registry.choose("books", None))) == [0, 1, 2]


def test_a_lost_list_is_ended_by_a_new_one(models: Path) -> None:
    with run(models) as running:
        running.run(running.registry.set_removed("books", ["item-0"]))
        (models / "books" / "removed.json").unlink()
        until(lambda: running.books.reason is not None, "it is said")
        running.run(running.registry.set_removed("books", []))
        assert running.run(search(running.registry.choose("books", None))) == [0, 1, 2]
        until(lambda: running.books.reason is None, "all is well")
        (models / "books" / "removed.json").unlink()  # an empty one can get lost
        running.run(running.registry.set_removed("books", ["item-1"]))
        assert running.run(search(running.registry.choose("books", None))) == [0, 2, 3]
        until(lambda: running.books.reason is None, "all is well")


def test_a_list_that_cannot_be_read_at_the_start_lets_nothing_serve(models: Path) -> None:
    DesiredState(models / "books").write(Removed(generation=1, ids=("item-0",)))
    taken = Taken(models, "the file cannot be read")
    taken.take()
    with run(models) as running:
        [reason] = running.registry.not_ready()
        assert "books/removed.json" in reason
        taken.bring_back()  # with the modification time that it had
        until(lambda: not running.registry.not_ready(), "ready")
        assert running.run(search(running.registry.choose("books", None))) == [1, 2, 3]


def test_a_file_that_becomes_readable_is_read_though_it_was_not_written(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after chmod, which changes neither its time nor its size."""
    denied = [True]
    read_bytes = Path.read_bytes

    def deny(path: Path) -> bytes:
        if denied[0] and path.name == "removed.json":
            raise PermissionError(13, "Permission denied")
        return read_bytes(path)

    DesiredState(models / "books").write(Removed(generation=1, ids=("item-0",)))
    monkeypatch.setattr(Path, "read_bytes", deny)
    with run(models) as running:
        [reason] = running.registry.not_ready()
        assert "books/removed.json: got 'Permission denied'" in reason
        denied[0] = False
        until(lambda: not running.registry.not_ready(), "ready")
        assert running.run(search(running.registry.choose("books", None))) == [1, 2, 3]


def test_a_models_folder_that_cannot_be_listed_is_said_once(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = [0]

    def broken(folder: Path) -> Any:
        looks[0] += 1
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("service.models.follower.SCAN_S", 0.0)
    with run(models) as running:
        monkeypatch.setattr("service.models.follower.find_versions", broken)
        until(lambda: looks[0] >= 3, "it is looked at again")
        assert caplog.text.count("the models folder cannot be read: Input/output error") == 1
        assert running.run(search(running.registry.choose("books", None))) == [0, 1, 2]


def test_a_pin_holds_while_the_folder_is_away(models: Path) -> None:
    add_version(models, 2)
    with run(models, poll_s=0.01) as running:
        running.run(running.registry.set_default("books", 1))
        taken = Taken(models, "the model's folder is unmounted")
        taken.take()
        until(lambda: "books/serving.json" in str(running.books.reason), "it is said")
        assert running.served() == 1
        assert running.books.serving is not None
        taken.bring_back()
        until(lambda: running.books.reason is None, "it is over")
        assert running.served() == 1
        assert running.books.serving is not None
        (models / "books" / "serving.json").unlink()
        until(lambda: running.served() == 2, "a pin that is deleted is lifted")


@pytest.mark.parametrize(("before", "found"), [((), [0, 1, 2]), (("item-1",), [0, 2, 3])])
def test_a_removal_that_is_taken_back_leaves_what_was_removed_before(
    models: Path, monkeypatch: pytest.MonkeyPatch, before: tuple[str, ...], found: list[int]
) -> None:
    applying, let_go = threading.Event(), threading.Event()

    def late(entry: Entry, ids: tuple[str, ...]) -> None:
        applying.set()
        assert let_go.wait(10)
        remove(entry, ids)

    async def scenario() -> None:
        changing = asyncio.create_task(running.registry.set_removed("books", ["item-0"]))
        assert await asyncio.to_thread(applying.wait, 10)
        while running.count("rolled_back") == 0:
            await asyncio.sleep(0.01)
        let_go.set()
        with pytest.raises(Conflict, match=r"did not follow within 0.5 s"):
            await changing

    if before:  # else there is no file
        DesiredState(models / "books").write(Removed(generation=9, ids=before))
    with run(models, load_timeout_s=0.5) as running:
        swapper = running.registry._follower._swapper
        remove = swapper.remove
        monkeypatch.setattr(swapper, "remove", late)
        running.run(scenario())
        until(lambda: running.registry.removed("books") == [*before], "it is taken back")
        assert running.run(search(running.registry.choose("books", None))) == found
        until(lambda: running.books.reason is None, "all is well")


def test_items_can_be_removed_while_a_pinned_version_fails(models: Path) -> None:
    add_version(models, 2, damaged=True)
    DesiredState(models / "books").write(Serving(generation=1, versions=(1, 2), default=2))
    with run(models) as running:
        running.run(running.registry.set_removed("books", ["item-0"]))
        assert running.run(search(running.registry.choose("books", 1))) == [1, 2, 3]


# -- the folder changes by itself -----------------------------------------------------------------------------------------


def test_files_that_are_edited_by_hand_are_followed(models: Path) -> None:
    add_version(models, 2)
    with run(models) as running:
        state = DesiredState(models / "books")
        (models / "books" / "serving.json").write_text('{"generation": 1, "versions": [1], "default": 1}')
        until(lambda: running.served() == 1, "the pinned version serves")
        (models / "books" / "serving.json").write_text('{"generation": 2, "versions": [2')
        until(lambda: running.books.reason is not None, "the malformed file is said")
        assert "books/serving.json" in str(running.books.reason)
        assert running.served() == 1
        with pytest.raises(Conflict, match="repair or delete"):
            running.run(running.registry.load("books", 2))
        state.write(Serving(generation=3, versions=(1, 2), default=2))
        until(lambda: running.served() == 2, "the repaired file is followed")
        assert running.books.reason is None
        (models / "books" / "serving.json").unlink()
        until(lambda: 1 not in running.books.ready, "without a file one version serves alone")
        assert running.served() == 2


def test_a_new_version_is_served_when_the_folder_is_polled(models: Path) -> None:
    with run(models, poll_s=0.01) as running:
        assert running.served() == 1
        add_version(models, 2)
        until(lambda: running.served() == 2, "the new version serves")
        until(lambda: running.states() == {1: "available", 2: "ready"}, "the former one is dropped")
        add_version(models, 3, damaged=True)
        until(lambda: 3 in running.books.reasons, "the damaged version was tried")
        tried = running.opened.count(2)
        assert running.served() == 2
        add_version(models, 1, name="films")
        until(lambda: "films" in running.registry.entries and running.registry.entry("films").loaded, "the new model serves")
        assert running.count("failed") == 1  # once, not at every look
        damage(models / "books" / "3")
        until(lambda: running.served() == 3, "the repaired version serves")
        assert tried == 1


def test_a_pinned_model_is_not_polled(models: Path) -> None:
    with run(models, poll_s=0.01) as running:
        running.run(running.registry.set_default("books", 1))
        add_version(models, 2)
        until(lambda: running.books.versions == (1, 2), "the new version was seen")
        add_version(models, 1, name="films")
        until(lambda: "films" in running.registry.entries and running.registry.entry("films").loaded, "another look was taken")
        assert running.opened == [1, 1]
        assert running.served() == 1


def test_without_polling_a_new_version_is_only_listed(models: Path) -> None:
    with run(models) as running:
        add_version(models, 2)
        until(lambda: running.states() == {1: "ready", 2: "available"}, "the new version is listed")
        assert running.served() == 1


def test_a_bundle_that_is_changed_in_place_stops(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_version(models, 2)
    with run(models) as running:
        running.run(running.registry.load("books", 1, default=True))
        damage(models / "books" / "1")
        until(lambda: running.books.loaded is None, "the changed version stops")
        until(lambda: running.states() == {1: "failed", 2: "ready"}, "the versions are so")
        [reason] = running.registry.not_ready()
        assert "changed in place" in reason
        with pytest.raises(NotReady):
            running.served()
        assert running.served(2) == 2
        running.run(running.registry.set_default("books", 2))
        assert running.registry.not_ready() == []
    assert "changed in place" in caplog.text


@pytest.mark.parametrize("name", ["items.arrow", "nodes.safetensors", "manifest.json"])
def test_a_bundle_that_is_touched_serves_on(models: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with run(models) as running:
        before = running.registry.choose("books", None)
        for times in (1, 2):
            time_ns = time.time_ns() - times
            os.utime(models / "books" / "1" / name, ns=(time_ns, time_ns))
            until(lambda wanted=times: caplog.text.count("hold what they held") == wanted, "it was compared")  # type: ignore[misc]
            assert running.registry.choose("books", None) is before
        for _ in range(3):
            running.registry._follower.wake()
            assert running.run(search(running.registry.choose("books", None))) == [0, 1, 2]
        assert (running.books.reason, running.count("failed"), running.opened) == (None, 0, [1])
        damage(models / "books" / "1")
        until(lambda: running.books.loaded is None, "it is watched as before")


def test_a_bundle_serves_while_its_contents_are_compared(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, let_go = threading.Event(), threading.Event()

    def slow(stream: Any, name: str) -> Any:
        reading.set()
        assert let_go.wait(10)
        return digest(stream, name)

    digest = hashlib.file_digest
    add_version(models, 2)
    DesiredState(models / "books").write(Serving(generation=1, versions=(1,), default=1))
    with run(models) as running:
        monkeypatch.setattr("service.models.loading.hashlib.file_digest", slow)
        damage(models / "books" / "1")
        until(reading.is_set, "it is being compared")
        assert running.run(search(running.registry.choose("books", None))) == [0, 1, 2]
        monkeypatch.setattr("service.models.loading.hashlib.file_digest", digest)
        running.run(running.registry.load("books", 2))  # nor does a version that is to be loaded wait
        assert not let_go.is_set()
        let_go.set()
        until(lambda: 1 not in running.books.ready, "what is not as it was stops")
        assert "changed in place" in running.books.reasons[1]


def test_what_is_written_to_while_it_is_compared_says_nothing(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that was compared already may be another one now."""
    file = models / "books" / "1" / "items.arrow"

    def while_it_is_written(stream: Any, name: str) -> Any:
        os.utime(file)
        return digest(stream, name)

    digest = hashlib.file_digest
    with run(models) as running:
        running.registry._follower.stop()
        running.registry._follower._threads[0].join()
        loaded = running.registry.choose("books", None)
        os.utime(file, (1, 1))
        with monkeypatch.context() as patch:
            patch.setattr("service.models.loading.hashlib.file_digest", while_it_is_written)
            assert compare_contents(loaded) is None
        assert compare_contents(loaded) is True
        assert compare_files(loaded.files) == "same"
        damage(models / "books" / "1")
        assert compare_contents(loaded) is False
        assert compare_files(loaded.files) == "written"


def test_a_bundle_of_another_size_is_not_compared(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(loaded: LoadedModel) -> bool:
        raise AssertionError("its size says enough")

    monkeypatch.setattr("service.models.swapping.compare_contents", never)
    with run(models) as running:
        with (models / "books" / "1" / "golden.parquet").open("ab") as stream:
            stream.write(b"more")
        until(lambda: running.books.loaded is None, "it stops")


def test_comparing_what_is_touched_again_and_again_takes_a_tenth_of_the_time(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, compared = [1000.0], [0]

    def two_minutes(loaded: LoadedModel) -> None:  # and somebody writes meanwhile
        compared[0] += 1
        now[0] += 120

    monkeypatch.setattr("service.models.swapping.monotonic", lambda: now[0])
    monkeypatch.setattr("service.models.swapping.compare_contents", two_minutes)
    with run(models) as running:
        swapper, loaded = running.registry._follower._swapper, running.registry.choose("books", None)
        running.registry._follower.stop()
        running.registry._follower._threads[0].join()
        os.utime(models / "books" / "1" / "items.arrow", (1, 1))
        for at, wanted in ((1000.0, 1), (1120.0, 1), (1120.0 + 9 * 120 - 1, 1), (1120.0 + 9 * 120, 2)):
            now[0] = at
            assert not swapper.check_files(running.books, loaded)
            swapper._comparing.join()
            assert compared[0] == wanted


def test_without_a_state_the_version_before_serves_when_one_is_changed_in_place(models: Path) -> None:
    add_version(models, 2)
    with run(models) as running:
        damage(models / "books" / "2")
        until(lambda: running.books.loaded is not None and running.served() == 1, "version 1 serves")
        until(lambda: running.states() == {1: "ready", 2: "failed"}, "the versions are so")


@pytest.mark.parametrize("how", ["deleted", "renamed", "replaced"])
def test_a_bundle_that_is_deleted_renamed_or_replaced_serves_on(models: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    with run(models) as running:
        path = models / "books" / "1"
        if how == "deleted":
            shutil.rmtree(path)
        else:
            path.rename(models / "aside")
            if how == "replaced":
                shutil.copytree(models / "aside", path)
        until(lambda: "deleted or replaced" in caplog.text, "it is said")
        for _ in range(3):
            running.registry._follower.wake()
            assert running.run(search(running.registry.choose("books", None))) == [0, 1, 2]
        assert running.registry.not_ready() == []
        assert caplog.text.count("deleted or replaced") == 1


def test_reasons_name_paths_below_the_models_folder(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    assert told(f"{folder}/books/1/items.arrow: missing", folder) == "books/1/items.arrow: missing"
    assert told("models/books/1: missing, see submodels/x", Path("models")) == "books/1: missing, see submodels/x"


# -- the end --------------------------------------------------------------------------------------------------------------


def test_leaving_is_said_while_requests_are_served(models: Path) -> None:
    with run(models) as running:
        running.registry.leaving = True
        assert running.registry.not_ready() == ["shutting down"]
        assert running.run(search(running.registry.choose("books", None))) == [0, 1, 2]
        running.run(running.registry.drain(10))
        with pytest.raises(NotReady, match="shutting down"):
            running.served()
