"""How workers learn what others have committed and applied."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from service import run_folder
from service.live import notices as module
from service.live.notices import UNKNOWN, UNSEEN, Notices
from service.run_folder import forget


class Service:
    """Workers of one service, all in this process, with process ids of their own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.locks: dict[int, int] = {}

    def worker(self, pid: int) -> Notices:
        lock = os.open(self.folder / f"{pid}.lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.locks[pid] = lock
        found = Notices(self.folder, pid)
        found.start()
        self._stack.callback(found.stop)
        return found

    def kill(self, pid: int) -> None:
        """As if the process had died: only its lock goes."""
        os.close(self.locks.pop(pid))


def progress(worker: Notices, model: str) -> dict[int, int]:
    """What a worker sees of all that serve a model."""
    return worker.wait_applied(model, 1 << 62, 0.0)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with ExitStack() as stack:
        found = Service(tmp_path, stack)
        yield found
    for lock in found.locks.values():
        os.close(lock)


@pytest.fixture
def no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is seen was told: nothing is looked at for want of a datagram."""
    monkeypatch.setattr(module, "POLL_S", 60.0)
    monkeypatch.setattr(module, "RECHECK_S", 60.0)


def test_a_folder_that_cannot_be_listed_stops_no_writes(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = service.worker(1)
    service.worker(2)

    def full(*_: object) -> list[str]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "listdir", full)
    worker.committed("books")
    worker.applied("books", 3)
    assert progress(worker, "books") == {1: 3, UNSEEN: UNKNOWN}


@pytest.mark.usefixtures("no_poll")
def test_all_other_workers_are_told_of_a_commit(service: Service) -> None:
    one, *others = (service.worker(pid) for pid in (11, 12, 13))
    seen = threading.Semaphore(0)
    one.subscribe("books", lambda: pytest.fail("its own commit"))
    for other in others:
        other.subscribe("books", seen.release)
        other.subscribe("films", lambda: pytest.fail("another model"))
    for _ in range(3):
        one.committed("books")
        assert all(seen.acquire(timeout=10) for _ in others)


def test_who_waits_in_vain_says_again_what_a_full_queue_has_lost(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 60.0)
    one, two = service.worker(11), service.worker(12)
    two.subscribe("books", lambda: two.applied("books", 1))
    two.applied("books", 0)
    one.applied("books", 1)  # whose commit was not told
    assert not one.wait_applied("books", 1, 30)


@pytest.mark.usefixtures("no_poll")
def test_a_writer_waits_until_the_others_answer_by_its_commit(service: Service) -> None:
    one, two = service.worker(11), service.worker(12)
    two.subscribe("books", lambda: two.applied("books", 5))
    two.applied("books", 4)
    one.applied("books", 5)
    assert progress(one, "books") == {11: 5, 12: 4}
    assert one.wait_applied("books", 5, 0.01)
    behind: list[Mapping[int, int]] = []
    waiting = threading.Thread(target=lambda: behind.append(one.wait_applied("books", 5, 1e6)), daemon=True)
    waiting.start()
    one.committed("books")
    waiting.join(20)
    assert behind == [{}]  # it was told: nothing is looked at before the time is over
    assert progress(one, "books") == progress(two, "books") == {11: 5, 12: 5}
    assert two.wait_applied("books", 6, 0.01)


def test_what_no_datagram_said_is_seen_by_looking(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    one, two = service.worker(11), service.worker(12)
    monkeypatch.setattr(Notices, "_send_to_others", lambda *_: None)
    two.applied("books", 0)
    two.subscribe("books", lambda: two.applied("books", 7))
    one.applied("books", 7)
    one.committed("books")
    assert not one.wait_applied("books", 7, 10)


def test_a_lost_notice_of_one_model_is_made_good_while_those_of_another_come(service: Service) -> None:
    one, two = service.worker(11), service.worker(12)
    looked = threading.Semaphore(0)
    two.subscribe("books", looked.release)  # of whose commits every notice is lost
    two.subscribe("films", lambda: None)
    for number in range(1, 20_000):
        one.applied("films", number)
        one.committed("films")
        if looked.acquire(timeout=0.002):
            return
    pytest.fail("it never looked")


@pytest.mark.parametrize("folder", [None, "x" * 100], ids=["alone", "no room for a socket"])
def test_a_process_that_nobody_can_tell_anything_looks_by_itself_and_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str | None
) -> None:
    """Alone, or where the run folder's path is too long: addresses of sockets have at most 107 bytes."""
    monkeypatch.setattr(module, "POLL_S", 0.01)
    if folder is not None:
        (tmp_path / folder).mkdir()
    looked = threading.Event()
    one = Notices() if folder is None else Notices(tmp_path / folder, 11)
    one.subscribe("books", looked.set)
    one.start()
    assert looked.wait(10)
    one.committed("books")
    one.applied("books", 3)
    assert not one.wait_applied("books", 3, 0)
    if folder is None:
        assert one.wait_applied("books", 4, 0.01)
        assert progress(one, "books") == {os.getpid(): 3}
    one.stop()


def test_who_died_or_does_not_serve_the_model_is_not_waited_for(service: Service) -> None:
    one, two, three = (service.worker(pid) for pid in (11, 12, 13))
    one.applied("books", 9)
    two.applied("books", 1)
    three.applied("films", 1)
    assert one.wait_applied("books", 9, 0.01)
    service.kill(12)
    assert not one.wait_applied("books", 9, 0)
    assert progress(one, "books") == {11: 9}
    three.applied("books", 2)
    assert one.wait_applied("books", 9, 0.01)
    three.applied("books", None)
    assert not one.wait_applied("books", 9, 0)
    forget(service.folder, 12)
    assert not [*service.folder.glob("12.*")]


def test_a_worker_whose_progress_cannot_be_read_counts_as_behind(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "READS", 2)
    one, two = service.worker(11), service.worker(12)
    one.applied("books", 1)
    two.applied("books", 1)
    file = tmp_path / "12.live"
    whole = file.read_bytes()
    assert progress(one, "books") == {11: 1, 12: 1}
    for content in (b"", whole[:7], whole[:8] + b"\7" + whole[9:], b"\7" * len(whole)):
        file.write_bytes(content)
        assert progress(one, "books") == {11: 1, 12: UNKNOWN}
    file.write_bytes(whole)
    assert progress(one, "books") == {11: 1, 12: 1}


def test_a_worker_that_was_waited_for_in_vain_is_waited_for_again_once_it_moves(service: Service) -> None:
    one, two, three = (service.worker(pid) for pid in (11, 12, 13))
    for worker, sequence in ((one, 9), (two, 1), (three, 1)):
        worker.applied("books", sequence)
    behind = one.wait_applied("books", 9, 0.01)
    assert behind == {12: 1, 13: 1}
    assert one.wait_applied("books", 9, 60, behind) == behind  # at once
    two.applied("books", 5)
    assert one.wait_applied("books", 9, 0.01, behind) == {12: 5, 13: 1}
    later = threading.Thread(target=lambda: two.applied("books", 9))
    later.start()
    assert one.wait_applied("books", 9, 60, behind) == {13: 1}  # it waited for the one that moves, not for the other
    later.join()


def test_where_the_run_folder_is_gone_nobody_is_said_to_have_followed(service: Service, tmp_path: Path) -> None:
    one, two = service.worker(11), service.worker(12)
    one.applied("books", 3)
    two.applied("books", 3)
    shutil.rmtree(tmp_path)
    assert one.wait_applied("books", 3, 0.01) == {module.UNSEEN: UNKNOWN}


def test_a_worker_that_stops_is_not_waited_for(service: Service) -> None:
    one, two = service.worker(11), service.worker(12)
    two.applied("books", 1)
    two.stop()
    assert progress(one, "books") == {}
    one.committed("books")  # nobody listens


def test_a_look_that_fails_does_not_end_the_others(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    one = service.worker(11)
    again = threading.Semaphore(0)

    def fail() -> None:
        again.release()
        raise RuntimeError("broken")

    one.subscribe("books", fail)
    assert again.acquire(timeout=10)
    assert again.acquire(timeout=10)


def test_a_full_queue_holds_up_nobody(service: Service, tmp_path: Path) -> None:
    one = service.worker(11)
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as other:
        other.bind(str(tmp_path / "12.sock"))  # it never reads
        for _ in range(2000):
            one.committed("books")


def test_a_later_worker_with_the_same_pid_is_another_one(service: Service) -> None:
    one = service.worker(11)
    for model, other in (("books", "films"), ("films", "books")):
        two = service.worker(12)
        two.applied(model, 7)
        assert [progress(one, model), progress(one, other)] == [{12: 7}, {}]
        service.kill(12)
    (service.folder / "junk.live").write_bytes(b"")
    assert progress(one, "films") == {}


def test_a_worker_may_serve_more_models_than_its_file_has_room_for(service: Service) -> None:
    one, two = service.worker(11), service.worker(12)
    for number in range(2000):
        two.applied(f"model-{number}", number)
    assert [progress(one, f"model-{number}") for number in (0, 1999)] == [{12: 0}, {12: 1999}]
    assert (service.folder / "12.live").stat().st_size > run_folder.ROOM
    two.applied("model-0", None)
    assert [progress(one, "model-0"), progress(one, "no such model")] == [{}, {}]


def test_a_worker_that_could_not_make_its_file_is_behind_as_long_as_it_lives(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would answer by old items, and nobody would wait for it."""
    one = service.worker(11)
    one.applied("books", 2)
    with monkeypatch.context() as patch:
        patch.setattr("service.live.notices.Page", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        two = service.worker(12)
        two.applied("books", 2)
    assert one.wait_applied("books", 2, 0.01) == {12: UNKNOWN}
    two.applied("books", 3)  # there is space again
    assert not one.wait_applied("books", 2, 10)
    service.worker(13)
    (service.folder / "13.live").unlink()
    assert one.wait_applied("books", 2, 0.01) == {13: UNKNOWN}
    service.kill(13)
    assert not one.wait_applied("books", 2, 10)
