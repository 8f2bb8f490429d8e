"""What one process tells another of a commit is what the journal says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier.errors import InvalidData
from espalier.live import journal_messages
from espalier.live.journal import Journal, Transaction
from espalier.live.journal_messages import read_message
from espalier.live.operations import ItemBody, Operation
from tests.espalier.live.journals import placed, put


def committed(journal: Journal) -> Transaction:
    with journal.writing() as transaction:
        transaction.append(put("é\u2028 \x00"), {1: [placed(0), placed(1, 7)], 2: [placed()]})
        transaction.append(Operation(0, "gone", "delete", source_version=(1 << 63) - 1))
        transaction.append(Operation(9, "later", "put", ItemBody(text="ü", users=("u",), events=([],), count=3), at=1.25))
    return transaction


def test_a_message_says_what_the_journal_does(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "live.db")
    found = read_message(committed(journal).message.to_bytes())
    assert [operation for operation, _ in found] == journal.since(0, 10)
    for version in (1, 2):
        stored = journal.placements(version, [1, 2, 9])
        told = {operation.sequence: places[version] for operation, places in found if version in places}
        assert [*told] == [*stored] == [1]
        for one, other in zip(told[1], stored[1], strict=True):
            assert (one.tree, one.parent, one.slot, one.row.to_bytes()) == (other.tree, other.parent, other.slot, other.row.to_bytes())


def test_a_message_of_nothing_and_one_that_would_be_too_large_are_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "live.db")
    with journal.writing() as transaction:
        pass
    assert not transaction.message.to_bytes()
    for most in (100, 10_000):
        monkeypatch.setattr(journal_messages, "MOST_BYTES", most)
        with journal.writing() as transaction:
            transaction.append(put("one"), {1: [placed(0), placed(1, 7)], 2: [placed()]})
        assert bool(transaction.message.to_bytes()) == (most > 100)
    with journal.writing() as transaction:
        transaction.append(Operation(0, "quotes", "put", ItemBody(text=3000 * '"')))  # which take twice as much again in a message
    assert not transaction.message.to_bytes()


@pytest.mark.parametrize(
    "message", [b"", b"[[]]", b"[[1]]", b'[[1,"a","put","{}",null,0,[[1,0,0,0,"?"]]]]', b'[[1,"a","put",2,null,0,[]]]']
)
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(InvalidData, match=r"message|row"):
        read_message(message)
