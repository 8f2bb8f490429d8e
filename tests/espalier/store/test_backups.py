"""A backup holds all that its model had, or nobody sees it; a restore brings all of it back, or may be repeated."""

from __future__ import annotations

import json
import os
import shutil
import time
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

from espalier.errors import CacheFull, EspalierError, InvalidInput, JournalCorrupt, StoreConflict, StoreDamaged, StoreMissing
from espalier.live.journal import Journal
from espalier.live.journal_upkeep import NUMBERS_PER_S, erase_user
from espalier.live.operations import ItemBody, Operation
from espalier.store import backups, restoring
from espalier.store.backups import BACKUPS, WORK, BeingBackedUp, back_up, find_backed_up, find_backups, forget, prune, read_backup
from espalier.store.fetching import SPARE_BYTES
from espalier.store.objects import Objects
from espalier.store.publishing import publish
from espalier.store.restoring import choose, host_lock, restore
from tests.espalier.live.journals import appended, put
from tests.object_stores import two_versions

SERVING = '{"generation": 2, "versions": [1], "default": 1}\n'
REMOVED = '{"generation": 3, "ids": ["item-3"]}\n'
NOW = datetime.now(UTC)


class Cut(Exception):
    """The process ends there."""


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """A model's folder with three operations, a pin and a removal."""
    folder = tmp_path / "models" / "books"
    folder.mkdir(parents=True)
    (folder / "serving.json").write_text(SERVING)
    (folder / "removed.json").write_text(REMOVED)
    write(folder, put("a", 1), put("b", 2), Operation(0, "a", "delete"))
    return folder


def write(folder: Path, *operations: Operation) -> list[int]:
    journal = Journal(folder / "live.db")
    try:
        return appended(journal, operations)
    finally:
        journal.close()


def operations(folder: Path) -> list[Operation]:
    journal = Journal.open(folder / "live.db", "read")
    try:
        return journal.since(0, 100)
    finally:
        journal.close()


def made(store: Objects, folder: Path, force: bool = False) -> str:
    """The id of a backup that was written."""
    found = back_up(store, folder, force)
    assert found is not None
    assert found.written
    return found.id


def add(store: Objects, *ids: str, manifest: bool = True) -> None:
    """Backups of `books` with these ids."""
    for backup_id in ids:
        for name in ("live.db", *["manifest.json"] * manifest):
            store.write(f"{BACKUPS}/books/{backup_id}/{name}", iter([b"{}"]), 2)


def written(at: datetime, number: int = 0) -> str:
    return f"{at:%Y%m%dT%H%M%S.%fZ}-{number}-0123abcd"


def test_a_restore_into_an_empty_folder_brings_back_what_the_backup_had(store: Objects, books: Path, tmp_path: Path) -> None:
    before = operations(books)
    made(store, books)
    publish(store, [two_versions(tmp_path / "trained") / "1"])
    shutil.rmtree(books.parent)
    found = restore(store, store, books.parent, "books", choose(store, "books"))
    assert found._asdict() == {
        "model": "books",
        "backup": choose(store, "books"),
        "sequence": 3,
        "files": ["live.db", "removed.json", "serving.json"],
        "came": [1],
        "missing": [],
    }
    assert operations(books) == before
    assert (books / "serving.json").read_text() == SERVING
    assert (books / "removed.json").read_text() == REMOVED
    assert (books / "1" / "manifest.json").is_file()
    assert not (books / WORK).exists()
    assert not (books / restoring.WORK).exists()
    assert find_backed_up(store) == ["books"]


def test_nothing_is_written_until_something_has_changed(files: Objects, books: Path) -> None:
    backups_made = [made(files, books)]
    for change in (
        lambda: write(books, put("c")),
        lambda: (books / "removed.json").write_text(REMOVED.replace("3", "4")),
        lambda: (books / "serving.json").unlink(),
        lambda: write(books, Operation(0, "d", "put", ItemBody(events=(["a"],), users=("u",)))),
        lambda: erase_user(Journal(books / "live.db"), "u"),  # it takes no number
    ):
        again = back_up(files, books)
        assert again is not None
        assert (again.id, again.written) == (backups_made[-1], False)
        change()
        backups_made.append(made(files, books))
    assert sorted(find_backups(files, "books")) == sorted(backups_made)
    again = back_up(files, books, force=True)
    assert again is not None
    assert again.written


def test_a_model_of_a_pin_alone_is_backed_up_and_one_of_nothing_is_not(files: Objects, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "films"
    folder.mkdir(parents=True)
    assert back_up(files, folder) is None
    (folder / "serving.json").write_text(SERVING)
    (folder / "live.db").touch()  # its process was killed before the first operation
    made(files, folder)
    (folder / "serving.json").unlink()
    (folder / "live.db").unlink()
    restore(files, None, folder.parent, "films", choose(files, "films"))
    assert (folder / "serving.json").read_text() == SERVING


@pytest.mark.parametrize("former", [None, {"generation": 2, "versions": [1], "default": 1}])
def test_a_change_of_versions_that_is_under_way_is_not_backed_up(files: Objects, books: Path, former: dict[str, Any] | None) -> None:
    (books / "serving.json").write_text(SERVING.replace('[1], "default": 1', '[1, 4], "default": 4').replace("2,", "3,"))
    (books / ".serving.before").write_text(json.dumps({"generation": 3, "serving": former}))
    kept = Path(files.url.removeprefix("file://")) / BACKUPS / "books" / made(files, books) / "serving.json"
    assert (kept.read_text() if kept.exists() else None) == (None if former is None else SERVING)
    for change in (
        lambda: (books / "serving.json").write_text(SERVING.replace("2,", "4,")),  # it was taken back
        lambda: (books / ".serving.before").write_text("{"),  # by hand
        lambda: (books / ".serving.before").unlink(),
    ):
        change()
        back_up(files, books)
        restored = books.parent.parent / "restored"
        shutil.rmtree(restored, ignore_errors=True)
        restore(files, None, restored, "books", choose(files, "books"))
        assert (restored / "books" / "serving.json").read_text() == SERVING.replace("2,", "4,")


@pytest.mark.parametrize("begins", [True, False])
def test_a_change_of_versions_that_begins_or_ends_while_its_files_are_read_is_seen(
    files: Objects, books: Path, monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    after, before = SERVING.replace("2,", "3,"), json.dumps({"generation": 3, "serving": json.loads(SERVING)})
    if not begins:
        (books / ".serving.before").write_text(before)
        (books / "serving.json").write_text(after)
    content = backups._content

    def read(file: Path) -> bytes | None:
        if file.name == "serving.json":
            monkeypatch.setattr(backups, "_content", content)
            if begins:
                (books / ".serving.before").write_text(before)
                (books / "serving.json").write_text(after)
            else:
                (books / ".serving.before").unlink()
        return content(file)

    monkeypatch.setattr(backups, "_content", read)
    made(files, books)
    (kept,) = Path(files.url.removeprefix("file://")).rglob("serving.json")
    assert kept.read_text() == (SERVING if begins else after)


def test_what_a_backup_lacks_goes_if_a_restore_replaces(files: Objects, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "films"
    folder.mkdir(parents=True)
    (folder / "serving.json").write_text(SERVING)
    made(files, folder)
    (folder / "removed.json").write_text(REMOVED)
    with pytest.raises(InvalidInput, match=r"removed\.json'?, expected no such file, or the one of the backup; --replace"):
        restore(files, None, folder.parent, "films", choose(files, "films"))
    (folder / "removed.json").unlink()
    write(folder, put("later"))
    with pytest.raises(InvalidInput, match=r"live\.db'?, expected no journal there; --replace"):
        restore(files, None, folder.parent, "films", choose(files, "films"))
    (folder / "removed.json").write_text(REMOVED)
    restore(files, None, folder.parent, "films", choose(files, "films"), replace=True)
    assert {file.name for file in folder.iterdir() if not file.name.endswith(".lock")} == {"serving.json"}


def test_numbers_given_since_the_backup_are_never_given_again_however_often_it_is_restored(files: Objects, books: Path) -> None:
    made(files, books)
    given, identities = set(write(books, put("c"), put("d"))), {Journal(books / "live.db").identity()}
    for restored in range(3):
        shutil.rmtree(books)
        if restored == 2:  # of the journal that came from a backup there is a backup, too
            restore(files, None, books.parent, "books", choose(files, "books"))
            given.update(write(books, put("e")))
            made(files, books)
            given.update(write(books, put("f")))
            shutil.rmtree(books)
        restore(files, None, books.parent, "books", choose(files, "books"))
        (number,) = write(books, put("c"))
        assert max(given) < number < 2**53  # JSON's numbers are exact up to there
        given.add(number)
        identity = Journal(books / "live.db").identity()
        assert identity not in identities
        identities.add(identity)
    assert min(given - {4, 5}) > time.time() * NUMBERS_PER_S


@pytest.mark.parametrize("minutes", [0, 3, 59])
def test_a_second_restore_of_one_backup_gives_higher_numbers(
    files: Objects, books: Path, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    made(files, books)
    now = time.time()
    last = 3
    for seconds in (0.0, 60.0 * minutes + 1):
        shutil.rmtree(books)
        monkeypatch.setattr(time, "time", lambda seconds=seconds: now + seconds)
        restore(files, None, books.parent, "books", choose(files, "books"))
        (number,) = write(books, put("c"))
        assert number > last
        last = number


def test_the_newest_backups_and_the_last_of_each_of_seven_days_stay(files: Objects) -> None:
    of_days = [written(NOW - timedelta(days=day, seconds=second)) for day in (20, 9, 8, 7, 6, 5, 4, 3) for second in (1, 0)]
    of_today = [written(NOW, number) for number in range(5)]
    add(files, *of_days, *of_today)
    prune(files, "books", keep=3)
    assert find_backups(files, "books") == sorted([*of_days[5::2], *of_today[-3:]])[-9:]
    assert len(list(files.list("backups", 100))) == 18
    folder = Path(files.url.removeprefix("file://")) / BACKUPS / "books"
    assert len([*folder.iterdir()]) == 9, "no empty folder of an old backup stays"


def test_half_a_backup_is_not_seen_and_goes_after_a_day(files: Objects, books: Path) -> None:
    whole = made(files, books)
    young, old = written(NOW, 9), written(NOW - timedelta(days=1, seconds=9))
    add(files, young, old, manifest=False)
    assert find_backups(files, "books") == [whole]
    prune(files, "books")
    assert {key.split("/")[2] for key in (found.key for found in files.list(BACKUPS, 100))} == {whole, young}


def test_what_killed_uploads_left_in_a_folder_goes_after_a_day_and_at_once_if_a_person_is_forgotten(
    files: Objects, books: Path, tmp_path: Path
) -> None:
    def partial(key: str, age_s: float) -> Path:
        file = tmp_path / "store" / f"{key}#1"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"the events of a person")
        os.utime(file, (time.time() - age_s,) * 2)
        return file

    whole = made(files, books)
    young_backup, young_blob = partial(f"{BACKUPS}/books/{written(NOW)}/live.db", 10.0), partial("blobs/sha256/ab/ef", 10.0)
    old = [partial(f"{BACKUPS}/books/{whole}/live.db", 90_000.0), partial("blobs/sha256/ab/abcd", 90_000.0)]
    prune(files, "books")
    publish(files, [two_versions(tmp_path / "trained") / "1"])
    assert not any(file.exists() for file in old)
    assert young_backup.exists()
    forget(files, "books", whole)
    assert (young_backup.exists(), young_blob.exists()) == (False, True)


def test_a_deletion_that_is_cut_leaves_no_half_backup_to_be_seen(files: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = written(NOW - timedelta(days=30), 1), written(NOW, 2)
    add(files, old, new)
    deleted: list[str] = []
    delete = Objects.delete

    def delete_one(store: Objects, key: str) -> None:
        if deleted:
            raise Cut
        deleted.append(key)
        delete(store, key)

    with monkeypatch.context() as cut:
        cut.setattr(Objects, "delete", delete_one)
        with pytest.raises(Cut):
            forget(files, "books", new)
    assert find_backups(files, "books") == [new]
    prune(files, "books")
    assert {found.key.split("/")[2] for found in files.list(BACKUPS, 100)} == {new}


def test_a_backup_that_is_cut_is_not_seen_and_leaves_no_file_behind(files: Objects, books: Path) -> None:
    (books / WORK).mkdir()
    (books / WORK / "live.db").write_bytes(b"of a process that was killed")

    def cut(_: int) -> None:
        raise Cut

    with pytest.raises(Cut):
        back_up(files, books, on_bytes=cut)
    assert not (books / WORK).exists()
    assert find_backups(files, "books") == []
    made(files, books)


def test_two_processes_do_not_back_up_one_model_at_once(files: Objects, books: Path) -> None:
    def meanwhile(_: int) -> None:
        with pytest.raises(BeingBackedUp):
            back_up(files, books)
        raise Cut

    with pytest.raises(Cut):
        back_up(files, books, on_bytes=meanwhile)


def test_a_copy_leaves_room_on_the_disk(files: Objects, books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(books)._replace(free=SPARE_BYTES)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(CacheFull, match="are free"):
            back_up(files, books)
    made(files, books)
    shutil.rmtree(books)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CacheFull, match="are free"):
        restore(files, None, books.parent, "books", choose(files, "books"))


def test_forgetting_leaves_one_backup(files: Objects, books: Path) -> None:
    first, second = made(files, books), made(files, books, force=True)
    add(files, written(NOW, 7), manifest=False)
    assert forget(files, "books", second) == [first]
    assert {found.key.split("/")[2] for found in files.list(BACKUPS, 100)} == {second}


def test_a_restore_changes_nothing_that_is_there_unless_it_is_told_to(files: Objects, books: Path) -> None:
    made(files, books)
    last = write(books, put("c"))
    with pytest.raises(InvalidInput, match=r"live\.db'?, expected no journal there; --replace"):
        restore(files, None, books.parent, "books", choose(files, "books"))
    assert operations(books)[-1].sequence == last[0]
    (books / "live.db").unlink()
    (books / "removed.json").write_text('{"generation": 4, "ids": []}')
    with pytest.raises(InvalidInput, match=r"removed\.json'?, expected no such file, or the one of the backup; --replace"):
        restore(files, None, books.parent, "books", choose(files, "books"))
    assert not (books / "live.db").exists()
    restore(files, None, books.parent, "books", choose(files, "books"), replace=True)
    assert (books / "removed.json").read_text() == REMOVED


def test_a_replaced_journals_log_is_not_applied_to_the_restored_one(files: Objects, books: Path) -> None:
    before = operations(books)
    made(files, books)
    open_elsewhere = Journal(books / "live.db")
    appended(open_elsewhere, [put(f"later-{number}") for number in range(50)])
    assert (books / "live.db-wal").stat().st_size > 0
    restore(files, None, books.parent, "books", choose(files, "books"), replace=True)
    assert operations(books) == before
    with pytest.raises(JournalCorrupt, match="deleted or replaced"):
        appended(open_elsewhere, [put("lost")])
    open_elsewhere.close()


def test_a_time_chooses_the_last_backup_until_then(files: Objects) -> None:
    ids = [written(NOW - timedelta(hours=hours)) for hours in (3, 2, 1)]
    add(files, *ids)
    assert choose(files, "books") == ids[2]
    assert choose(files, "books", (NOW - timedelta(hours=1.5)).timestamp()) == ids[1]
    too_early = NOW - timedelta(hours=4)
    said = f"--at: got '{too_early:%Y-%m-%dT%H:%M:%SZ}', expected a time from the oldest backup of 'books' on, {ids[0][:15]}"
    with pytest.raises(InvalidInput, match=said):
        choose(files, "books", too_early.timestamp())
    with pytest.raises(StoreMissing, match="no backup of 'films'"):
        choose(files, "films")


@pytest.mark.parametrize("damage", ["changed", "shorter", "gone", "no manifest", "of another model", "another file"])
def test_a_damaged_backup_is_refused_and_changes_nothing(files: Objects, books: Path, tmp_path: Path, damage: str) -> None:
    backup_id = made(files, books)
    folder = tmp_path / "store" / BACKUPS / "books" / backup_id
    content, manifest = (folder / "live.db").read_bytes(), json.loads((folder / "manifest.json").read_text())
    match damage:
        case "changed":
            (folder / "live.db").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "shorter":
            (folder / "live.db").write_bytes(content[:-1])
        case "gone":
            (folder / "live.db").unlink()
        case "no manifest":
            (folder / "manifest.json").write_text("{")
        case "of another model":
            (folder / "manifest.json").write_text(json.dumps(manifest | {"model": "films"}))
        case _:
            manifest["files"]["../1/manifest.json"] = manifest["files"]["live.db"]
            (folder / "manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(books)
    with pytest.raises(EspalierError) as refused:
        restore(files, None, books.parent, "books", backup_id)
    assert isinstance(refused.value, StoreDamaged | StoreMissing)
    assert backup_id in str(refused.value)
    assert not books.exists() or {path.name for path in books.iterdir()} == set()


def test_another_backup_is_due_where_the_newest_is_damaged(files: Objects, books: Path, tmp_path: Path) -> None:
    backup_id = made(files, books)
    (tmp_path / "store" / BACKUPS / "books" / backup_id / "manifest.json").write_text("{}")
    found = read_backup(files, "books", made(files, books))
    assert found is not None
    assert found.sequence == 3


def test_a_folder_that_a_service_backs_up_is_not_restored_into(files: Objects, books: Path) -> None:
    backup_id = made(files, books)
    with host_lock(books.parent), pytest.raises(StoreConflict, match="stop that first"):
        restore(files, None, books.parent, "books", backup_id, replace=True)


def test_versions_that_no_store_has_are_named(files: Objects, books: Path) -> None:
    found = restore(files, files, books.parent, "books", made(files, books), replace=True)
    assert (found.came, found.missing) == ([], [1])


def test_after_a_clock_that_was_ahead_backups_are_still_in_their_order(
    files: Objects, books: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Ahead:
        strptime, fromtimestamp = datetime.strptime, datetime.fromtimestamp

        @staticmethod
        def now(zone: tzinfo) -> datetime:
            return datetime.now(zone) + timedelta(days=40)

    with monkeypatch.context() as patched:
        patched.setattr(backups, "datetime", Ahead)
        made(files, books)
    later = []
    for number in range(3):
        write(books, put(f"later-{number}", 9))
        later.append(made(files, books))
        prune(files, "books", keep=2)
        assert find_backups(files, "books")[-1] == later[-1]
    assert "a clock was ahead" in caplog.text
    assert choose(files, "books") == later[-1]
    shutil.rmtree(books.parent)
    restore(files, None, books.parent, "books", choose(files, "books"))
    assert {operation.id for operation in operations(books)} >= {"later-0", "later-1", "later-2"}


def test_a_journal_that_came_while_a_restore_ran_is_not_deleted(files: Objects, books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backup = made(files, books)
    shutil.rmtree(books)
    bring = restoring._bring_versions

    def brought(*given: Any) -> Any:
        write(books, put("new", 1))
        return bring(*given)

    monkeypatch.setattr(restoring, "_bring_versions", brought)
    with pytest.raises(InvalidInput, match="Does a service run"):
        restore(files, None, books.parent, "books", backup)
    assert [operation.id for operation in operations(books)] == ["new"]
    monkeypatch.setattr(restoring, "_bring_versions", bring)
    restore(files, None, books.parent, "books", backup, replace=True)
    assert "new" not in {operation.id for operation in operations(books)}
