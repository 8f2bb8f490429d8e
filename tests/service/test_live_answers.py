"""Answers with live items in them: explanations, completion, re-ranking, and models of other kinds than histories."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from espalier.bundle import Bundle
from tests.rankers import add_ranker
from tests.service.live_running import Live, live_service, models

__all__ = ["models"]


def explained(live: Live, *items: str, **body: Any) -> dict[str, Any]:
    answer = live.running.retrieve(queries=[{"history": ["item-1"]}], explain_items=list(items), **({"m": 4} | body))
    return {entry["id"]: entry for entry in answer["results"][0]["explain"]["items"]}


def test_an_explanation_says_that_an_item_is_live_and_since_when(live: Live) -> None:
    live.put("new", like=("item-1",), fields={"colour": "red"})
    live.put("item-4", fields={"colour": "green"})
    live.put("gone", like=("item-1",))
    live.delete("gone")
    live.delete("item-3")
    found = explained(live, "new", "item-4", "gone", "item-3", "item-5", "nobody", m=40, beam_size=64)
    assert found["new"]["outcome"] == "returned"
    assert found["new"]["level"] == 5
    assert {name: found["new"]["live"][name] for name in ("sequence", "placed_by")} == {"sequence": 1, "placed_by": "like"}
    assert found["new"]["live"]["since"].startswith("20")
    assert found["item-4"]["live"]["placed_by"] == "trained"
    assert [found[item]["outcome"] for item in ("gone", "item-3", "nobody")] == ["deleted", "deleted", "unknown"]
    assert "live" not in found["item-5"]
    filtered = explained(live, "new", "item-4", filter={"colour": ["red"]})
    assert filtered["item-4"]["outcome"] == "filtered"
    assert filtered["new"]["outcome"] != "filtered"


@pytest.mark.settings(widen=1)
def test_a_live_item_is_pruned_where_its_parent_was(live: Live) -> None:
    for i in range(32):
        live.put(f"new-{i}", like=(f"item-{i}",))
    items = [f"new-{i}" for i in range(8)]
    found = explained(live, *items, m=4, beam_size=2)
    whole = explained(live, *items, m=40, beam_size=64)
    outcomes = {entry["outcome"] for entry in found.values()}
    assert "pruned" in outcomes
    for entry in found.values():
        if entry["outcome"] == "pruned":
            assert 1 <= entry["level"] <= 5
            assert entry["cut"] is not None
    assert {entry["outcome"] for entry in whole.values()} <= {"returned", "pruned"}


def test_completion_knows_live_items_by_what_they_are_called_now(live: Live) -> None:

    def completed(prefix: str, limit: int = 100) -> list[str]:
        answer = live.running.client.get("/models/books/items", params={"prefix": prefix, "limit": limit}).json()
        return [item["id"] for item in answer["items"]]

    before = completed("title 1")
    live.put("new", like=("item-1",), fields={"title": "TITLE 1 again"})
    live.put("item-1", fields={"title": "Another"})
    live.delete("item-10")
    assert completed("title 1") == [item for item in before if item not in ("item-1", "item-10")] + ["new"]
    assert completed("anoth") == ["item-1"]
    assert completed("NEW") == ["new"]
    assert completed("title 1", 3) == ["item-11", "item-12", "item-13"]
    live.delete("new")
    assert completed("new") == []


def test_the_ranker_sees_live_items_as_they_are(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(models / "books" / "1")
    add_ranker(bundle, {"attribute.price": 1.0, "history.last": 0.0}, depth=40, max_depth=40)
    shutil.rmtree(models / "books" / "1")
    with live_service(models, monkeypatch) as live:
        live.put("dear", like=("item-1",), fields={"price": 1000.0})
        live.put("item-2", fields={"price": 500.0})
        live.put("bare", like=("item-1",))
        answer = live.running.retrieve(queries=[{"history": ["item-1", "dear"]}], rerank=True, m=40, beam_size=64)
        items = answer["results"][0]["items"]
        assert [item["id"] for item in items[:3]] == ["dear", "item-2", "item-31"]
        assert items[-1]["id"] == "bare"  # its price is missing
        explained = live.running.retrieve(
            queries=[{"history": ["item-1", "dear"]}], rerank=True, m=40, beam_size=64, explain_items=["dear", "item-2"]
        )
        dear, changed = explained["results"][0]["explain"]["items"]
        assert dear["rank_features"] == {"attribute.price": 1000.0, "history.last": pytest.approx(1.0)}
        assert changed["rank_features"]["attribute.price"] == 500.0
