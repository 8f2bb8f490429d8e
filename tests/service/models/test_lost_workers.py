"""Changes when workers are killed or stopped: none is half made, and one worker holds up no removal."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import threading
from pathlib import Path

import pytest

from espalier.serving import Serving
from service.errors import Conflict
from service.models import follower as follower_module
from service.models.desired_state import DesiredState, Removed
from service.models.openings import Openings
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
        running.run(running.registry.changes.set_default("books", 2))
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


def test_who_was_stopped_reads_what_is_removed_before_it_answers(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "TICK_S", 1e6)  # the thread that looks does not come to it
    with run(models) as running:
        assert running.found() == [0, 1, 2]
        DesiredState(models / "books").write(Removed(generation=1, ids=("item-0",)))
        until(lambda: running.found() == [1, 2, 3], "it has read the list", within_s=10)
