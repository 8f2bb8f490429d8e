"""The chaos of live items on a few kills, and that its judge sees what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.service import live_clients
from benchmarks.service.live_chaos import chaos
from benchmarks.service.live_clients import Acknowledged, Client, judge
from espalier.live.journal import Journal
from espalier.live.operations import ItemBody, Operation

Written = tuple[tuple[str, str | None], ...]
"""(id, token) of puts; of deletes the token is None."""


def write(file: Path, written: Written) -> list[Acknowledged]:
    with Journal(file).writing() as transaction:
        found = []
        for item, token in written:
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


ALL = (("a", "t1"), ("b", "t2"), ("a", "t3"), ("b", None), ("b", "t4"))


@pytest.mark.parametrize(
    ("written", "more", "has", "lost", "twice"),
    [
        pytest.param(ALL, (), {"a": "t3", "b": "t4"}, 0, 0, id="all is there once"),
        *(
            pytest.param((("a", "t1"),), (Acknowledged(*other),), {"a": "t1"}, 1, twice, id=f"the journal lacks {other}")
            for other, twice in (((7, "a", "t1"), 0), ((1, "a", "t0"), 1), ((1, "b", "t1"), 1))
        ),
        *(
            pytest.param((("a", "t1"), ("b", None)), (), has, 1, 0, id=f"the service has {has}")
            for has in ({}, {"a": "t0"}, {"a": "t1", "b": "t2"})
        ),
    ],
)
def test_what_is_lost_or_done_twice_is_counted_once(
    tmp_path: Path, service: dict[str, str], written: Written, more: tuple[Acknowledged, ...], has: dict[str, str], lost: int, twice: int
) -> None:
    held = client(*write(tmp_path / "live.db", written))
    held.acknowledged += more
    service |= has
    found = judge(0, "books", tmp_path / "live.db", [held], 2)
    assert (found.acknowledged, found.lost, found.twice) == (len(written) + len(more), lost, twice)
    if lost and not more:  # an item is asked for in both ways
        assert {way for way in ("GET", "retrieval") for note in found.notes if way in note} == {"GET", "retrieval"}


def test_an_item_whose_last_operation_was_not_answered_may_be_either(tmp_path: Path, service: dict[str, str]) -> None:
    held = client(*write(tmp_path / "live.db", (("a", "t1"),)))
    held.doubtful.add("a")
    assert judge(0, "books", tmp_path / "live.db", [held], 1).lost == 0


@pytest.mark.parametrize(
    "written", [(("a", "t1"), ("a", "t1")), (("a", "t1"), ("a", "t2"), ("a", "t1")), (("a", "t1"), ("a", None), ("a", None))]
)
def test_an_operation_that_was_applied_twice_is_seen(tmp_path: Path, service: dict[str, str], written: Written) -> None:
    write(tmp_path / "live.db", written)
    assert judge(0, "books", tmp_path / "live.db", [client()], 0).twice == 1


@pytest.mark.slow
def test_a_service_whose_workers_are_killed_loses_nothing_and_applies_nothing_twice(tmp_path: Path) -> None:
    found = chaos(tmp_path, kills=4)
    assert found.acknowledged > 20
    assert (found.lost, found.twice, found.refused, found.notes) == (0, 0, 0, [])
