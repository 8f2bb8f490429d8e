"""A host that follows another one's live catalogue: it copies what is new, and goes on after failures of either."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from espalier.errors import InvalidData
from espalier.live.journal import Journal
from espalier.live.operations import ItemBody, Operation
from service.live.following import Following
from service.live.writer_feed import FeedFailed, WriterFeed, operation_of
from tests.waiting import until

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
    ),
    3,
    1.7e9 + 0.5,
)


def written(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def change_of(operation: Operation) -> dict[str, Any]:
    body = operation.body
    change: dict[str, Any] = {"sequence": operation.sequence, "id": operation.id, "kind": operation.kind, "at": written(operation.at)}
    for name in ("fields", "text", "like", "events", "users"):
        if getattr(body, name):
            change[name] = getattr(body, name)
    if body.valid_until is not None:
        change["valid_until"] = written(body.valid_until)
    if operation.source_version is not None:
        change["source_version"] = operation.source_version
    return change


class Writer:
    """A service with nothing but the feed, two operations a page. status: what it answers."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.status = 200
        self.sequence: int | None = None
        self.asked: list[tuple[int, str | None]] = []

    def answer(self, path: str, key: str | None) -> tuple[int, bytes]:
        parts = urlsplit(path)
        after = int(parse_qs(parts.query)["after"][0])
        self.asked.append((after, key))
        if self.status != 200:
            return self.status, json.dumps({"detail": "It is tired."}).encode()
        assert parts.path == "/models/books/changes"
        new = [operation for operation in self.operations if operation.sequence > after][:2]
        end = max((operation.sequence for operation in self.operations), default=0)
        return 200, json.dumps({"changes": list(map(change_of, new)), "sequence": end if self.sequence is None else self.sequence}).encode()

    def put(self, *ids: str) -> None:
        for item_id in ids:
            body = ItemBody(like=("a",))
            self.operations.append(Operation(len(self.operations) + 1, item_id, "put", body, at=1.7e9 + len(self.operations)))


@contextmanager
def serving(writer: Writer, port: int = 0) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, body = writer.answer(self.path, self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class JournalCopies:
    """Copies into a journal, without versions that serve. fail: raised by the next copy."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.fail: Exception | None = None

    def last_sequence(self) -> int:
        return self.journal.last_sequence()

    def copy(self, operations: Sequence[Operation]) -> None:
        failure, self.fail = self.fail, None
        if failure is not None:
            raise failure
        with self.journal.writing() as transaction:
            for operation in operations:
                transaction.append(operation)


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
def following(url: str, folder: Path, copies: JournalCopies) -> Iterator[Following]:
    follower = Following(WriterFeed(url, "k" * 16), folder, lambda: ["books"], lambda _: copies)
    follower.start()
    try:
        yield follower
    finally:
        follower.stop()


def ids(copies: JournalCopies) -> list[str]:
    return [operation.id for operation in copies.journal.since(0, 100)]


def test_a_change_is_the_operation_that_it_was() -> None:
    assert operation_of(json.loads(json.dumps(change_of(FULL)))) == FULL


def test_operations_are_copied_under_their_numbers_as_they_come(tmp_path: Path, writer: Writer, copies: JournalCopies) -> None:
    writer.put("a", "b", "c", "d", "e")
    del writer.operations[2]  # compacted
    with serving(writer) as url, following(url, tmp_path, copies):
        until(lambda: copies.last_sequence() == 5)
        writer.operations.append(Operation(9, "f", "delete", at=1.7e9))
        until(lambda: copies.last_sequence() == 9)
    assert copies.journal.since(0, 100) == writer.operations
    assert {key for _, key in writer.asked} == {"Bearer " + "k" * 16}


def test_a_host_that_starts_again_asks_for_what_it_lacks(tmp_path: Path, writer: Writer, copies: JournalCopies) -> None:
    writer.put("a", "b")
    with serving(writer) as url:
        with following(url, tmp_path, copies):
            until(lambda: copies.last_sequence() == 2)
        writer.asked.clear()
        writer.put("c")
        with following(url, tmp_path, copies):
            until(lambda: copies.last_sequence() == 3)
    assert writer.asked[0][0] == 2


def test_it_goes_on_after_the_writer_was_away(
    tmp_path: Path, writer: Writer, copies: JournalCopies, caplog: pytest.LogCaptureFixture
) -> None:
    writer.put("a")
    with serving(writer) as url, following(url, tmp_path, copies):
        until(lambda: ids(copies) == ["a"])
        writer.status = 503
        until(lambda: "answers 503: It is tired." in caplog.text)
        writer.put("b")
        writer.status = 200
        until(lambda: ids(copies) == ["a", "b"])


def test_it_goes_on_after_it_could_not_store(tmp_path: Path, writer: Writer, copies: JournalCopies) -> None:
    copies.fail = OSError("the disk is full")
    writer.put("a")
    with serving(writer) as url, following(url, tmp_path, copies):
        until(lambda: ids(copies) == ["a"])
    assert copies.fail is None


def test_one_process_of_a_host_follows_and_another_takes_over(tmp_path: Path, writer: Writer, copies: JournalCopies) -> None:
    writer.put("a")
    idle = JournalCopies(copies.journal)
    idle.fail = AssertionError("it must not copy while another does")
    with serving(writer) as url:
        with following(url, tmp_path, copies):
            until(lambda: ids(copies) == ["a"])
            with following(url, tmp_path, idle):
                asked = len(writer.asked)
                until(lambda: len(writer.asked) > asked + 2)
                writer.put("b")
                until(lambda: ids(copies) == ["a", "b"])
                assert idle.fail is not None
                idle.fail = None
        with following(url, tmp_path, idle):
            writer.put("c")
            until(lambda: ids(copies) == ["a", "b", "c"])


def test_a_writer_with_a_younger_journal_is_not_followed(
    tmp_path: Path, writer: Writer, copies: JournalCopies, caplog: pytest.LogCaptureFixture
) -> None:
    writer.put("a", "b")
    with serving(writer) as url, following(url, tmp_path, copies):
        until(lambda: copies.last_sequence() == 2)
        writer.sequence = 1
        until(lambda: "another journal" in caplog.text)


@pytest.mark.parametrize(
    "body", [b"[]", b"{}", b"no json", b'{"changes": [{"id": "a"}], "sequence": 1}', b'{"changes": [1], "sequence": 1}']
)
def test_another_answer_is_a_failure(writer: Writer, monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr(writer, "answer", lambda path, key: (200, body))
    with serving(writer) as url, closing(WriterFeed(url, None)) as feed, pytest.raises(FeedFailed, match="something else than changes"):
        feed.changes("books", 0)


def test_an_answer_that_is_too_large_is_not_read(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.live.writer_feed.MAX_ANSWER_BYTES", 10)
    with serving(writer) as url, closing(WriterFeed(url, None)) as feed, pytest.raises(FeedFailed, match="more than 10 bytes"):
        feed.changes("books", 0)


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://", "/path"])
def test_an_address_without_a_scheme_or_a_host_is_refused(url: str) -> None:
    with pytest.raises(InvalidData, match="ESPALIER_FOLLOW"):
        WriterFeed(url, None)
