"""Which writes the journal's thread commits together, and when it waits for more of them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from espalier.live.journal import Journal
from espalier.live.operations import ItemBody
from service.live.catalogue_types import Put
from service.live.group import Write
from service.live.journal_thread import TOGETHER, JournalThread
from service.live.notices import Notices


class Committed:
    """A thread that is driven turn by turn; its commits take a while, and are noted."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.thread = JournalThread("books", Journal(folder / "live.db"), Notices(), 10, lambda: None, lambda lag: None)
        self.patch = patch
        self.groups: list[str] = []
        self.meanwhile: list[Write] = []
        patch.setattr(self.thread, "_commit", self._commit)

    def put(self, ids: str) -> None:
        for item_id in ids:
            self.thread._queue.put(Write(Put(item_id, ItemBody(like=("x",)))))

    def turns(self, count: int) -> None:
        for _ in range(count):
            assert self.thread._turn()

    def _commit(self, group: Sequence[Write]) -> None:
        self.groups.append("".join(write.request.id for write in group))
        time.sleep(0.002)
        for write in self.meanwhile:
            self.thread._queue.put(write)
        self.meanwhile.clear()


@pytest.fixture
def committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Committed:
    return Committed(tmp_path, monkeypatch)


def test_writes_that_come_while_one_is_committed_wait_for_more(committed: Committed) -> None:
    committed.put("a")
    committed.meanwhile.append(Write(Put("b", ItemBody(like=("x",)))))
    committed.turns(1)
    assert committed.thread._begin_at > -math.inf
    committed.put("c")
    looked: list[bool] = []
    committed.patch.setattr(committed.thread, "_catch_up", lambda: looked.append(True))
    committed.thread._queue.put(committed.thread._catch_up)  # others wait for that
    committed.turns(2)
    assert (committed.groups, looked) == (["a", "bc"], [True])


def test_one_write_after_the_other_waits_for_nothing(committed: Committed) -> None:
    for item_id in "abc":
        committed.put(item_id)
        committed.turns(1)
        assert committed.thread._begin_at == -math.inf
    assert committed.groups == ["a", "b", "c"]


def test_writes_that_cannot_go_together_do_not_wait_for_more(committed: Committed) -> None:
    committed.put("aaab")
    committed.turns(3)
    assert committed.groups == ["a", "a", "ab"]
    assert committed.thread._begin_at == -math.inf


def test_a_larger_group_and_enough_that_wait_begin_at_once(committed: Committed) -> None:
    many = "abcdefgh"[:TOGETHER]
    committed.put(many)
    committed.meanwhile.append(Write(Put("x", ItemBody(like=("x",)))))
    committed.turns(2)
    assert committed.groups == [many, "x"]
    committed.put("a")
    committed.meanwhile += [Write(Put(item_id, ItemBody(like=("x",)))) for item_id in many]
    committed.turns(1)
    committed.thread._begin_at = time.monotonic() + 600
    committed.turns(2)
    assert committed.groups[2:] == ["a", many]


def test_the_end_ends_a_pause(committed: Committed) -> None:
    committed.put("a")
    committed.meanwhile.append(Write(Put("b", ItemBody(like=("x",)))))
    committed.turns(1)
    committed.thread._begin_at = time.monotonic() + 600
    committed.thread._queue.put(None)
    committed.turns(2)
    assert committed.groups == ["a", "b"]
    assert not committed.thread._turn()
