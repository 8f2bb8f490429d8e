"""Several processes at one journal, killed at random; and that the judge of it sees what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from espalier.live.journal import Journal
from espalier.live.operations import ItemBody, Operation
from tests.espalier.live.journal_kills import VERSION, Role, run
from tests.espalier.live.journals import placed


def committed(file: Path, tokens: list[str]) -> str:
    """Put an item for each token; returns the line that acknowledges it."""
    with Journal(file).writing() as transaction:
        found = [transaction.append(Operation(0, f"id-{token}", "put", ItemBody({"token": token}))) for token in tokens]
        transaction.store_placements(VERSION, {operation.sequence: [placed()] for operation in found})
    done = zip(found, tokens, strict=True)
    return json.dumps([(operation.sequence, operation.id, token) for operation, token in done]) + "\n"


@pytest.mark.slow
def test_killed_writers_and_checkpointers_lose_nothing_and_commit_under_the_lock_alone(tmp_path: Path) -> None:
    found = run(tmp_path, kills=15)
    assert found.acknowledged >= found.commits >= 15
    assert (found.lost, found.twice, found.damaged, found.unguarded) == (0, 0, "", 0)


@pytest.mark.slow
def test_commits_and_checkpoints_without_the_lock_are_seen(tmp_path: Path) -> None:
    roles: tuple[Role, ...] = ("write", "write", "checkpoint")
    assert run(tmp_path, kills=4, roles=roles, unlocked=True).unguarded > 0
