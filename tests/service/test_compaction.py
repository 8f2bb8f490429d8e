"""A journal that has grown is compacted beside the writes, and nothing that counts is lost."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from espalier.live import journal
from service.errors import CatalogueFull
from service.live import compaction, group
from tests.service.live_running import Live, live_service, models
from tests.waiting import until

__all__ = ["models"]


def operations(folder: Path) -> int:
    with closing(sqlite3.connect(f"file:{folder / 'live.db'}?mode=ro", uri=True)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM ops").fetchone()
    return int(count)


def test_a_journal_that_has_grown_loses_what_was_replaced_and_nothing_else(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "LEAST_BYTES", 1 << 18)
    monkeypatch.setattr(journal, "CHECKPOINT_BYTES", 1 << 16)
    with live_service(models, monkeypatch) as live:
        live.put("stays", like=("item-1",), fields={"title": "Stays"})
        live.delete("item-2")
        for number in range(60):
            live.put("new", like=("item-1",), fields={"title": f"{number} " + 8192 * "x"})
        (file,) = models.rglob("live.db")
        until(lambda: operations(file.parent) < 62)
        last = live.put("new", like=("item-1",), fields={"title": "Last"})
        assert last.sequence == 63
        assert {"stays", "new"} <= {*live.found("item-1")}
    with live_service(models, monkeypatch) as live:
        assert {"stays", "new"} <= {*live.found("item-1")}
        assert "item-2" not in live.found("item-1")
        assert live.get("new").body.fields == {"title": "Last"}


def test_a_small_journal_is_left_as_it_is(live: Live, models: Path) -> None:
    for number in range(20):
        live.put("new", like=("item-1",), fields={"title": str(number)})
    (file,) = models.rglob("live.db")
    assert operations(file.parent) == 20


def _put(live: Live, item_id: str, characters: int) -> None:
    live.put(item_id, like=("item-1",), fields={"title": characters * "x"})


def test_the_fields_of_all_live_items_have_a_limit_and_a_delete_gives_room(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "MAX_CHARACTERS", 3 * (100 + len("title")))
    with live_service(models, monkeypatch) as live:
        for item_id in ("one", "two", "three"):
            _put(live, item_id, 100)
        with pytest.raises(CatalogueFull, match="fields of live items have 315 characters"):
            _put(live, "four", 1)
        with pytest.raises(CatalogueFull, match="characters"):  # a trained item's changed fields are held too
            _put(live, "item-5", 1)
        live.put("bare", like=("item-1",))
        live.delete("two")
        _put(live, "four", 100)


def test_the_rows_of_all_live_items_have_a_limit_and_a_delete_gives_room(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    width = live.version().bundle.node_rows_ND.shape[1]
    monkeypatch.setattr(group, "MAX_NUMBERS", 2 * width)
    live.put("one", like=("item-1",))
    live.put("two", like=("item-1",))
    with pytest.raises(CatalogueFull, match=f"rows of live items have {2 * width} numbers"):
        live.put("three", like=("item-1",))
    live.put("item-5", fields={"colour": "red"})  # it has the row of training
    live.delete("one")
    live.put("three", like=("item-1",))
