"""Changes of what serves, as an admin makes them: they take effect, or are taken back whole."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from espalier.errors import InvalidData
from espalier.serving import Serving
from service.errors import Conflict, NotFound, NotReady
from service.models.desired_state import DesiredState, FollowedFile, Removed
from tests.service.models.registry import Held, Running, add_version, damage, run, search
from tests.waiting import until


def test_load_default_unload(models: Path) -> None:
    with run(models) as running:
        registry = running.registry
        running.run(registry.changes.load("books", 1))  # it serves, and is not pinned by that
        assert not (models / "books" / "serving.json").exists()
        running.run(registry.changes.load("books", 1, default=True))
        assert DesiredState(models / "books").read(Serving) == Serving(generation=1, versions=(1,), default=1)
        with pytest.raises(Conflict, match="is the default"):
            running.run(registry.changes.unload("books", 1))
        add_version(models, 2)
        running.run(registry.changes.load("books", 2))
        assert (running.served(), running.served(2)) == (1, 2)
        assert json.loads((models / "books" / "serving.json").read_text()) == {"generation": 2, "versions": [1, 2], "default": 1}
        running.run(registry.changes.load("books", 2))  # nothing to do
        running.run(registry.changes.load("books", 2, default=True))
        assert (running.served(), running.served(1)) == (2, 1)
        running.run(registry.changes.load("books", 1, default=True))  # back at once: nothing is loaded
        assert running.served() == 1
        assert running.opened == [1, 2]
        with pytest.raises(Conflict, match="is the default"):
            running.run(registry.changes.unload("books", 1))
        running.run(registry.changes.unload("books", 2))
        with pytest.raises(NotFound):
            running.served(2)
        until(lambda: running.states() == {1: "ready", 2: "available"}, "version 2 is taken apart")
        until(lambda: running.count("unloaded") == 1, "it is counted")
        assert DesiredState(models / "books").read(Serving) == Serving(generation=5, versions=(1,), default=1)
        assert (running.count("loaded"), running.count("unloaded"), running.count("failed")) == (2, 1, 0)
        text = running.metrics.render().decode()
        assert 'espalier_model_info{engine="fake",model="books",version="1"} 1.0\n' in text
        assert 'version="2"' not in text


def test_a_failed_load_disturbs_nothing_and_is_taken_back(models: Path) -> None:
    with run(models) as running:
        before = running.registry.choose("books", None)
        add_version(models, 2, damaged=True)
        with pytest.raises(Conflict, match=r"Nothing was changed.*books/2/nodes.safetensors: its SHA-256"):
            running.run(running.registry.changes.load("books", 2, default=True))
        assert running.registry.choose("books", None) is before
        assert not (models / "books" / "serving.json").exists()
        until(lambda: running.states() == {1: "ready", 2: "failed"}, "the versions are so")
        assert running.count("rolled_back") == 1
        damage(models / "books" / "2")  # the same bit again: repaired
        running.run(running.registry.changes.load("books", 2, default=True))
        assert running.served() == 2
        assert running.books.reason is None


def test_a_change_that_is_taken_back_brings_no_other_version(models: Path) -> None:
    with run(models) as running:
        add_version(models, 2)
        add_version(models, 3, damaged=True)
        with pytest.raises(Conflict):
            running.run(running.registry.changes.load("books", 3))
        assert running.served() == 1
        running.run(running.registry.changes.load("books", 1, default=True))
        add_version(models, 4, damaged=True)
        with pytest.raises(Conflict):
            running.run(running.registry.changes.load("books", 4, default=True))
        assert DesiredState(models / "books").read(Serving) == Serving(generation=3, versions=(1,), default=1)
        until(lambda: running.states() == {1: "ready", 2: "available", 3: "failed", 4: "failed"}, "the versions are so")


async def test_one_change_waits_for_no_other(changing: Running, held: Held) -> None:
    loading = await held.begun(changing.registry.changes.load("books", 2))
    with pytest.raises(Conflict, match="under way"):
        await changing.registry.changes.load("books", 1, default=True)
    assert changing.states()[2] == "loading"
    assert changing.registry.not_ready() == []
    held.let_go.set()
    await loading


def test_another_default_does_not_wait_for_a_model_that_is_being_loaded(models: Path) -> None:
    async def scenario() -> None:
        loading = await held.begun(running.registry.changes.load("films", 1))
        await running.registry.changes.load("books", 1, default=True)
        assert running.served() == 1
        held.let_go.set()
        await loading

    held = Held("films")
    add_version(models, 2)
    with run(models, held.open) as running:
        running.run(running.registry.changes.load("books", 1))
        add_version(models, 1, name="films")
        running.run(scenario())
        assert running.registry.choose("films", None).name == "films"


async def test_a_change_goes_on_when_its_client_hangs_up(changing: Running, held: Held) -> None:
    loading = await held.begun(changing.registry.changes.load("books", 2, default=True))
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    held.let_go.set()
    while changing.served() != 2:
        await asyncio.sleep(0)


@pytest.mark.settings(load_timeout_s=0.05)
async def test_a_load_that_takes_too_long_is_taken_back(changing: Running, held: Held) -> None:
    loading = asyncio.create_task(changing.registry.changes.load("books", 2))
    while changing.count("rolled_back") == 0:
        await asyncio.sleep(0.01)
    held.let_go.set()
    with pytest.raises(Conflict, match=r"did not follow within 0.05 s"):
        await loading
    until(lambda: changing.states() == {1: "ready", 2: "available"}, "version 2 is dropped again")
    assert changing.served() == 1


async def test_a_change_that_a_shutdown_interrupts_is_taken_back_and_leaves_no_note(changing: Running, held: Held) -> None:
    def notes() -> list[Path]:
        return list((changing.models / "books").glob(".opening.books.2.*"))

    loading = await held.begun(changing.registry.changes.load("books", 2))
    assert len(notes()) == 1
    draining = asyncio.create_task(changing.registry.drain(10))
    with pytest.raises(NotReady):
        await loading
    assert notes() == []
    held.let_go.set()
    await draining
    assert not (changing.models / "books" / "serving.json").exists()
    assert changing.count("rolled_back") == 1


def test_a_folder_that_cannot_be_written_to_is_said(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **rest: Any) -> None:
        raise OSError(30, "Read-only file system")

    with run(models) as running:
        add_version(models, 2)
        monkeypatch.setattr("service.models.desired_state.os.open", refuse)
        with pytest.raises(Conflict, match=r'"books".*cannot be written \(Read-only file system\)'):
            running.run(running.registry.changes.load("books", 2))
        monkeypatch.undo()
        for number, remedy in ((errno.EROFS, "make it writable for the service"), (errno.ENOSPC, r"make room on its disk\.")):
            error = OSError(number, os.strerror(number))
            monkeypatch.setattr("service.models.desired_state.atomic_write", Mock(side_effect=error))
            with pytest.raises(Conflict, match=rf"\({error.strerror}\), so .*: {remedy}"):
                running.remove("item-1")
        assert running.registry.entry("books").removed == ()


def test_a_version_is_taken_apart_once_nobody_holds_it(models: Path) -> None:
    add_version(models, 2)
    with run(models) as running:
        assert running.served() == 2
        running.run(running.registry.changes.load("books", 1, default=True))
        held = running.registry.choose("books", 2)
        engine = weakref.ref(running.engines.pop(2))
        running.run(running.registry.changes.unload("books", 2))
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


# -- the files of desired state: written whole, read again, and said where they are malformed -----------------------------


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
        ('{"generation": 1, "versions": [1]}', "default"),
        ('{"generation": 0, "versions": [1], "default": 1}', "generation"),
        ('{"generation": 1, "versions": [], "default": 1}', "versions"),
        ('{"generation": 1, "versions": [0], "default": 0}', "versions.0"),
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
    monkeypatch.setattr("service.models.desired_state.time.monotonic", lambda: now[0])
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
    assert watched.problem is None


@pytest.mark.parametrize("kind", [Serving, Removed])
def test_one_change_of_a_file_at_a_time(tmp_path: Path, kind: type[Serving] | type[Removed]) -> None:
    with DesiredState(tmp_path).locked(kind), pytest.raises(Conflict, match="under way"), DesiredState(tmp_path).locked(kind):
        pass
    with DesiredState(tmp_path).locked(Serving), DesiredState(tmp_path).locked(Removed):
        pass
