"""Removed items stay removed, whatever happens to versions and to their list."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier.bundle import find_versions
from espalier.serving import Serving
from service.live.catalogue import LiveCatalogue
from service.live.live_version import LiveVersion
from service.models.desired_state import DesiredState, Removed
from service.models.registry_entry import Entry
from tests.service.models.registry import Held, add_version, run, search
from tests.waiting import until


def test_removals_hold_for_every_version_and_need_no_reload(models: Path) -> None:
    with run(models) as running:
        registry = running.registry
        assert registry.entry("books").removed == ()
        assert running.remove("item-1", "gone", "item-1", "item-0") == ["gone"]
        assert registry.entry("books").removed == ("item-1", "gone", "item-0")
        assert running.found() == [2, 3, 4]
        add_version(models, 2)
        running.run(registry.changes.load("books", 2))
        assert running.found(2) == [2, 3, 4]
        assert running.remove("item-2") == []
        assert running.found(1) == running.found(2) == [0, 1, 3]
        running.remove()
        assert running.found() == [0, 1, 2]
        assert registry.choose("books", None).filters.standing is None
        assert running.opened == [1, 2]
        assert DesiredState(models / "books").read(Removed) == Removed(generation=3, ids=())


@pytest.mark.parametrize("by_hand", [True, False])
def test_items_can_be_removed_while_a_version_is_loading(models: Path, monkeypatch: pytest.MonkeyPatch, by_hand: bool) -> None:
    """by_hand: it is loaded because a file says so."""

    async def loaded() -> None:
        loading = await held.begun(running.registry.changes.load("books", 2, default=True))
        await running.registry.changes.edit_removed("books", lambda _: ("item-0",))
        assert running.states()[2] == "loading"
        assert await search(running.registry.choose("books", None)) == [1, 2, 3]
        held.let_go.set()
        await loading

    if not by_hand:
        monkeypatch.setattr("service.models.changes.REMOVALS_WAIT_S", 0.0)
    held = Held(2)
    with run(models, held.open) as running:
        add_version(models, 2)
        if by_hand:
            DesiredState(models / "books").write(Serving(generation=1, versions=(1, 2), default=2))
            until(held.opening.is_set, "version 2 is being opened")
            assert running.remove("item-0") == []
            assert running.found() == [1, 2, 3]
            held.let_go.set()
        else:
            running.run(loaded())
        until(lambda: running.served() == 2, "version 2 serves")
        assert running.found() == [1, 2, 3]


def test_what_may_be_shown_again_while_a_version_is_loading_is_shown_by_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joining, let_go, join = threading.Event(), threading.Event(), LiveCatalogue.join

    def join_late(catalogue: LiveCatalogue, live: LiveVersion) -> None:
        if live.version == 2:
            joining.set()
            assert let_go.wait(10)
        join(catalogue, live)

    monkeypatch.setattr(LiveCatalogue, "join", join_late)
    with run(models) as running:
        running.remove("item-0")
        add_version(models, 2)
        DesiredState(models / "books").write(Serving(generation=1, versions=(1, 2), default=2))
        until(joining.is_set, "version 2 has read what is removed")
        running.remove()
        let_go.set()
        until(lambda: running.served() == 2, "version 2 serves")
        assert running.found() == [0, 1, 2]


def itself(place: Path) -> None:
    place.symlink_to(place)  # OSError, for any user


LOSSES: dict[str, tuple[str, Callable[[Path], Any] | None]] = {
    "the models folder is renamed": ("", None),
    "the model's folder is renamed": ("books", None),
    "the model's folder is unmounted": ("books", Path.mkdir),
    "the file is deleted": ("books/removed.json", None),
    "the file cannot be looked at": ("books/removed.json", itself),
    "the file cannot be read": ("books/removed.json", Path.mkdir),
    "the file is malformed": ("books/removed.json", lambda place: place.write_text("{")),
}
"""What gets lost below the models folder, and what is found in its place."""


class Lost:
    """Takes something away until it is brought back, with the modification time that it had."""

    def __init__(self, models: Path, how: str) -> None:
        below, in_place = LOSSES[how]
        self.place, self.aside = models / below, models.parent / "aside"
        self.place.rename(self.aside)
        if in_place is not None:
            in_place(self.place)

    def bring_back(self) -> None:
        if self.place.is_dir():
            self.place.rmdir()
        self.aside.rename(self.place)


@pytest.mark.parametrize("how", LOSSES)
def test_removed_items_stay_removed_when_their_list_is_lost(models: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with run(models) as running:
        running.remove("item-0", "item-1")
        lost = Lost(models, how)
        until(lambda: "books/removed.json" in str(running.books.reason), "it is said")
        for _ in range(3):
            running.registry._follower.wake()
            assert running.found() == [2, 3, 4]
        assert running.registry.entry("books").removed == ("item-0", "item-1")
        assert running.registry.not_ready() == []  # it answers right, and there may be nowhere else to go
        until(lambda: 'espalier_desired_state_wrong{model="books"} 1.0' in running.metrics.render().decode(), "the metric says so")
        said = [record.message for record in caplog.records if "books stays as it is: books/removed.json" in record.message]
        assert 0 < len(said) == len(set(said))  # each once; "gone" too, if a look came before something else stood in its place
        lost.bring_back()
        until(lambda: running.books.reason is None, "it is over")
        assert running.found() == [2, 3, 4]
        until(lambda: 'espalier_desired_state_wrong{model="books"} 0.0' in running.metrics.render().decode(), "the metric says so")
        running.remove()
        assert running.found() == [0, 1, 2]


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
        assert running.found() == [1, 2, 3]


def test_a_models_folder_that_cannot_be_listed_is_said_once(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = [0]

    def broken(folder: Path) -> Any:
        if folder != models:  # another test's service looks
            return find_versions(folder)
        looks[0] += 1
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("service.models.follower.SCAN_S", 0.0)
    with run(models) as running:
        monkeypatch.setattr("service.models.follower.find_versions", broken)
        until(lambda: looks[0] >= 3, "it is looked at again")
        assert caplog.text.count("the models folder cannot be read: Input/output error") == 1
        assert running.found() == [0, 1, 2]


def test_a_pin_holds_while_the_folder_is_away(models: Path) -> None:
    add_version(models, 2)
    with run(models, poll_s=0.01) as running:
        running.run(running.registry.changes.load("books", 1, default=True))
        lost = Lost(models, "the model's folder is unmounted")
        until(lambda: "books/serving.json" in str(running.books.reason), "it is said")
        assert running.served() == 1
        assert running.books.serving is not None
        lost.bring_back()
        until(lambda: running.books.reason is None, "it is over")
        assert running.served() == 1
        assert running.books.serving is not None
        (models / "books" / "serving.json").unlink()
        until(lambda: running.served() == 2, "a pin that is deleted is lifted")


def test_a_removal_that_is_followed_late_stays(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    applying, let_go = threading.Event(), threading.Event()

    def late(entry: Entry, ids: tuple[str, ...]) -> None:
        applying.set()
        assert let_go.wait(10)
        remove(entry, ids)

    async def scenario() -> None:
        change = await running.registry.changes.edit_removed("books", lambda ids: (*ids, "item-0"))
        assert [*change.behind] == [os.getpid()]
        assert await asyncio.to_thread(applying.wait, 10)
        let_go.set()
        while change.behind:
            change = await running.registry.changes.edit_removed("books", lambda _: None)
        assert (change.before, change.after) == (("item-0",), ("item-0",))
        assert await search(running.registry.choose("books", None)) == [1, 2, 3]

    with run(models, load_timeout_s=0.5) as running:
        swapper = running.registry._follower._swapper
        remove = swapper.remove
        monkeypatch.setattr(swapper, "remove", late)
        running.run(scenario())
        assert running.count("rolled_back") == 0
