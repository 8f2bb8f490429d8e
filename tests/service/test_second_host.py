"""Two hosts: one takes writes, the other follows it, finds the same, refuses writes, and takes over when the first is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from espalier.live.journal import Journal
from espalier.live.journal_file import FILE
from espalier.live.journal_upkeep import leave_out
from service.live import live_version, notices
from service.live.following import copy
from service.live.writer_feed import WriterFeed
from tests.espalier.live.journals import appended, put
from tests.service.live_running import ByTitle, Live, live_service, models
from tests.service.writers import RealWriter, serving
from tests.waiting import until

__all__ = ["models"]

ADMIN, WRITE = "a-key-of-an-administrator", "a-key-for-writing"


@pytest.fixture
def other(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models folder of the second host, with the same version."""
    return Path(shutil.copytree(models / "books", tmp_path_factory.mktemp("other") / "books").parent)


@contextmanager
def writing(models: Path, monkeypatch: pytest.MonkeyPatch, port: int = 0) -> Iterator[tuple[Live, str]]:
    with live_service(models, monkeypatch, admin_keys=(ADMIN,)) as live, serving(RealWriter(live.running), port) as url:
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


def test_it_serves_while_the_writer_is_away_and_catches_up(models: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writing(models, monkeypatch) as (first, url):
        port = int(url.rsplit(":", 1)[1])
        first.put("a", like=("item-1",))
        with follower(other, monkeypatch, url) as second:
            until(lambda: sequence(second) == 1)
    with follower(other, monkeypatch, url) as second:
        assert "a" in second.found("item-1")
        until(lambda: "does not answer" in str(second.catalogue.status().reason))
        with writing(models, monkeypatch, port) as (first, _):
            first.put("b", like=("item-1",))
            until(lambda: sequence(second) == 2)
            assert {*second.found("item-1")} == {*first.found("item-1")}
            until(lambda: second.catalogue.status().reason == f"follows {url}")


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


def test_an_item_that_its_fields_have_placed_moves_on_both_hosts(models: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_version.LiveVersion, "takes_fields", True)
    with (
        live_service(models, monkeypatch, ByTitle, admin_keys=(ADMIN,)) as first,
        serving(RealWriter(first.running)) as url,
        follower(other, monkeypatch, url, placer=ByTitle) as second,
    ):
        for number, title in enumerate(("item-1", "item-9"), 1):
            outcome = first.put("new", fields={"title": title})
            until(partial(reached, second, number))
            assert second.get("new").placed == outcome.placed
