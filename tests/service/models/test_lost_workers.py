"""Changes when workers are killed or stopped: none is half made, and one worker holds up no removal."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
import threading
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from espalier.bundle import Bundle
from espalier.search import Engine
from espalier.serving import Serving
from service.errors import Conflict
from service.models import follower as follower_module
from service.models.desired_state import DesiredState, Removed
from service.models.openings import Openings
from tests.service.fake_engine import FakeEngine
from tests.service.models.lost import STOPPED, killed, killed_while_changing, killed_while_opening, run_folder_of, say
from tests.service.models.registry import Held, add_version, run
from tests.waiting import until


@pytest.fixture
def two(models: Path) -> Path:
    """A models folder with versions 1 and 2 of `books`."""
    add_version(models, 2)
    return models


def serving_of(models: Path) -> Serving | None:
    return DesiredState(models / "books").read(Serving)


# -- versions whose loading kills ----------------------------------------------------------------------------------------


def test_a_version_whose_opening_ended_a_process_waits_until_it_is_asked_for(two: Path) -> None:
    killed_while_opening(two / "books" / "2")
    with run(two) as running:
        assert "a process ended while it opened the version" in str(running.books.reason)
        running.run(running.registry.changes.load("books", 2, default=True))
        assert (running.served(), running.books.reason) == (2, None)
    with run(two) as running:
        assert running.served() == 2


def test_a_process_that_ends_on_purpose_leaves_no_note_of_what_it_was_about_to_open(two: Path) -> None:
    """Its loader goes from version to version while the service drains, until the process is gone."""

    def leave() -> None:
        openings = Openings(None)
        openings.stop()
        with openings.noted(two / "books" / "2"):
            os.kill(os.getpid(), signal.SIGKILL)

    killed(leave)
    with run(two) as running:
        assert running.served() == 2


def test_where_the_models_folder_has_no_locks_versions_are_opened_without_a_note(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some file systems that several hosts share."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("service.models.openings.fcntl.flock", unsupported)
    with run(models) as running:
        assert running.served() == 1
    assert [*models.glob("books/.opening.*")] == []


def test_a_version_in_its_place_is_tried(two: Path) -> None:
    killed_while_opening(two / "books" / "2")
    shutil.rmtree(two / "books" / "2")
    add_version(two, 2)
    with run(two) as running:
        assert running.served() == 2


def test_what_other_workers_serve_is_tried_again_but_not_for_ever(two: Path, tmp_path: Path) -> None:
    """Where workers are killed for another reason, one that begins may be among them."""
    with run_folder_of(tmp_path / "run", versions=[2]) as folder:
        for times in (1, 2):
            for _ in range(times):
                killed_while_opening(two / "books" / "2")
            with run(two, run_folder=folder) as running:
                assert running.served() == 2
        for _ in range(3):
            killed_while_opening(two / "books" / "2")
        with run(two, run_folder=folder) as running:
            assert running.served() == 1


@pytest.mark.parametrize("lacking", [True, False])
def test_a_version_that_another_worker_has_left_out_is_opened_there_when_it_is_asked_for(two: Path, tmp_path: Path, lacking: bool) -> None:
    """Whichever worker is asked. The one that lacks it does nothing, so that the change is taken back."""
    DesiredState(two / "books").write(Serving(generation=4, versions=(1, 2), default=1))
    has = [1] if lacking else [1, 2]
    with run_folder_of(tmp_path / "run", serving=4, versions=has) as folder, run(two, run_folder=folder, load_timeout_s=0.2) as running:
        assert running.states() == {1: "ready", 2: "ready"}
        with pytest.raises(Conflict, match="did not follow") if lacking else nullcontext():
            running.run(running.registry.changes.load("books", 2))
        assert running.states() == {1: "ready", 2: "ready"}


def test_where_the_folder_cannot_be_written_to_the_run_folder_has_the_note(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_there(prefix: str, dir: Path) -> tuple[int, str]:
        if dir != folder:
            raise OSError(30, "Read-only file system")
        return plain(prefix=prefix, dir=dir)

    plain = tempfile.mkstemp
    with run_folder_of(tmp_path / "run") as folder:
        monkeypatch.setattr("service.models.openings.tempfile.mkstemp", only_there)
        killed_while_opening(two / "books" / "2", folder)
        with run(two, run_folder=folder) as running:
            assert running.served() == 1


def test_a_change_while_another_worker_is_killed_by_it_is_taken_back(two: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(Conflict, match="a worker ended while it opened version 2"):
            await running.registry.changes.load("books", 2)

    held = Held(2)

    def kill() -> None:
        assert held.opening.wait(10)
        killed_while_opening(two / "books" / "2")
        until(lambda: running.count("rolled_back") == 1, "it is taken back")
        held.let_go.set()

    DesiredState(two / "books").write(Serving(generation=1, versions=(1,), default=1))
    with run(two, held.open) as running:
        killer = threading.Thread(target=kill)
        killer.start()
        running.run(scenario())
        killer.join()
        assert serving_of(two) == Serving(generation=3, versions=(1,), default=1)
        until(lambda: running.states() == {1: "ready", 2: "available"}, "version 2 is dropped again")


# -- changes whose author is gone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, Serving(generation=6, versions=(1,), default=1)])
@pytest.mark.parametrize("running_already", [False, True])
def test_a_change_whose_author_was_killed_is_taken_back(two: Path, before: Serving | None, running_already: bool) -> None:
    if before is not None:
        DesiredState(two / "books").write(before)
    served = 2 if before is None else 1
    after = Serving(generation=7, versions=(1, 2), default=served)
    former = None if before is None else before.model_copy(update={"generation": 8})
    if not running_already:
        killed_while_changing(two / "books", before, after)
    with run(two) as running:
        if running_already:
            killed_while_changing(two / "books", before, after)
        until(lambda: serving_of(two) == former, "it is taken back")
        until(lambda: running.served() == served, "what served before does")


def test_the_next_change_begins_with_what_was_before(two: Path) -> None:
    before = Serving(generation=6, versions=(1,), default=1)
    DesiredState(two / "books").write(before)
    with run(two) as running:
        add_version(two, 3)
        killed_while_changing(two / "books", before, Serving(generation=7, versions=(1, 2), default=1))
        running.run(running.registry.changes.load("books", 3))
        found = serving_of(two)
        assert found is not None
        assert found.versions == (1, 3)


def test_a_change_waits_while_another_worker_takes_one_back(two: Path) -> None:
    """Which holds the lock for a moment."""
    with run(two) as running, ExitStack() as taking_back:
        add_version(two, 3)
        taking_back.enter_context(DesiredState(two / "books").locked(Serving))
        done = threading.Timer(0.2, taking_back.close)
        done.start()
        running.run(running.registry.changes.load("books", 3))
        done.join()
        found = serving_of(two)
        assert found is not None
        assert 3 in found.versions


def test_a_file_that_was_written_by_hand_meanwhile_stays(two: Path) -> None:
    killed_while_changing(two / "books", None, Serving(generation=7, versions=(1, 2), default=1))
    by_hand = Serving(generation=9, versions=(2,), default=2)
    DesiredState(two / "books").write(by_hand)
    with run(two) as running:
        assert running.served() == 2
        assert serving_of(two) == by_hand
        assert not DesiredState(two / "books").is_changing


# -- removals ------------------------------------------------------------------------------------------------------------


def test_a_removal_holds_where_it_can_and_says_who_is_behind(models: Path, tmp_path: Path) -> None:
    def remove(*ids: str) -> tuple[int, ...]:
        change = running.run(running.registry.changes.edit_removed("books", lambda before: (*before, *ids)))
        assert running.found() == [row for row in range(6) if f"item-{row}" not in change.after][:3]
        return change.behind

    with run_folder_of(tmp_path / "run") as folder, run(models, run_folder=folder, load_timeout_s=2) as running:
        assert remove("item-0") == remove("item-1") == remove() == (STOPPED,)
        for removed, behind in ((2, (STOPPED,)), (4, (STOPPED,)), (6, ())):
            say(folder, removed=removed)
            assert remove() == behind
        assert DesiredState(models / "books").read(Removed) == Removed(generation=6, ids=("item-0", "item-1"))
        assert running.count("rolled_back") == 0


def test_who_is_behind_is_waited_for_once(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_folder_of(tmp_path / "run") as folder, run(models, run_folder=folder) as running:
        running.remove("item-0")
        monkeypatch.setattr("service.models.changes.REMOVALS_VISIBLE_S", 1e9)
        running.remove("item-1")
        assert running.found() == [0, 2, 3]


def test_a_worker_that_serves_nothing_yet_is_not_behind(models: Path, tmp_path: Path) -> None:
    """It reads the list before it serves."""
    with run_folder_of(tmp_path / "run", serves=False, versions=[]) as folder, run(models, run_folder=folder) as running:
        change = running.run(running.registry.changes.edit_removed("books", lambda _: ("item-0",)))
        assert change.behind == ()


def test_who_was_stopped_reads_what_is_removed_before_it_answers(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "TICK_S", 1e6)  # the thread that looks does not come to it
    with run(models) as running:
        assert running.found() == [0, 1, 2]
        DesiredState(models / "books").write(Removed(generation=1, ids=("item-0",)))
        until(lambda: running.found() == [1, 2, 3], "it has read the list", within_s=10)


def test_who_begins_to_serve_answers_by_what_was_removed_while_it_loaded(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it before, so no answer said that it is behind."""
    monkeypatch.setattr(follower_module, "TICK_S", 1e6)  # the thread that looks comes to it too late
    monkeypatch.setattr(follower_module, "STALE_S", 1e6)

    def removed_meanwhile(bundle: Bundle) -> Engine:
        DesiredState(models / "books").write(Removed(generation=1, ids=("item-0",)))
        return FakeEngine(bundle.tree.item_count, bundle.tree.leaf_of_item)

    with run(models, removed_meanwhile) as running:
        assert running.found() == [1, 2, 3]
