"""Models and versions: what serves, and how that changes while requests are served. Over a fake engine, in one process."""

from __future__ import annotations

import logging
import sys
import weakref
from pathlib import Path

import pytest

from espalier.bundle import Bundle
from espalier.search import Engine
from espalier.serving import Serving
from service.errors import Conflict, NotReady
from service.models.desired_state import DesiredState
from service.models.loading import LOADER_SWITCH_S, OVERLOAD_SWITCH_S, USUAL_SWITCH_S, in_overload, short_switch_interval
from tests.service.fake_engine import FakeEngine
from tests.service.models.lost import killed_while_opening
from tests.service.models.registry import Held, add_version, run
from tests.service.running import ITEMS
from tests.waiting import until


def serving(*versions: int, default: int) -> Serving:
    return Serving(generation=4, versions=versions, default=default)


@pytest.mark.parametrize(
    ("others", "damaged", "killed", "pinned", "served", "states"),
    [
        ((2, 10), 0, 0, None, 10, {1: "available", 2: "available", 10: "ready"}),
        ((2, 3), 3, 0, None, 2, {1: "available", 2: "ready", 3: "failed"}),
        ((2,), 0, 2, None, 1, {1: "ready", 2: "failed"}),
        ((), 0, 1, None, 1, {1: "ready"}),
        ((2, 3), 0, 0, serving(1, 2, default=1), 1, {1: "ready", 2: "ready", 3: "available"}),
        ((2,), 2, 0, serving(1, 2, default=2), None, {1: "ready", 2: "failed"}),
        ((2,), 0, 2, serving(1, 2, default=1), 1, {1: "ready", 2: "failed"}),
        ((), 0, 1, serving(1, default=1), 1, {1: "ready"}),
    ],
)
@pytest.mark.parametrize("poll_s", [None, 0.01])
def test_what_serves_after_a_start(
    models: Path,
    others: tuple[int, ...],
    damaged: int,
    killed: int,
    pinned: Serving | None,
    served: int | None,
    states: dict[int, str],
    poll_s: float | None,
) -> None:
    """The pinned versions; without a state the highest that loads. One whose opening ended a process waits, unless nothing else is left."""
    for version in others:
        add_version(models, version, damaged=version == damaged)
    if killed:
        killed_while_opening(models / "books" / str(killed))
    if pinned is not None:
        DesiredState(models / "books").write(pinned)
    with run(models, poll_s=poll_s) as running:
        until(lambda: running.states() == states, running.states)
        ready = [version for version, state in states.items() if state == "ready"]
        assert [running.served(version) for version in ready] == ready
        assert sorted(running.opened) == ready
        if served is None:
            assert len(running.registry.not_ready()) == 1
            with pytest.raises(NotReady):
                running.served()
        else:
            assert running.served() == served
            assert running.registry.not_ready() == []
            assert running.registry.choose(None, None) is running.registry.choose("books", served)
        assert (running.books.reason is None) == ("failed" not in states.values())
        if damaged:
            assert running.books.reasons[damaged].startswith(f"books/{damaged}/nodes.safetensors: its SHA-256")
        assert running.count("loaded") == len(ready)
        assert killed or running.count("failed") == (damaged > 0)
        assert [*models.glob("books/.opening.*")] == [] or killed == 2


def test_the_way_out_of_a_pinned_version_that_fails_is_another_default(models: Path) -> None:
    add_version(models, 2, damaged=True)
    DesiredState(models / "books").write(serving(1, 2, default=2))
    with run(models) as running:
        [reason] = running.registry.not_ready()
        assert reason.startswith("books version 2: failed: books/2/nodes.safetensors")
        assert str(models) not in reason
        assert running.remove("item-0") == []
        assert running.found(1) == [1, 2, 3]
        running.run(running.registry.changes.load("books", 1, default=True))
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
        assert running.found() == [0, 1, 2]
        running.run(running.registry.drain(10))
        with pytest.raises(NotReady, match="shutting down"):
            running.served()


# -- how long one thread may keep the interpreter from another: as short as whoever wants it shortest ---------------------


def test_threads_take_turns_faster_in_overload_and_fastest_while_a_version_is_loaded() -> None:
    first, second = in_overload(Path("books/1")), in_overload(Path("books/2"))
    before, found = sys.getswitchinterval(), []
    try:
        for say, overloaded in ((first, True), (second, True), (first, False), (second, False), (first, True)):
            say(overloaded)
            found.append(sys.getswitchinterval())
        with short_switch_interval():
            found.append(sys.getswitchinterval())
        found.append(sys.getswitchinterval())
        first(False)
    finally:
        sys.setswitchinterval(before)
    assert found == pytest.approx([OVERLOAD_SWITCH_S] * 3 + [USUAL_SWITCH_S, OVERLOAD_SWITCH_S, LOADER_SWITCH_S, OVERLOAD_SWITCH_S])


def test_a_version_that_is_loading_when_the_service_stops_is_no_failure(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = Held(2)
    with run(models, held.open) as running:
        add_version(models, 2)
        DesiredState(models / "books").write(serving(1, 2, default=2))
        until(held.opening.is_set, "version 2 is being opened")
        running.run(running.registry.drain(1))
        held.let_go.set()
        until(lambda: running.books.loading is None, "the loader has dropped it")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
