"""Models and versions: what serves, and how that changes while requests are served. Over a fake engine, in one process."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path

import pytest

from espalier.bundle import Bundle
from espalier.errors import BundleNotFound, InvalidQuery
from espalier.search import Engine
from espalier.serving import Serving
from service.errors import Conflict, ModelNotFound, NotReady
from service.models.desired_state import DesiredState, Removed
from service.models.registry import Registry
from service.settings import Settings
from service.watch.metrics import Metrics
from tests.service.fake_engine import FakeEngine
from tests.service.models.registry import ITEMS, add_version, run, search
from tests.waiting import until


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
        running.run(running.registry.changes.set_default("books", 1))  # the way out
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
            running.run(running.registry.changes.load("books", 2))
        assert running.served() == 1
        assert running.states()[2] == "failed"
        assert 'version="2"' not in running.metrics.render().decode()
        until(lambda: opened[1]() is None, "the failed engine is freed")


def test_leaving_is_said_while_requests_are_served(models: Path) -> None:
    with run(models) as running:
        running.registry.leaving = True
        assert running.registry.not_ready() == ["shutting down"]
        assert running.run(search(running.registry.choose("books", None))) == [0, 1, 2]
        running.run(running.registry.drain(10))
        with pytest.raises(NotReady, match="shutting down"):
            running.served()
