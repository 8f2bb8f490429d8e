"""The journal of a live catalogue: order, what is read back, several processes and threads at once; compaction, backups and the erasure of
a person's events.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from espalier.errors import InvalidData, InvalidInput, JournalBusy, JournalCorrupt, JournalError, JournalReadOnly
from espalier.live import journal as journal_module
from espalier.live import journal_file, journal_tables, journal_upkeep
from espalier.live.journal import Journal, Transaction
from espalier.live.journal_file import check, locked, log_bytes, open_writer
from espalier.live.journal_upkeep import LEFT_OUT, OnDisk, Versions, backup, compact, erase_user
from espalier.live.operations import ItemBody, Operation
from espalier.live.rows import Placement
from tests.espalier.live.journals import appended, numbers, placed, put


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.open(tmp_path / "live.db")


def test_there_is_no_file_until_something_is_written(journal: Journal) -> None:
    assert (journal.last_sequence(), journal.since(0, 10), journal.latest("a"), journal.placements(1, [1])) == (0, [], None, {})
    assert (journal.exists(), journal.identity()) == (False, None)
    assert not [*journal.file.parent.iterdir()]


def test_operations_come_back_as_they_were_appended(journal: Journal) -> None:
    body = ItemBody({"title": "é", "n": [1.5, None]}, "text", ("b",), (["x"], ["y"]), ("u1", "u2"), 12.5)
    with journal.writing() as transaction:
        first = transaction.append(Operation(0, "a/é", "put", body, 7, 100.25))
        second = transaction.append(Operation(0, "b", "delete"))
    assert (first.sequence, second.sequence) == (1, 2)
    assert second.at > 1e9
    for found in (journal, Journal(journal.file, "read")):
        assert found.since(0, 10) == [first, second]
        assert found.since(1, 10) == [second]
        assert found.since(0, 1) == [first]
        assert found.latest("a/é") == first
        assert found.read(["b", "c", "a/é"]) == {"a/é": first, "b": second}
        assert found.last_sequence() == 2


def test_the_latest_operation_of_an_id_is_what_a_replay_needs(journal: Journal) -> None:
    appended(journal, [put("a", 1), put("b", 2), put("a", 3), replace(put("b"), kind="delete", body=ItemBody()), put("c", 5)])
    assert [operation.sequence for operation in journal.current(0, 10)] == [3, 4, 5]
    assert [operation.sequence for operation in journal.current(3, 1)] == [4]
    assert numbers([operation for operation in (journal.latest("a"),) if operation]) == [3]


def test_many_ids_are_read_at_once(journal: Journal) -> None:
    appended(journal, [put(f"i{number}", number) for number in range(1203)])
    assert len(journal.read([f"i{number}" for number in range(1300)])) == 1203


def test_a_page_ends_where_bodies_are_large(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    appended(journal, [put(f"i{number}", number) for number in range(9)])
    monkeypatch.setattr(journal_tables, "PAGE_BYTES", 100)
    pages, after = [], 0
    while page := journal.since(after, 100):
        pages.append(len(page))
        after = page[-1].sequence
    assert sum(pages) == 9
    assert max(pages) < 9
    assert len(journal.read([f"i{number}" for number in range(9)])) == 9  # all that was asked for, however large


def test_placements_come_back_in_order_of_trees_and_the_first_ones_hold(journal: Journal) -> None:
    appended(journal, [put("a"), put("b")])
    with journal.writing() as transaction:
        transaction.store_placements(4, {2: [placed(1, 6), placed(0, 7)], 1: [placed(0, 8)]})
    found = journal.placements(4, [1, 2, 3])
    assert {sequence: [(p.tree, p.parent, p.slot) for p in rows] for sequence, rows in found.items()} == {
        1: [(0, 8, 5)],
        2: [(0, 7, 5), (1, 6, 5)],
    }
    assert found[1][0].row.to_bytes() == placed().row.to_bytes()
    assert journal.placements(5, [1, 2]) == {}
    with Journal(journal.file).writing() as transaction:  # what was stored first holds for all
        transaction.store_placements(4, {1: [placed(parent=4), placed(tree=1)]})
        assert [(p.tree, p.parent) for p in transaction.placements(4, [1])[1]] == [(0, 8)]


@pytest.mark.parametrize("wrong", [placed(tree=16), placed(parent=-1), placed(slot=-1)])
def test_a_placement_that_is_none_is_refused(journal: Journal, wrong: Placement) -> None:
    def write() -> None:
        with journal.writing() as transaction:
            transaction.append(put("a"))
            transaction.store_placements(1, {1: [wrong]})

    with pytest.raises(InvalidData, match="placement"):
        write()
    assert journal.last_sequence() == 0  # nothing of the block was kept


def test_the_largest_row_is_stored_and_a_larger_one_refused(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_ROW_BYTES", len(placed(size=8).row.to_bytes()))
    with journal.writing() as transaction:
        transaction.store_placements(1, {1: [placed(size=8)]})
        with pytest.raises(InvalidData, match="row"):
            transaction.store_placements(1, {2: [placed(size=9)]})


def test_a_block_that_raises_leaves_nothing_and_its_numbers_go_to_the_next(journal: Journal) -> None:
    appended(journal, [put("a")])

    def fail() -> None:
        with journal.writing() as transaction:
            transaction.append(put("b"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert journal.last_sequence() == 1
    assert appended(journal, [put("c")]) == [2]
    assert [operation.id for operation in journal.since(0, 9)] == ["a", "c"]


def test_operations_of_another_journal_keep_their_numbers(journal: Journal) -> None:
    with journal.writing() as transaction:
        assert transaction.append(replace(put("a"), sequence=40, at=3.0)).sequence == 40
        with pytest.raises(InvalidData, match="above 40"):
            transaction.append(replace(put("b"), sequence=40))
    assert appended(journal, [put("b")]) == [41]
    assert journal.since(0, 1)[0].at == 3.0


def test_a_journal_to_be_read_is_not_written_to(journal: Journal) -> None:
    with pytest.raises(JournalReadOnly), Journal(journal.file, "read").writing():
        pass
    assert not journal.exists()


def test_threads_append_and_read_at_once(journal: Journal) -> None:
    given: list[int] = []

    def write(name: str) -> None:
        own = Journal(journal.file) if name == "0" else journal
        for number in range(20):
            given.extend(appended(own, [put(f"{name}-{number}", number)]))
            assert own.latest(f"{name}-{number}") is not None

    threads = [threading.Thread(target=write, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(given) == [*range(1, 81)]
    assert [operation.sequence for operation in journal.since(0, 100)] == sorted(given)


def test_who_waits_too_long_for_the_lock_is_told(journal: Journal) -> None:
    with locked(journal.file), pytest.raises(JournalBusy, match=r"0\.01 s"), journal.writing(0.01):
        pass
    assert appended(journal, [put("a")]) == [1]


class Clock:
    """Time passes while somebody waits for the lock. holder: the file whose lock is passed on each time; None: nobody lets go."""

    def __init__(self, holder: Path | None) -> None:
        self.now, self._holder = 100.0, holder

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now += 0.1
        if self._holder is not None:
            os.utime(self._holder, ns=(0, int(self.now * 1e9)))  # as whoever takes it does


def test_a_lock_that_is_not_let_go_is_waited_for_less_than_one_that_is_passed_on(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one process may have stopped; the others are at work."""
    waited = []
    for holder in (None, journal.file.with_name(".live.lock")):
        clock = Clock(holder)
        with locked(journal.file), monkeypatch.context() as patch:
            patch.setattr(journal_file, "time", clock)
            with pytest.raises(JournalBusy), journal.writing():
                pass
        waited.append(clock.now - 100)
    assert 2.0 < waited[0] < 2.5
    assert 5.0 < waited[1] < 6.0


def test_those_who_wait_for_the_lock_see_that_its_holder_is_at_work(journal: Journal) -> None:
    appended(journal, [put("a")])
    lock = journal.file.with_name(".live.lock")
    os.utime(lock, ns=(0, 0))
    with journal.writing() as transaction:
        assert lock.stat().st_mtime_ns > 0  # it was taken
        for item in "bc":
            os.utime(lock, ns=(0, 0))
            transaction.append(put(item))
            assert lock.stat().st_mtime_ns > 0


def test_commits_and_checkpoints_happen_under_the_lock_alone(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two connections that commit and checkpoint at once can lose commits in SQLite before 3.51.3."""
    monkeypatch.setattr(journal_module, "CHECKPOINT_BYTES", 1)
    journal._checkpoint_at = 1
    ran: list[str] = []
    unguarded: list[str] = []

    def note(statement: str) -> None:  # what it raises is lost
        if statement == "COMMIT" or "wal_checkpoint" in statement:
            ran.append(statement)
            with suppress(JournalBusy), locked(journal.file, 0):
                unguarded.append(statement)

    with journal.exclusive() as connection:
        connection.set_trace_callback(note)
        assert connection.execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)
    for number in range(3):
        appended(journal, [put("a", number)], version=1)
    assert ran.count("COMMIT") == 3
    assert sum("wal_checkpoint" in statement for statement in ran) == 3
    compact(journal, on_disk(1))
    erase_user(journal, "u1")
    assert len(ran) > 6
    assert unguarded == []
    assert log_bytes(journal.file) == 0


def test_a_reader_does_not_hold_up_a_checkpoint_for_long(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "CHECKPOINT_BYTES", 1)
    journal._checkpoint_at = 1
    appended(journal, [put("a", 1)])
    with closing(sqlite3.connect(journal.file, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM ops").fetchall()
        assert appended(journal, [put("a", 2)]) == [2]  # the log stays, the commit does not wait
        assert log_bytes(journal.file) > 0
    appended(journal, [put("a", 3)])
    assert log_bytes(journal.file) == 0


def test_the_log_has_a_bound_while_a_process_that_reads_stands_still(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "CHECKPOINT_BYTES", 50_000)
    monkeypatch.setattr(journal_module, "MAX_LOG_BYTES", 200_000, raising=False)
    appended(journal, [put("a")], version=1)
    with stopped_reader(journal.file) as reader:
        with pytest.raises(JournalBusy, match="stands still while it reads"):
            _append_for_ever(journal)
        assert 200_000 <= log_bytes(journal.file) < 300_000
        last = journal.last_sequence()
        with pytest.raises(JournalBusy):
            compact(journal, on_disk(1))
        assert journal.since(last - 1, 9)[0].id == "a"  # it is read as before
        reader.kill()
        reader.wait()
        assert appended(journal, [put("b")]) == [last + 1]
    assert log_bytes(journal.file) < 200_000


def _append_for_ever(journal: Journal) -> None:
    for number in range(1000):
        appended(journal, [put("a", number)], version=1)


@contextmanager
def stopped_reader(file: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is stopped in the middle of a read."""
    script = (
        "import os, signal, sqlite3, sys\nconnection = sqlite3.connect(sys.argv[1], isolation_level=None)\nconnection.execute('BEGIN')\n"
        "print(connection.execute('SELECT count(*) FROM ops').fetchone(), flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(file)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_a_journal_that_was_replaced_or_deleted_is_not_written_to(journal: Journal) -> None:
    appended(journal, [put("a")])
    for ending in ("", "-wal"):
        journal.file.with_name(f"live.db{ending}").rename(journal.file.with_name(f"moved{ending}"))
    for _ in range(2):
        with pytest.raises(JournalCorrupt, match="restart"):
            appended(journal, [put("b")])
        with pytest.raises(JournalCorrupt, match="restart"):
            journal.last_sequence()
        appended(Journal(journal.file), [put("other")])


def test_a_closed_journal_opens_again(journal: Journal) -> None:
    appended(journal, [put("a")])
    journal.close()
    assert not journal.file.with_name("live.db-wal").exists()  # the last to close has moved it into the database
    assert journal.last_sequence() == 1
    assert appended(journal, [put("b")]) == [2]
    with locked(journal.file):
        journal.close(0.01)  # beside a process that keeps the lock
    assert appended(journal, [put("c")]) == [3]


def test_a_journal_that_nothing_refers_to_is_closed(tmp_path: Path) -> None:
    log = tmp_path / "live.db-wal"
    journal = Journal.open(tmp_path / "live.db")
    appended(journal, [put("a")])
    assert journal.last_sequence() == 1
    assert log.exists()
    del journal
    assert not log.exists(), "the last connection to close deletes it"
    Journal.__new__(Journal)


def test_journals_on_network_file_systems_have_no_shared_memory(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_file, "on_network", lambda file: True)
    appended(journal, [put("a")])
    assert Journal(journal.file, "read").last_sequence() == 1
    assert appended(Journal(journal.file), [put("b")]) == [2]
    assert not journal.file.with_name("live.db-wal").exists()
    with closing(sqlite3.connect(journal.file)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)  # TRUNCATE holds for a connection; it is not WAL


@pytest.mark.parametrize(
    ("folder", "network"),
    [("/srv/models/a", True), ("/srv/other", False), ("/srv", False), ("/my disk/a", True), ("/mnt/a", True), ("/mntx", False)],
)
def test_network_file_systems_are_known_by_their_mounts(tmp_path: Path, folder: str, network: bool) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:1 / / rw - ext4 /dev/sda rw\n"
        "23 22 0:2 / /srv/models rw,noatime shared:5 - nfs4 host:/models rw\n"
        "24 22 0:3 / /my\\040disk rw - fuse.sshfs me@host:/ rw\n"
        "25 22 0:4 / /mnt rw - cifs //host/share rw\n"
    )
    assert journal_file.on_network(Path(folder) / "live.db", mounts) == network


def test_a_journal_is_opened_by_readers_while_it_is_made(tmp_path: Path) -> None:
    def read() -> None:
        while not made.is_set():
            try:
                Journal.open(file, "read")
            except JournalError as error:
                wrong.append(error)

    wrong: list[JournalError] = []
    for number in range(12):
        file, made = tmp_path / f"{number}.db", threading.Event()
        reader = threading.Thread(target=read)
        reader.start()
        open_writer(file).close()
        made.set()
        reader.join()
    assert wrong == []


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_upkeep, "BLOCK", 3)
    monkeypatch.setattr(journal_upkeep, "FREE_PAGES", 2)


def on_disk(*fingerprints: int) -> Versions:
    """Versions that were trained before the first operation."""
    return lambda: [OnDisk(fingerprint, 0) for fingerprint in fingerprints]


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


def test_two_erasures_at_a_time_bring_nobody_back(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    with journal.writing() as transaction:
        transaction.append(Operation(0, "a", "put", ItemBody(events=(["x"], ["y"], ["z"]), users=("u1", "u2", "u3")), at=1.0))
    writing, other = journal.writing, Journal(journal.file)

    def after_another_erasure() -> AbstractContextManager[Transaction]:
        monkeypatch.undo()
        assert erase_user(other, "u2") == ["a"]
        return writing()

    monkeypatch.setattr(journal, "writing", after_another_erasure)
    assert erase_user(journal, "u1") == ["a"]
    other.close()
    (operation,) = journal.since(0, 10)
    assert operation.body.users == ("u3",)


def test_erasure_of_a_person_that_is_not_there_changes_nothing(journal: Journal) -> None:
    assert erase_user(journal, "u") == []
    assert not journal.exists()
    appended(journal, [events("a", "u1")])
    assert erase_user(journal, "u") == []
    assert journal.since(0, 9)[0].body.users == ("u1",)
    with pytest.raises(JournalReadOnly):
        erase_user(Journal(journal.file, "read"), "u1")
