"""Journals that are damaged, foreign or of another schema, and operations that damage after a kill would lose."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from espalier.errors import JournalCorrupt, UnsupportedJournal
from espalier.live import journal_file
from espalier.live.journal import Journal
from espalier.live.journal_upkeep import LEFT_OUT, backup, leave_out
from tests.espalier.live.journals import appended, put

# -- files that are no journal ----------------------------------------------------------------------------------------------


def filled(file: Path) -> None:
    journal = Journal(file)
    appended(journal, [put(f"i{number}", number) for number in range(300)], version=1)
    journal.close()


def damaged(file: Path) -> None:
    """A journal of which a page in the middle is lost."""
    filled(file)
    with file.open("r+b") as stream:
        stream.seek(os.path.getsize(file) // 2 // 4096 * 4096)
        stream.write(b"\xff" * 4096)


def cut(file: Path) -> None:
    filled(file)
    os.truncate(file, file.stat().st_size // 2)


def foreign(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE ops(seq INTEGER PRIMARY KEY)")


def with_trigger(file: Path) -> None:
    journal = Journal(file)
    appended(journal, [put("a")])
    journal.close()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TRIGGER t AFTER INSERT ON ops BEGIN DELETE FROM latest; END")
        connection.commit()


def no_text(file: Path) -> None:
    """The journal's tables are no UTF-8."""
    filled(file)
    content = file.read_bytes()
    assert content.count(b"body BLOB") == 1
    file.write_bytes(content.replace(b"body BLOB", b"body \xa0LOB"))


def no_database(file: Path) -> None:
    file.write_bytes(b"no database " * 1000)


@pytest.mark.parametrize("made", [damaged, cut, foreign, with_trigger, no_text, no_database])
def test_a_file_that_is_no_sound_journal_is_refused_and_left_alone(tmp_path: Path, made: Callable[[Path], object]) -> None:
    file = tmp_path / "model" / "live.db"
    file.parent.mkdir()
    made(file)
    before = file.read_bytes()
    journal = Journal(file)
    with pytest.raises(JournalCorrupt, match=r"model/live\.db.*backup"):
        journal.check()
    for use in (lambda: appended(journal, [put("a")]), journal.last_sequence):
        with pytest.raises(JournalCorrupt, match="backup"):
            use()
    if made in (foreign, with_trigger, no_database):
        for use in (lambda: appended(Journal(file), [put("a")]), Journal(file).last_sequence):
            with pytest.raises(JournalCorrupt):
                use()
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE ops SET body = 'no'", "operation 1"),
        ("UPDATE ops SET body = 7", "operation 1"),
        ("UPDATE ops SET body = x'5b5d'", "operation 1"),
        ("UPDATE ops SET kind = 'get'", "operation 1.*kind"),
        ("UPDATE ops SET id = x'ff'", "operation 1"),
        ("UPDATE ops SET source_version = -1", "operation 1.*source_version"),
        ("UPDATE ops SET source_version = 'x'", "operation 1"),
        ("UPDATE ops SET at = 1e999", "operation 1.*at"),
        ("UPDATE placements SET row = x'00'", "placement of operation 1"),
        ("UPDATE placements SET row = 'x'", "placement of operation 1"),
        ("UPDATE placements SET slot = -1", "placement of operation 1"),
        ("UPDATE placements SET parent = 'x'", "placement of operation 1"),
        (f"UPDATE ops SET body = zeroblob({journal_file.MAX_VALUE_BYTES + 1})", "too big"),
    ],
)
def test_values_that_no_writer_stores_are_refused(tmp_path: Path, statement: str, message: str) -> None:
    journal = Journal(tmp_path / "live.db")
    appended(journal, [put("a")], version=1)
    with closing(sqlite3.connect(journal.file)) as connection:
        connection.execute(statement)
        connection.commit()
    with pytest.raises(JournalCorrupt, match=message):
        _ = journal.since(0, 1), journal.placements(1, [1])


@pytest.mark.parametrize("schema", [0, 1, 99])
def test_a_journal_of_another_schema_is_refused_and_left_as_it_is(tmp_path: Path, schema: int) -> None:
    file = tmp_path / "live.db"
    with closing(Journal(file)) as journal:
        appended(journal, [put("a")])
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(f"PRAGMA user_version = {schema}")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = file.read_bytes()
    refused = rf"live\.db: it has schema {schema}, expected schema 4\. .* it is left as it is: .* move the file away"
    for mode in ("read", "write"):
        with pytest.raises(UnsupportedJournal, match=refused):
            Journal.open(file, mode)
    with closing(Journal(file)) as journal, pytest.raises(UnsupportedJournal, match=refused):
        appended(journal, [put("b")])
    assert file.read_bytes() == before


def test_a_journal_that_nobody_finished_making_is_made(tmp_path: Path) -> None:
    file = tmp_path / "live.db"
    for content in (b"", None):
        if content is None:  # the mode is set, the tables are not made
            with closing(sqlite3.connect(file)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
        else:
            file.write_bytes(content)
        journal = Journal.open(file, "read")
        assert (journal.since(0, 9), journal.last_sequence(), journal.identity()) == ([], 0, None)
        assert appended(Journal.open(file), [put("a")]) == [1]
        assert journal.last_sequence() == 1
        for left in tmp_path.iterdir():
            left.unlink()


# -- a log or a file that is damaged after a kill ---------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(b"item-b", b"item-z"), (b"item-b", b"jtem-b"), (b"item-b\x02", b"item-b\x01")])
def test_an_item_that_would_vanish_is_noticed(tmp_path: Path, before: bytes, after: bytes) -> None:
    file = tmp_path / "live.db"
    with closing(Journal(file)) as journal:
        appended(journal, [put("item-a"), put("item-b"), put("item-c")])
    with closing(sqlite3.connect(file)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'latest'").fetchone()
    content = file.read_bytes()
    begin, end = 4096 * (page - 1), 4096 * page
    assert before in content[begin:end]
    file.write_bytes(content[:begin] + content[begin:end].replace(before, after) + content[end:])
    with pytest.raises(JournalCorrupt, match="the last operation of an item is not there; put a backup"):
        Journal.open(file)


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Path]:
    """The journal's file in what a killed process has left: three operations, all in the log."""
    journal = Journal(tmp_path / "running" / "live.db")
    journal.file.parent.mkdir()
    for item in "abc":
        appended(journal, [put(item)])
    yield Path(shutil.copytree(journal.file.parent, tmp_path / "left")) / "live.db"
    journal.close()


def flip(file: Path, place: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(len(content) * place)] ^= 1
    file.write_bytes(content)


def damage(file: Path, kind: str) -> None:
    wal = file.with_name("live.db-wal")
    match kind:
        case "a frame":
            flip(wal, 0.7)
        case "the log's header":
            flip(wal, 0.0)
        case "no log":
            wal.unlink()
        case "an empty file":
            os.truncate(file, 0)
        case "no file":
            file.unlink()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("a frame", r"its operations [23] to 3 are lost"),
        ("the log's header", "its operations 1 to 3 are lost"),
        ("no log", "its operations 1 to 3 are lost"),
        ("an empty file", "empty or missing, but its log is not"),
        ("no file", "empty or missing, but its log is not"),
    ],
)
def test_committed_operations_are_not_lost_unnoticed(left: Path, kind: str, said: str) -> None:
    damage(left, kind)
    before = {file.name: file.read_bytes() for file in left.parent.iterdir() if file.name in ("live.db", "live.db-wal")}
    for use in (
        lambda: Journal.open(left),
        lambda: Journal.open(left, "read"),
        lambda: appended(Journal(left), [put("d")]),
        lambda: Journal(left, "read").last_sequence(),
        lambda: backup(Journal(left, "read"), left.with_name("copy.db")),
    ):
        with pytest.raises(JournalCorrupt, match=rf"left/live\.db: .*{said}.*backup"):
            use()
    assert before == {name: left.with_name(name).read_bytes() for name in before}


def test_a_rollback_journal_whose_database_is_missing_is_not_deleted(tmp_path: Path) -> None:
    log = tmp_path / "live.db-journal"
    log.write_bytes(b"pages of a transaction that had begun")
    for use in (lambda: Journal.open(tmp_path / "live.db"), lambda: appended(Journal(tmp_path / "live.db"), [put("a")])):
        with pytest.raises(JournalCorrupt, match="empty or missing, but its log is not"):
            use()
    assert {file.name for file in tmp_path.glob("live.db*")} == {log.name}


def test_after_a_loss_a_backup_is_put_in_place_or_the_numbers_are_skipped_or_the_journal_is_deleted(left: Path, tmp_path: Path) -> None:
    backup(Journal(left, "read"), tmp_path / "copy.db")
    damage(left, "no log")
    for kind, kept in (("backup", 3), ("take-over", 0), ("deleted", 0)):
        folder = Path(shutil.copytree(left.parent, tmp_path / kind))
        for ending in ("-wal", "-shm") if kind == "backup" else ("", "-wal", "-shm") if kind == "deleted" else ():
            (folder / f"live.db{ending}").unlink(missing_ok=True)
        if kind == "backup":
            shutil.copy(tmp_path / "copy.db", folder / "live.db")
        if kind == "take-over":
            os.truncate(folder / ".live.lock", 0)
            with closing(Journal.open(folder / "live.db")) as journal:
                leave_out(journal)
        journal = Journal.open(folder / "live.db")
        assert len(journal.since(0, 9)) == kept
        (sequence,) = appended(journal, [put("d")])
        assert sequence == 1 if kind == "deleted" else sequence > LEFT_OUT
        journal.close()
        with closing(Journal.open(folder / "live.db")) as journal:
            assert journal.last_sequence() == sequence
        damage(folder / "live.db", "an empty file")  # what was noted before does not matter, but the new note does
        with pytest.raises(JournalCorrupt, match=f"its operations 1 to {sequence} are lost"):
            Journal.open(folder / "live.db")


@pytest.mark.parametrize("network", [False, True])
def test_an_older_copy_of_the_file_is_no_journal_where_operations_have_come_since(
    left: Path, tmp_path: Path, network: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_file, "on_network", lambda _: network)
    Journal.open(left).close()
    journal = Journal(left)
    shutil.copy(left, tmp_path / "older.db")
    appended(journal, [put("d"), put("e")])
    journal.close()
    shutil.copy(tmp_path / "older.db", left)
    if network:
        left.with_name("live.db-journal").write_bytes(bytes(512))  # of a writer that was killed
    with pytest.raises(JournalCorrupt, match="its operations 4 to 5 are lost"):
        appended(Journal(left), [put("f")])


def test_a_sequence_that_is_no_number_is_damage(left: Path) -> None:
    with closing(sqlite3.connect(left)) as connection:
        connection.execute("UPDATE sqlite_sequence SET seq = 'x'")
        connection.commit()
    with pytest.raises(JournalCorrupt, match="its operations 1 to 3 are lost"):
        Journal.open(left)


def test_a_deleted_journal_is_made_anew_although_its_making_is_killed(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for ending in ("", "-wal", "-shm"):
        left.with_name(f"live.db{ending}").unlink()
    with monkeypatch.context() as killed_there:
        killed_there.setattr(journal_file, "_make_tables", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            appended(Journal(left), [put("a")])
    assert left.exists()
    assert appended(Journal.open(left), [put("a")]) == [1]


def test_the_note_of_a_deleted_journal_is_not_held_against_the_one_that_is_being_made(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin_to_make(file: Path, mode: str, more: str = "") -> sqlite3.Connection:
        """Another process does, after the reader has read the note."""
        os.truncate(left.with_name(".live.lock"), 0)
        return connect(file, mode, more)

    connect = journal_file._connect
    damage(left, "no log")
    monkeypatch.setattr(journal_file, "_connect", begin_to_make)
    assert Journal(left, "read").last_sequence() == 0


@pytest.mark.parametrize("note", ["", "0000000000000000009 ", "9 x\n", "\xff" * 40])
def test_half_a_note_is_none(left: Path, note: str) -> None:
    left.with_name(".live.lock").write_text(note)
    damage(left, "no log")
    assert Journal.open(left).last_sequence() == 0
