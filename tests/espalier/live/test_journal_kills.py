"""Several processes at one journal, killed at random; and that the judge of it sees what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from espalier.live.journal import Journal
from espalier.live.operations import ItemBody, Operation
from tests.espalier.live.journal_kills import VERSION, Role, judged, run
from tests.espalier.live.journals import placed


def committed(file: Path, tokens: list[str]) -> str:
    """Put an item for each token; returns the line that acknowledges it."""
    with Journal(file).writing() as transaction:
        found = [transaction.append(Operation(0, f"id-{token}", "put", ItemBody({"token": token}))) for token in tokens]
        transaction.store_placements(VERSION, {operation.sequence: [placed()] for operation in found})
    done = zip(found, tokens, strict=True)
    return json.dumps([(operation.sequence, operation.id, token) for operation, token in done]) + "\n"


def test_what_is_kept_is_neither_lost_nor_twice(tmp_path: Path) -> None:
    lines = [committed(tmp_path / "live.db", ["a", "b"]), committed(tmp_path / "live.db", ["c"])]
    found = judged(tmp_path / "live.db", 3, [*lines, lines[0][:-3]], 1.0)  # the last was cut off
    assert (found.commits, found.acknowledged, found.lost, found.twice, found.damaged, found.unguarded) == (2, 3, 0, 0, "", 0)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM ops WHERE seq = 2",
        """UPDATE ops SET body = CAST('{"fields":{"token":"x"}}' AS BLOB) WHERE seq = 2""",
        "DELETE FROM placements WHERE seq = 2",
    ],
)
def test_an_acknowledged_operation_that_is_not_there_as_it_was_is_lost(tmp_path: Path, statement: str) -> None:
    line = committed(tmp_path / "live.db", ["a", "b"])
    with Journal(tmp_path / "live.db").exclusive() as connection:
        connection.execute(statement)
    assert judged(tmp_path / "live.db", 0, [line], 1.0).lost == 1


def test_numbers_and_operations_that_come_twice_are_counted(tmp_path: Path) -> None:
    line = committed(tmp_path / "live.db", ["a"])
    other = json.dumps([(1, "other", "b")]) + "\n"
    assert judged(tmp_path / "live.db", 0, [line, other], 1.0).twice == 1
    again = committed(tmp_path / "live.db", ["a"])
    assert judged(tmp_path / "live.db", 0, [line, again], 1.0).twice == 1


def test_a_table_that_does_not_fit_the_operations_is_damage(tmp_path: Path) -> None:
    line = committed(tmp_path / "live.db", ["a"])
    with Journal(tmp_path / "live.db").exclusive() as connection:
        connection.execute("UPDATE latest SET seq = 7")
    assert "latest" in judged(tmp_path / "live.db", 0, [line], 1.0).damaged


@pytest.mark.slow
def test_killed_writers_and_checkpointers_lose_nothing_and_commit_under_the_lock_alone(tmp_path: Path) -> None:
    found = run(tmp_path, kills=15)
    assert found.acknowledged >= found.commits >= 15
    assert (found.lost, found.twice, found.damaged, found.unguarded) == (0, 0, "", 0)


@pytest.mark.slow
def test_commits_and_checkpoints_without_the_lock_are_seen(tmp_path: Path) -> None:
    roles: tuple[Role, ...] = ("write", "write", "checkpoint")
    assert run(tmp_path, kills=4, roles=roles, unlocked=True).unguarded > 0
