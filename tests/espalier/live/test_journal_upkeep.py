"""Compaction, backups and the erasure of a person's events, beside processes that use the journal."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from espalier.errors import InvalidInput, JournalReadOnly
from espalier.live import journal_upkeep
from espalier.live.journal import Journal
from espalier.live.journal_file import check
from espalier.live.journal_upkeep import LEFT_OUT, Versions, backup, compact, erase_user
from espalier.live.operations import ItemBody, Operation
from tests.espalier.live.journals import appended, numbers, put


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.open(tmp_path / "live.db")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_upkeep, "BLOCK", 3)
    monkeypatch.setattr(journal_upkeep, "FREE_PAGES", 2)


def on_disk(*versions: int) -> Versions:
    """Versions that were trained before the first operation."""
    return lambda: dict.fromkeys(versions, 0)


# -- compaction -------------------------------------------------------------------------------------------------------------


def test_the_last_operation_of_every_id_stays(journal: Journal) -> None:
    gone = replace(put("b"), kind="delete", body=ItemBody())
    appended(journal, [put("a", 1), put("b", 2), put("a", 3), gone, put("c", 5), put("c", 6), put("c", 7)], version=1)
    found = compact(journal, on_disk(1))
    assert (found.operations, found.placements) == (4, 4)
    assert [operation.sequence for operation in journal.since(0, 9)] == [3, 4, 7]
    assert [*journal.placements(1, range(9))] == [3, 4, 7]
    assert journal.last_sequence() == 7


def test_operations_from_a_sequence_on_all_stay(journal: Journal) -> None:
    appended(journal, [put("a", number) for number in range(8)])
    assert compact(journal, on_disk(), keep_from=6).operations == 5
    assert [operation.sequence for operation in journal.since(0, 9)] == [6, 7, 8]


def test_no_sequence_number_is_given_again_after_a_compaction(journal: Journal) -> None:
    appended(journal, [put("a"), put("b")])
    with journal.exclusive() as connection:
        connection.execute("DELETE FROM ops")
        connection.execute("DELETE FROM latest")
    assert compact(journal, on_disk()).operations == 0
    assert (journal.last_sequence(), appended(Journal(journal.file), [put("c")])) == (2, [3])


def test_a_compacted_journal_gives_its_room_back(journal: Journal) -> None:
    for number in range(12):
        appended(journal, [replace(put(f"{item}", number), body=ItemBody(text="x" * 3000)) for item in range(5)], version=1)
    journal.close()
    before = journal.file.stat().st_size
    compact(journal, on_disk(1))
    journal.close()
    assert journal.file.stat().st_size < before / 4
    check(journal.file)


def test_a_journal_without_operations_has_nothing_to_compact(journal: Journal) -> None:
    found = compact(journal, on_disk(1))
    assert (found.operations, found.placements, journal.exists()) == (0, 0, False)


def test_writers_and_readers_go_on_while_a_journal_is_compacted(journal: Journal) -> None:
    other = Journal(journal.file)
    given: list[int] = []

    def write() -> None:
        for number in range(60):
            given.extend(appended(other, [put(f"{number % 7}", number)], version=1))
            assert numbers(other.current(given[-1] - 1, 9)) == [number]

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        compact(journal, on_disk(1))
    writer.join()
    compact(journal, on_disk(1))
    assert given == [*range(1, 61)]
    assert sorted(map(int, map(str, numbers(journal.since(0, 99))))) == [*range(53, 60)]
    check(journal.file)


# -- backups ----------------------------------------------------------------------------------------------------------------


def test_a_backup_is_one_file_with_all_that_was_committed(journal: Journal, tmp_path: Path) -> None:
    sequences = appended(journal, [put("a", 1), put("b", 2)], version=1)
    copy = tmp_path / "backups" / "copy.db"
    copy.parent.mkdir()
    backup(journal, copy)
    assert [*copy.parent.iterdir()] == [copy]
    assert journal.last_sequence() == 2  # the original goes on as before
    found = Journal.open(copy, "read")
    assert found.since(0, 9) == journal.since(0, 9)
    assert len(found.placements(1, sequences)) == 2


def test_a_backup_in_place_gives_no_number_that_the_lost_journal_gave(journal: Journal, tmp_path: Path) -> None:
    appended(journal, [put("a")])
    identity = journal.identity()
    backup(journal, tmp_path / "copy.db")
    lost = appended(journal, [put("b"), put("c")])
    journal.close()
    journal.file.unlink()
    shutil.copy(tmp_path / "copy.db", journal.file)
    restored = Journal.open(journal.file)
    (sequence,) = appended(restored, [put("d")])
    assert sequence == LEFT_OUT + 2 > max(lost)
    assert [operation.id for operation in restored.since(0, 9)] == ["a", "d"]
    assert restored.identity() != identity


def test_a_backup_replaces_no_file_and_needs_a_journal(journal: Journal, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="nothing was ever written"):
        backup(journal, tmp_path / "copy.db")
    appended(journal, [put("a")])
    (tmp_path / "copy.db").write_text("other")
    with pytest.raises(InvalidInput, match="not there yet"):
        backup(journal, tmp_path / "copy.db")
    assert (tmp_path / "copy.db").read_text() == "other"
    with pytest.raises(InvalidInput, match=r"^to: got '.*/gone/copy\.db', expected a file in a folder that is there$"):
        backup(journal, tmp_path / "gone" / "copy.db")


# -- erasure ----------------------------------------------------------------------------------------------------------------


def events(item: str, *users: str) -> Operation:
    return Operation(0, item, "put", ItemBody({"n": 1}, events=tuple([f"secret-of-{user}"] for user in users), users=users))


def test_events_of_a_person_go_from_all_operations_and_from_the_bytes_of_the_files(journal: Journal) -> None:
    appended(journal, [events("a", "u1", "u2"), events("b", "u2"), put("c"), events("a", "u1"), events("d", "u1")], version=1)
    compact(journal, on_disk(1), keep_from=2)  # frees the first operation's bytes
    appended(journal, [events("a", "u1", "u2")])
    assert erase_user(journal, "u1") == ["a", "d"]
    left = {operation.sequence: operation.body.users for operation in journal.since(0, 99)}
    assert left == {2: ("u2",), 3: (), 4: (), 5: (), 6: ("u2",)}
    journal.close()
    found = b"".join(file.read_bytes() for file in journal.file.parent.iterdir())
    assert b"secret-of-u2" in found
    assert b"secret-of-u1" not in found
    assert [*journal.placements(1, range(9))] == [2, 3, 4, 5]  # items stay where they are


def test_erasure_beside_a_service_empties_the_log(journal: Journal) -> None:
    service = Journal(journal.file)
    appended(service, [events("a", "u1")])
    assert service.last_sequence() == 1
    erase_user(journal, "u1")
    found = b"".join(file.read_bytes() for file in journal.file.parent.iterdir())
    assert b"secret" not in found
    assert service.since(0, 9)[0].body == ItemBody({"n": 1})


def test_while_an_erasure_waits_for_readers_writes_go_on(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Journal(journal.file)
    appended(service, [events("a", "u1")])
    with closing(sqlite3.connect(journal.file, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM ops").fetchone()

        def pause(_: float) -> None:
            monkeypatch.undo()
            with service.writing(timeout_s=0.0) as transaction:
                transaction.append(put("b"))
            reader.execute("ROLLBACK")

        monkeypatch.setattr(time, "sleep", pause)
        assert erase_user(journal, "u1") == ["a"]
    assert service.last_sequence() == 2
    assert b"secret" not in b"".join(file.read_bytes() for file in journal.file.parent.iterdir())


def test_erasure_of_a_person_that_is_not_there_changes_nothing(journal: Journal) -> None:
    assert erase_user(journal, "u") == []
    assert not journal.exists()
    appended(journal, [events("a", "u1")])
    assert erase_user(journal, "u") == []
    assert journal.since(0, 9)[0].body.users == ("u1",)
    with pytest.raises(JournalReadOnly):
        erase_user(Journal(journal.file, "read"), "u1")
