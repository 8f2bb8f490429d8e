"""A host that follows another one's live catalogue: it copies what is new, and goes on after failures of either."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest

from espalier.live.journal import Journal
from espalier.live.journal_file import FILE
from espalier.live.journal_upkeep import OnDisk, compact, leave_out
from espalier.live.operations import ItemBody, Operation
from service.errors import NotWritable
from service.http.live_routes import change_json
from service.live import live_version, notices
from service.live.catalogue import LiveCatalogue
from service.live.following import Following, copy
from service.live.writer_feed import FeedFailed, WriterFeed, operation_of
from tests.espalier.live.journals import appended, put
from tests.http_servers import reserved_port
from tests.service.live_running import ADMIN, ByTitle, Live, live_service, models
from tests.service.running import counted
from tests.service.writers import RealWriter, Writer, serving
from tests.waiting import until

__all__ = ["models"]

LAG = 'espalier_live_lag{model="books"}'

FULL = Operation(
    7,
    "täg/1",
    "put",
    ItemBody(
        fields={"title": "T", "tags": ["a"]},
        text="words",
        like=("a",),
        events=(["a", "b"], ["c"]),
        users=("u", "v"),
        valid_until=1.9e9 + 0.25,
        evidence_from=(5, 1.7e9 + 0.25),
    ),
    3,
    1.7e9 + 0.5,
)


class JournalCopies(LiveCatalogue):
    """A journal without versions that serve. fail: raised by the next copy."""

    def __init__(self, journal: Journal) -> None:  # opens nothing
        self.journal = journal
        self.fail: Exception | None = None
        self.notes: list[tuple[int | None, str | None]] = []

    def note(self, behind: int | None, failure: str | None = None) -> None:
        self.notes.append((behind, failure))

    def copied(self) -> None:
        failure, self.fail = self.fail, None
        if failure is not None:
            raise failure


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks often."""
    monkeypatch.setattr("service.live.following.POLL_S", 0.02)


@pytest.fixture
def writer() -> Writer:
    return Writer()


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[JournalCopies]:
    (tmp_path / "books").mkdir()
    journal = Journal.open(tmp_path / "books" / "live.db")
    yield JournalCopies(journal)
    journal.close()


@contextmanager
def following(url: str, folder: Path, copies: JournalCopies, key: str = "k" * 16) -> Iterator[Following]:
    follower = Following(WriterFeed(url, key), folder, lambda: {"books": copies})
    follower.start()
    try:
        yield follower
    finally:
        follower.stop()


def ids(copies: JournalCopies) -> list[str]:
    return [operation.id for operation in copies.journal.since(0, 100)]


def test_a_change_is_the_operation_that_it_was() -> None:
    assert operation_of(json.loads(json.dumps(change_json(FULL)))) == FULL


def test_operations_are_copied_under_their_numbers_as_they_come(tmp_path: Path, writer: Writer, copies: JournalCopies) -> None:
    writer.put("a", "b", "c", "d", "e")
    del writer.operations[2]  # compacted
    with serving(writer) as url, following(url, tmp_path, copies):
        until(lambda: copies.journal.last_sequence() == 5)
        writer.operations.append(Operation(9, "f", "delete", at=1.7e9))
        until(lambda: copies.journal.last_sequence() == 9 and copies.notes[-1] == (0, None))
    assert copies.notes[0] == (3, None)
    assert copies.journal.since(0, 100) == writer.operations
    assert {key for _, key in writer.asked} == {"Bearer " + "k" * 16}


def test_a_host_that_starts_again_asks_for_what_it_lacks(tmp_path: Path, writer: Writer, copies: JournalCopies) -> None:
    writer.put("a", "b")
    with serving(writer) as url:
        with following(url, tmp_path, copies):
            until(lambda: copies.journal.last_sequence() == 2)
        writer.asked.clear()
        writer.put("c")
        with following(url, tmp_path, copies):
            until(lambda: copies.journal.last_sequence() == 3)
            count = len(writer.asked)
            until(lambda: len(writer.asked) > count + 1)
    assert writer.asked[0][0] == 1  # the last operation that it has is compared
    assert writer.asked[-1][0] == 3  # once


def test_it_goes_on_after_it_could_not_store(
    tmp_path: Path, writer: Writer, copies: JournalCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def full(*_: object) -> None:
        monkeypatch.undo()
        failed.set()
        raise OSError("the disk is full")

    monkeypatch.setattr(Journal, "writing", full)
    writer.put("a")
    with serving(writer) as url, following(url, tmp_path, copies):
        until(lambda: ids(copies) == ["a"])
    assert failed.is_set()


def test_one_process_of_a_host_follows_and_another_takes_over(tmp_path: Path, writer: Writer, copies: JournalCopies) -> None:
    writer.put("a")
    idle = JournalCopies(copies.journal)
    idle.fail = AssertionError("it must not copy while another does")
    with serving(writer) as url:
        with following(url, tmp_path, copies):
            until(lambda: ids(copies) == ["a"])
            with following(url, tmp_path, idle, "another key"):
                asked = len(writer.asked)
                until(lambda: len(writer.asked) > asked + 2)
                writer.put("b")
                until(lambda: ids(copies) == ["a", "b"])
                assert {key for _, key in writer.asked} == {"Bearer " + "k" * 16}
                idle.fail = None
        with following(url, tmp_path, idle):
            writer.put("c")
            until(lambda: ids(copies) == ["a", "b", "c"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"identity": "second"}, "delete live.db here"),
        ({"identity": "second", "sequence": 1}, "delete live.db here"),
        ({"sequence": 1}, "has 1 operations, fewer than the 2 that are here"),
    ],
)
def test_another_journal_is_not_followed_nor_one_that_is_behind(
    tmp_path: Path, writer: Writer, copies: JournalCopies, caplog: pytest.LogCaptureFixture, change: dict[str, Any], said: str
) -> None:
    writer.put("a", "b")
    with serving(writer) as url, following(url, tmp_path, copies):
        until(lambda: copies.journal.last_sequence() == 2)
        assert copies.journal.identity() == "first"
        writer.__dict__.update(change)
        writer.put("c")
        until(lambda: said in caplog.text)
    assert ids(copies) == ["a", "b"]
    assert ("delete live.db" in caplog.text) == ("identity" in change)  # what is only behind is no reason to delete anything


def test_a_file_that_was_copied_is_a_copy_as_soon_as_it_follows(tmp_path: Path, writer: Writer, copies: JournalCopies) -> None:
    writer.put("a", "b")
    with copies.journal.writing() as transaction:
        transaction.identify(writer.identity)
        for operation in writer.operations:
            transaction.append(operation)
    assert not copies.journal.is_copy()
    with serving(writer) as url, following(url, tmp_path, copies):
        until(copies.journal.is_copy)
    assert ids(copies) == ["a", "b"]


@pytest.mark.parametrize("other", [{"id": "x"}, {"at": 1.8e9}])
def test_a_writer_that_went_back_and_used_a_number_again_is_not_followed(
    tmp_path: Path, writer: Writer, copies: JournalCopies, caplog: pytest.LogCaptureFixture, other: dict[str, Any]
) -> None:
    writer.put("a", "b")
    with serving(writer) as url:
        with following(url, tmp_path, copies):
            until(lambda: ids(copies) == ["a", "b"])
        copied = writer.operations[1]
        writer.operations[1] = replace(copied, **other)
        for more in ((), ("c",)):
            writer.put(*more)
            caplog.clear()
            with following(url, tmp_path, copies):
                until(lambda: f"Operation 2 of {url} is not the one that was copied here. Was a backup put in place? " in caplog.text)
                until(lambda: copies.notes[-1][0] is None)
            assert ids(copies) == ["a", "b"]
        writer.operations[1] = replace(copied, at=copied.at + 1e-6, body=ItemBody())  # rounded, and its events erased
        with following(url, tmp_path, copies):
            until(lambda: ids(copies) == ["a", "b", "c"])


def test_a_host_that_was_away_while_deletes_were_dropped_says_that_it_must_begin_anew(
    tmp_path: Path, writer: Writer, copies: JournalCopies, caplog: pytest.LogCaptureFixture
) -> None:
    writer.put("a", "b", "c", "d")
    writer.dropped = 9
    with serving(writer) as url:
        with following(url, tmp_path, copies):
            until(lambda: ids(copies) == ["a", "b", "c", "d"])  # two pages: what was dropped before the first lacks nobody
        writer.operations += [Operation(12, "e", "delete", at=1.7e9)]
        writer.dropped = 11
        with following(url, tmp_path, copies):
            until(lambda: "has dropped deletes up to operation 11; 4 were copied here" in caplog.text)
        assert ids(copies) == ["a", "b", "c", "d"]
        copies.journal.close()
        copies.journal.file.unlink()
        copies.journal = Journal(copies.journal.file)
        with following(url, tmp_path, copies):
            until(lambda: ids(copies) == ["a", "b", "c", "d", "e"])


def test_a_model_that_fails_does_not_hold_up_others(tmp_path: Path, writer: Writer, copies: JournalCopies) -> None:
    writer.put("a")
    (tmp_path / "games").mkdir()
    broken = JournalCopies(copies.journal)
    with serving(writer) as url:
        follower = Following(WriterFeed(url, None), tmp_path, lambda: {"games": broken, "books": copies})
        follower.start()
        until(lambda: ids(copies) == ["a"])
        follower.stop()


GOOD = {"sequence": 1, "id": "a", "kind": "put", "at": "2026-01-01T00:00:00Z"}
GARBAGE: list[dict[str, Any]] = [
    *({"fields": wrong} for wrong in ([1], "x")),
    {"text": 5},
    {"events": 5},
    {"users": ["u"]},
    *({"like": [wrong]} for wrong in (5, "\ud800")),
    *({"id": wrong} for wrong in (5, "x" * 513)),
    {"kind": "drop"},
    {"kind": "delete", "like": ["a"]},
    *({"sequence": wrong} for wrong in (1.0, True, 1 << 63, -1)),
    *({"source_version": wrong} for wrong in (1.5, True)),
    {"at": "long ago"},
    {"valid_until": 5},
]


def page(*changes: dict[str, Any]) -> bytes:
    return json.dumps({"changes": [GOOD | change for change in changes], "sequence": 9, "journal": "x"}).encode()


@pytest.mark.parametrize(
    ("after", "body"),
    [
        *((0, body) for body in (b"[]", b"{}", b"no json", b"[" * 1_000_000, b'{"changes": [{"id": "a"}], "sequence": 1}')),
        (0, b'{"changes": [1], "sequence": 1}'),
        *((0, page(wrong)) for wrong in GARBAGE),
        (1, page({"sequence": 1})),  # a feed that goes back
        (0, page({"sequence": 1}, {"sequence": 1})),
        (0, page({"sequence": 2}, {"sequence": 1})),
        (5, page({"sequence": 4})),
    ],
)
def test_another_answer_is_a_failure_and_ends_up_in_no_journal(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, after: int, body: bytes
) -> None:
    monkeypatch.setattr(writer, "answer", lambda path, key: (200, body))
    with serving(writer) as url, closing(WriterFeed(url, None)) as feed, pytest.raises(FeedFailed, match="something else than changes"):
        feed.changes("books", after)


def test_an_answer_that_is_too_large_is_not_read(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.live.writer_feed.MAX_ANSWER_BYTES", 10)
    with serving(writer) as url, closing(WriterFeed(url, None)) as feed, pytest.raises(FeedFailed, match="more than 10 bytes"):
        feed.changes("books", 0)


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n["])
def test_a_writer_that_answers_for_ever_holds_up_no_shutdown(tmp_path: Path, copies: JournalCopies, begin: bytes) -> None:
    asked, over = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(begin)
                asked.set()
                while not over.wait(0.01):
                    connection.sendall(b" ")

        writer = threading.Thread(target=drip)
        writer.start()
        with following(f"http://127.0.0.1:{listening.getsockname()[1]}", tmp_path, copies) as follower:
            assert asked.wait(10)
            stopping = threading.Thread(target=follower.stop, daemon=True)
            stopping.start()
            stopping.join(30)
            stopped = not stopping.is_alive()
            over.set()
        writer.join()
    assert stopped


# -- two hosts: one takes writes, the other follows it, finds the same, refuses writes, and takes over when the first is lost


WRITE = "a-key-for-writing"


@pytest.fixture
def other(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models folder of the second host, with the same version."""
    return Path(shutil.copytree(models / "books", tmp_path_factory.mktemp("other") / "books").parent)


@contextmanager
def writing(models: Path, monkeypatch: pytest.MonkeyPatch, port: int = 0) -> Iterator[tuple[Live, str]]:
    with live_service(models, monkeypatch) as live, serving(RealWriter(live.running), port) as url:
        yield live, url


def follower(other: Path, monkeypatch: pytest.MonkeyPatch, url: str, **settings: Any) -> Any:
    return live_service(other, monkeypatch, follow=url, follow_key=ADMIN, write_keys=(WRITE,), **settings)


def sequence(live: Live) -> int:
    return live.catalogue.status().applied


def reached(live: Live, number: int) -> bool:
    return sequence(live) == number


def test_a_host_that_follows_finds_what_was_put_changed_and_deleted(models: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writing(models, monkeypatch) as (first, url):
        first.put("new", like=("item-1",), fields={"title": "A new one"})
        first.delete("item-3")
        with follower(other, monkeypatch, url) as second:
            until(lambda: sequence(second) == 2)
            assert {*second.found("item-1")} == {*first.found("item-1")}
            first.put("newer", like=("item-9",), valid_until=4e9)
            first.put("new", fields={"title": "Changed"})
            until(lambda: sequence(second) == 4)
            assert second.found("item-9") == first.found("item-9")
            for item_id in ("new", "newer"):
                here, there = second.get(item_id), first.get(item_id)
                assert here.at == pytest.approx(there.at, abs=1e-6)
                assert replace(here, at=None) == replace(there, at=None)
            answer = second.running.retrieve(queries=[{"history": ["item-9"]}], min_sequence=4)
            assert answer["sequence"] == 4


def test_a_worker_that_is_behind_says_where_the_feed_ends(
    models: Path, other: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notices, "POLL_S", 3600.0)  # it never learns what another process commits
    with writing(models, monkeypatch) as (first, url):
        first.put("a", like=("item-1",))
        assert appended(Journal(models / "books" / FILE), [put("b"), put("c")]) == [2, 3]
        for after in range(4):
            page = first.running.client.get(f"/models/books/changes?after={after}&limit=2", headers={"Authorization": f"Bearer {ADMIN}"})
            assert page.json()["sequence"] == 3
        assert sequence(first) == 1
        with follower(other, monkeypatch, url) as second:
            until(lambda: second.catalogue.journal.last_sequence() == 3)
            with closing(WriterFeed(url, ADMIN)) as feed:
                assert feed.changes("books", 3).sequence == 3
    assert "delete live.db" not in caplog.text


def test_an_operation_that_is_here_already_is_not_copied_again(models: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writing(models, monkeypatch) as (first, url):
        first.put("a", like=("item-1",))
        with follower(other, monkeypatch, url) as second:
            until(lambda: sequence(second) == 1)
            (operation,) = Journal(other / "books" / FILE, "read").since(0, 9)
            copy(second.catalogue.journal, [operation, replace(operation, sequence=2, id="b")], None)
            second.catalogue.copied()
            until(lambda: sequence(second) == 2)
            assert {"a", "b"} <= {*second.found("item-1")}


def test_it_refuses_writes_and_names_the_writer(models: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writing(models, monkeypatch) as (_, url), follower(other, monkeypatch, url) as second:
        headers = {"Authorization": f"Bearer {WRITE}", "Content-Type": "application/json"}
        for method, content in (("PUT", json.dumps({"like": ["item-1"]})), ("DELETE", "")):
            answer = second.running.client.request(method, "/models/books/items/x", headers=headers, content=content)
            assert answer.status_code == 409
            assert url in answer.json()["detail"]


@pytest.fixture
def port() -> Iterator[int]:
    """Of a writer that comes back."""
    with reserved_port() as found:
        yield found


def test_it_serves_while_the_writer_is_away_and_catches_up(models: Path, other: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    with writing(models, monkeypatch, port) as (first, url):
        first.put("a", like=("item-1",))
        with follower(other, monkeypatch, url) as second:
            until(lambda: sequence(second) == 1)
    with follower(other, monkeypatch, url) as second:
        assert "a" in second.found("item-1")
        until(lambda: "does not answer" in str(second.catalogue.status().reason))
        second.catalogue._on_lag(0)  # that of its own journal
        assert counted(second.running)[LAG] == inf
        with writing(models, monkeypatch, port) as (first, _):
            first.put("b", like=("item-1",))
            until(lambda: sequence(second) == 2)
            assert {*second.found("item-1")} == {*first.found("item-1")}
            until(lambda: second.catalogue.status().reason == f"follows {url}")
            until(lambda: counted(second.running)[LAG] == 0)


def test_a_host_that_takes_over_gives_no_sequence_again(
    models: Path, other: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with writing(models, monkeypatch) as (first, url):
        first.put("a", like=("item-1",))
        with follower(other, monkeypatch, url) as second:
            until(lambda: sequence(second) == 1)
        first.put("lost", like=("item-1",))
    journal = Journal.open(other / "books" / FILE)
    leave_out(journal)
    journal.close()
    with writing(other, monkeypatch) as (second, url):
        assert second.put("b", like=("item-1",)).sequence > 2
        with follower(models, monkeypatch, url) as first:  # with its old journal, which is not mixed with the new one
            until(lambda: "delete live.db here" in caplog.text)
            assert "b" not in first.found("item-1")
        (models / "books" / FILE).unlink()
        for left in (models / "books").glob(f"{FILE}-*"):
            left.unlink()
        with follower(models, monkeypatch, url) as first:
            until(lambda: sequence(first) == sequence(second))
            assert {*first.found("item-1")} == {*second.found("item-1")}  # each host has slots of its own: ties may differ
            assert {"a", "b"} <= {*first.found("item-1")}
            assert "lost" not in first.found("item-1")


def test_a_host_that_has_followed_gives_no_sequence_before_it_takes_over(
    models: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing(models, monkeypatch) as (first, url):
        first.put("a", like=("item-1",))
        with follower(other, monkeypatch, url) as second:
            until(lambda: sequence(second) == 1)
        with live_service(other, monkeypatch) as second:
            reason = "books/live.db: it is a copy of another host's journal, which takes the writes; run `espalier journal take-over"
            for item in ("b", "a"):  # what changes nothing is refused, too: else the reason would come and go
                assert (second.catalogue.status().reason or "").startswith(reason)
                with pytest.raises(NotWritable, match=reason):
                    second.put(item, like=("item-1",))
            assert "a" in second.found("item-1")
        first.put("c", like=("item-1",))
        with follower(other, monkeypatch, url) as second:
            until(lambda: sequence(second) == 2)
            assert {"a", "c"} <= {*second.found("item-1")}


def test_a_writer_that_has_dropped_its_last_operation_is_not_behind(
    models: Path, other: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    class Asked(RealWriter):
        def answer(self, path: str, key: str | None) -> tuple[int, bytes]:
            asked.append(path)
            return super().answer(path, key)

    journal = Journal(models / "books" / FILE)
    appended(journal, [put("a"), Operation(0, "a", "delete", at=1e9)])
    with live_service(models, monkeypatch) as first, serving(Asked(first.running)) as url, follower(other, monkeypatch, url) as second:
        until(lambda: sequence(second) == 2)
        assert compact(journal, lambda: [OnDisk(None, 2)]).tombstones == 1
        before = len(asked)
        until(lambda: len(asked) > before + 4)
        assert "operations are not copied" not in caplog.text
        first.put("b", like=("item-1",))
        until(lambda: sequence(second) == 3)


def test_an_item_that_its_fields_have_placed_moves_on_both_hosts(models: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_version.LiveVersion, "takes_fields", True)
    with (
        live_service(models, monkeypatch, ByTitle) as first,
        serving(RealWriter(first.running)) as url,
        follower(other, monkeypatch, url, placer=ByTitle) as second,
    ):
        for number, title in enumerate(("item-1", "item-9"), 1):
            outcome = first.put("new", fields={"title": title})
            until(partial(reached, second, number))
            assert second.get("new").placed == outcome.placed


def test_what_is_not_copied_is_noted_while_another_thread_applies(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that copies reads what is not applied, and then the journal's thread applies it all."""
    unapplied = [5]

    def read(_: LiveCatalogue) -> int:
        before = unapplied[-1]
        if len(unapplied) == 1:
            unapplied.append(0)
        return before

    with live_service(models, monkeypatch) as live:
        monkeypatch.setattr(LiveCatalogue, "_unapplied", property(read, lambda _, operations: unapplied.append(operations)), raising=False)
        live.catalogue.note(0)
        live.catalogue.note(0)
        assert counted(live.running)['espalier_live_lag{model="books"}'] == 0
