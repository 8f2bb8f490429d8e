"""The models folder changes by itself: edited, polled, damaged, replaced."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from espalier.serving import Serving
from service.errors import Conflict, NotReady
from service.models.desired_state import DesiredState
from service.models.loading import compare_contents, compare_files, relative_paths
from service.run_folder import Page
from tests.service.models.registry import Running, add_version, damage, run
from tests.waiting import until


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
            running.run(running.registry.changes.load("books", 2))
        state.write(Serving(generation=3, versions=(1, 2), default=2))
        until(lambda: running.served() == 2, "the repaired file is followed")
        assert running.books.reason is None
        (models / "books" / "serving.json").unlink()
        until(lambda: 1 not in running.books.ready, "without a file one version serves alone")
        assert running.served() == 2


def test_a_service_is_not_ready_before_its_other_workers_are(models: Path, tmp_path: Path) -> None:
    """They take connections, too."""
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / "1.lock").open("w") as lock, run(models, run_folder=folder, workers=2, poll_s=0.01) as running:
        fcntl.flock(lock, fcntl.LOCK_EX)
        until(lambda: running.books.progress.serves, "this worker serves")
        add_version(models, 1, name="films")
        until(lambda: "films" in running.registry.entries, "a model has come late, for which nobody waits")
        assert running.registry.not_ready() == ["another worker has not loaded every model yet"]
        Page(folder, 1, "json").write(b'{"books": {"serves": true}}')
        assert running.registry.not_ready() == []
        (folder / "1.json").unlink()
        assert running.registry.not_ready() == []  # one that comes in for it takes no connection before it has loaded


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
        wait_for_films(running)
        assert running.count("failed") == 1  # once, not at every look
        damage(models / "books" / "3")
        until(lambda: running.served() == 3, "the repaired version serves")
        assert tried == 1


def wait_for_films(running: Running) -> None:
    """Until a new model serves: another look was taken."""
    add_version(running.models, 1, name="films")
    until(lambda: "films" in running.registry.entries and running.registry.entry("films").loaded, "the new model serves")


@pytest.mark.parametrize(("poll_s", "pinned"), [(0.01, True), (None, False)])
def test_a_new_version_is_only_listed_where_the_model_is_pinned_or_not_polled(models: Path, poll_s: float | None, pinned: bool) -> None:
    with run(models, poll_s=poll_s) as running:
        if pinned:
            running.run(running.registry.changes.load("books", 1, default=True))
        add_version(models, 2)
        until(lambda: running.states() == {1: "ready", 2: "available"}, "the new version is listed")
        if pinned:
            wait_for_films(running)
        assert running.opened == [1] * (1 + pinned)
        assert running.served() == 1


def test_a_bundle_that_is_changed_in_place_stops(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_version(models, 2)
    with run(models) as running:
        running.run(running.registry.changes.load("books", 1, default=True))
        damage(models / "books" / "1")
        until(lambda: running.books.loaded is None, "the changed version stops")
        until(lambda: running.states() == {1: "failed", 2: "ready"}, "the versions are so")
        [reason] = running.registry.not_ready()
        assert "changed in place" in reason
        with pytest.raises(NotReady):
            running.served()
        assert running.served(2) == 2
        running.run(running.registry.changes.load("books", 2, default=True))
        assert running.registry.not_ready() == []
    assert "changed in place" in caplog.text


@pytest.mark.parametrize("name", ["items.arrow", "nodes.safetensors", "manifest.json"])
def test_a_bundle_that_is_touched_serves_on(models: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    def compared(times: int) -> bool:
        return caplog.text.count("with the same content") == times

    with run(models) as running:
        before = running.registry.choose("books", None)
        for times in (1, 2):
            time_ns = time.time_ns() - times
            os.utime(models / "books" / "1" / name, ns=(time_ns, time_ns))
            until(partial(compared, times), "it was compared")
            assert running.registry.choose("books", None) is before
        for _ in range(3):
            running.registry._follower.wake()
            assert running.found() == [0, 1, 2]
        assert (running.books.reason, running.count("failed"), running.opened) == (None, 0, [1])
        damage(models / "books" / "1")
        until(lambda: running.books.loaded is None, "it is watched as before")


@pytest.mark.parametrize(("pinned", "late"), [(True, True), (False, True), (True, False)])
def test_what_is_whole_again_serves_again_where_nothing_else_does(models: Path, pinned: bool, late: bool) -> None:
    """late: cut and restored while it serves; otherwise at the start, as where a cut file has ended the process."""
    file = models / "books" / "1" / "nodes.safetensors"
    whole = file.read_bytes()
    if pinned:
        DesiredState(models / "books").write(Serving(generation=3, versions=(1,), default=1))
    if not late:
        file.write_bytes(whole[:100])
    with run(models) as running:
        file.write_bytes(whole[:100])
        until(lambda: running.states() == {1: "failed"}, "it does not serve")
        assert running.registry.not_ready() != []
        file.write_bytes(whole)
        until(lambda: running.states() == {1: "ready"}, "it serves")
        assert running.registry.not_ready() == []
        assert running.served() == 1


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
        assert running.found() == [0, 1, 2]
        monkeypatch.setattr("service.models.loading.hashlib.file_digest", digest)
        running.run(running.registry.changes.load("books", 2))  # nor does a version that is to be loaded wait
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


def test_a_file_that_replaces_another_one_is_never_taken_for_it(models: Path) -> None:
    """The file system may give a new file the inode number of a file that was deleted just before."""
    with run(models) as running:
        running.registry._follower.stop()
        running.registry._follower._threads[0].join()
        loaded = running.registry.choose("books", None)
        files = [file for file, before in loaded.files.items() if before is not None]
        assert len(files) > 3
        for file in files:
            content = file.read_bytes()
            file.unlink()
            file.write_bytes(content[::-1] + b"longer")
            assert compare_files(loaded.files) == "elsewhere", file


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
            assert running.found() == [0, 1, 2]
        assert running.registry.not_ready() == []
        assert caplog.text.count("deleted or replaced") == 1


def test_a_folder_that_was_renamed_by_hand_is_refused_with_the_name_that_it_should_have(models: Path) -> None:
    shutil.copytree(models / "books", models / "novels")
    with run(models) as running:
        reason = running.registry.entry("novels").reasons[1]
    assert "novels/1: its manifest says books version 1; rename the folder to books/1" in reason


def test_reasons_name_paths_below_the_models_folder(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    assert relative_paths(f"{folder}/books/1/items.arrow: missing", folder) == "books/1/items.arrow: missing"
    assert relative_paths("models/books/1: missing, see submodels/x", Path("models")) == "books/1: missing, see submodels/x"
