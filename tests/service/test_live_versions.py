"""Versions that are folded, loaded and rolled back beside a journal: every item is there in each, and nothing is there twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier.bundle import find_versions
from espalier.errors import InvalidInput
from espalier.live.fold import write_fold
from espalier.live.journal import Journal
from espalier.live.journal_file import FILE
from espalier.live.journal_upkeep import compact
from tests.service.live_running import Live, live_service, models

__all__ = ["models"]

ADMIN = "a-key-of-an-administrator"


def fold(live: Live, models: Path, version: int) -> None:
    """Write the default version with its live items in it."""
    served = live.catalogue.thread.served[live.catalogue.thread.default() or 0]
    state = served.built()
    write_fold(models / "books" / str(version), served.bundle, state.overlay(), state.table)


def serve(live: Live, version: int) -> None:
    """Load a version and make it the default."""
    for route in ("load", "default"):
        key = {"Authorization": f"Bearer {ADMIN}"}
        answer = live.running.client.post(f"/models/books/{route}", json={"version": version}, headers=key)
        assert answer.status_code == 200, answer.text


def test_a_fold_is_served_with_what_came_later_and_is_rolled_back_with_nothing_lost(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch, admin_keys=(ADMIN,)) as live:
        live.put("a", like=("item-1",))
        live.put("b", like=("item-2",))
        live.delete("item-5")
        fold(live, models, 2)
        live.put("c", like=("item-1",))
        live.delete("b")
        before = live.found("item-1")
        serve(live, 2)
        assert live.running.retrieve(queries=[{"history": ["item-1"]}])["version"] == 2
        assert {*live.found("item-1")} == {*before}
        live.put("d", like=("item-1",))
        with pytest.raises(InvalidInput, match="the item is new"):
            live.put("item-5")  # the fold has no place for it any more
        after = {*before, "d"}
        assert {*live.found("item-1")} == after
        serve(live, 1)
        assert live.running.retrieve(queries=[{"history": ["item-1"]}])["version"] == 1
        assert {*live.found("item-1")} == after


def test_a_version_that_is_rolled_back_to_needs_no_operation_that_compaction_drops(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch, admin_keys=(ADMIN,)) as live:
        for number in range(3):
            live.put("a", like=("item-1",), fields={"title": f"Title {number}"})
        live.put("gone", like=("item-1",))
        live.delete("gone")
        fold(live, models, 2)
        live.put("a", fields={"title": "Last"})
    journal = Journal.open(models / "books" / FILE)
    dropped = compact(journal, find_versions(models)["books"])
    journal.close()
    assert dropped.operations == 4
    with live_service(models, monkeypatch, admin_keys=(ADMIN,)) as live:
        found = [live.found("item-1")]
        assert live.get("a").body.fields == {"title": "Last"}
        serve(live, 1)
        found.append(live.found("item-1"))
        assert live.get("a").body.fields == {"title": "Last"}
    for ids in found:
        assert "a" in ids
        assert "gone" not in ids
    assert {*found[0]} == {*found[1]}
