"""The chaos of live items on a few kills, and that its judge sees what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.service import live_clients
from benchmarks.service.live_chaos import chaos
from benchmarks.service.live_clients import Acknowledged, Client, judge
from espalier.live.journal import Journal
from espalier.live.operations import ItemBody, Operation


def write(file: Path, *tokens: tuple[str, str | None]) -> list[Acknowledged]:
    """Put (id, token), or delete where the token is None."""
    with Journal(file).writing() as transaction:
        found = []
        for item, token in tokens:
            put = Operation(0, item, "delete") if token is None else Operation(0, item, "put", ItemBody({"title": token}))
            found.append(Acknowledged(transaction.append(put).sequence, item, token))
    return found


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Titles by id that a service has; what is asked of it."""
    titles: dict[str, str] = {}

    def request(port: int, method: str, path: str, body: object = None) -> tuple[int, object]:
        if method == "GET":
            item = path.rpartition("/")[2]
            return (200, {"fields": {"title": titles[item]}}) if item in titles else (404, None)
        return 200, {"results": [{"items": [{"id": item, "fields": {"title": title}} for item, title in titles.items()]}]}

    monkeypatch.setattr(live_clients, "request", request)
    return titles


def client(*acknowledged: Acknowledged) -> Client:
    return Client("c", 0, "books", [], [*acknowledged], {done.id: done.token for done in acknowledged})


def test_what_is_there_once_is_neither_lost_nor_twice(tmp_path: Path, service: dict[str, str]) -> None:
    done = write(tmp_path / "live.db", ("a", "t1"), ("b", "t2"), ("a", "t3"), ("b", None), ("b", "t4"))
    service |= {"a": "t3", "b": "t4"}
    found = judge(0, "books", tmp_path / "live.db", [client(*done)], 2)
    assert (found.acknowledged, found.lost, found.twice, found.notes) == (5, 0, 0, [])


def test_an_operation_that_the_journal_lacks_is_lost(tmp_path: Path, service: dict[str, str]) -> None:
    done = write(tmp_path / "live.db", ("a", "t1"))
    service["a"] = "t1"
    for other in (Acknowledged(7, "a", "t1"), Acknowledged(1, "a", "t0"), Acknowledged(1, "b", "t1")):
        held = client(*done)
        held.acknowledged.append(other)
        assert judge(0, "books", tmp_path / "live.db", [held], 0).lost == 1


@pytest.mark.parametrize("has", [{}, {"a": "t0"}, {"a": "t1", "b": "t2"}])
def test_an_item_that_the_service_does_not_have_as_it_should_is_lost(tmp_path: Path, service: dict[str, str], has: dict[str, str]) -> None:
    done = write(tmp_path / "live.db", ("a", "t1"), ("b", None))
    service |= has
    found = judge(0, "books", tmp_path / "live.db", [client(*done)], 2)
    assert found.lost == 1  # asked twice, by GET and by retrieval, and counted once
    assert any("GET" in note for note in found.notes)
    assert any("retrieval" in note for note in found.notes)


def test_an_item_whose_last_operation_was_not_answered_may_be_either(tmp_path: Path, service: dict[str, str]) -> None:
    held = client(*write(tmp_path / "live.db", ("a", "t1")))
    held.doubtful.add("a")
    assert judge(0, "books", tmp_path / "live.db", [held], 1).lost == 0
    assert not service


@pytest.mark.parametrize(
    "operations",
    [(("a", "t1"), ("a", "t1")), (("a", "t1"), ("a", "t2"), ("a", "t1")), (("a", "t1"), ("a", None), ("a", None))],
)
def test_an_operation_that_was_applied_twice_is_seen(
    tmp_path: Path, service: dict[str, str], operations: tuple[tuple[str, str | None], ...]
) -> None:
    write(tmp_path / "live.db", *operations)
    assert judge(0, "books", tmp_path / "live.db", [client()], 0).twice == 1
    assert not service


def test_a_sequence_that_was_given_twice_is_seen(tmp_path: Path, service: dict[str, str]) -> None:
    done = write(tmp_path / "live.db", ("a", "t1"))
    held = client(*done, Acknowledged(1, "b", "t2"))
    assert judge(0, "books", tmp_path / "live.db", [held], 0).twice == 1
    assert not service


@pytest.mark.slow
def test_a_service_whose_workers_are_killed_loses_nothing_and_applies_nothing_twice(tmp_path: Path) -> None:
    found = chaos(tmp_path, kills=6)
    assert found.acknowledged > 20
    assert (found.lost, found.twice, found.refused, found.notes) == (0, 0, 0, [])
