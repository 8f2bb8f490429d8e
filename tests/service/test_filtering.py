"""Filters, removals and explanations over HTTP, with a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.random_bundles import make_bundle, random_memory, random_tree
from espalier.engines import open_engine
from espalier.memory import Memory
from tests.service.running import Json, Running, bearer, document, ids, problem, run

SECTIONS = ("games", "math", "libs", None)
KEY = "test-admin-key-0"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service with one model, `books`, of some 250 items with sections, prices and tags, on onnx-cpu."""
    folder = tmp_path_factory.mktemp("filtered")
    rng = np.random.default_rng(5)
    tree = random_tree(rng, height=5, branching=3, empty_share=0.1)
    count = tree.item_count
    columns = {
        "section": [SECTIONS[i] for i in rng.integers(0, 4, count)],
        "price": rng.integers(1, 50, count).tolist(),
        "tags": [[f"tag-{t}" for t in rng.integers(0, 5, rng.integers(0, 3))] for _ in range(count)],
    }
    make_bundle(folder, rng, tree, name="books", integer=False, columns=columns, beam_size=8, m=5, max_beam_size=500, max_m=500)
    with run(folder, lambda bundle: open_engine(bundle, "cpu"), admin_keys=(KEY,)) as running:
        yield running


def rows(running: Running) -> list[Json]:
    """Every item with its columns."""
    items = running.app.state.service.registry.choose("books", None).bundle.items
    found: list[Json] = items.to_table().to_pylist()
    return found


def test_the_items_that_pass_both_filters_come_back_when_the_beam_holds_them(shelf: Running) -> None:
    """What passes a filter: tests/espalier/test_masks.py."""
    filters = {"filter": {"section": ["games", "libs"], "price": {"max": 40}}, "exclude_filter": {"tags": ["tag-1"]}}
    passing = [
        one["id"] for one in rows(shelf) if one["section"] in ("games", "libs") and one["price"] <= 40 and "tag-1" not in one["tags"]
    ]
    query = {"history": passing[:2], "exclude_seen": True, "exclude": [passing[2]]}
    result = shelf.retrieve(queries=[query], m=300, beam_size=500, **filters)["results"][0]
    assert {*ids(result)} == {*passing[3:]}
    assert result["complete"]
    assert sorted([item["score"] for item in result["items"]], reverse=True) == [item["score"] for item in result["items"]]


def test_a_filter_that_leaves_few_items_widens_the_beam(shelf: Running) -> None:
    count = len(rows(shelf))
    few = [item["id"] for item in rows(shelf)][:30]
    body: Json = {"queries": [{"history": ["item-3"]}], "m": 30, "filter": {"id": few}}

    def used(beam_size: int, **rest: Any) -> int:
        found: int = shelf.retrieve(**body | rest, beam_size=beam_size)["results"][0]["beam_size"]
        return found

    assert [used(size) for size in (1, 5)] == [round(size * (count / 30) ** 0.5) for size in (1, 5)]
    assert [used(size) for size in (20, 30, 400)] == [30, 30, 30]  # no more than there are
    assert used(5, filter={"id": few[:2]}) == 2
    assert used(5, filter={}) == 5
    assert used(1, filter={"section": ["nowhere"]}) == 1
    assert set(ids(shelf.retrieve(**body, beam_size=20)["results"][0])) == set(few)


# -- explanations ---------------------------------------------------------------------------------------------------------


def remove(running: Running, *removed: str) -> Json:
    return document(running.client.request("PUT", "/models/books/removed", json={"ids": list(removed)}, headers=bearer(KEY)))


def test_an_explanation_says_where_each_wanted_item_went(shelf: Running) -> None:
    body: Json = {"queries": [{"history": ["item-3"], "exclude": ["item-9"]}], "m": 4, "beam_size": 6}
    everything = ids(shelf.retrieve(**body | {"m": 500, "beam_size": 500})["results"][0])
    top = ids(shelf.retrieve(**body)["results"][0])
    wide = rows(shelf)
    cheap = {item["id"] for item in wide if item["price"] <= 25}
    dear = next(item["id"] for item in wide if item["price"] > 25 and item["id"] != "item-9")
    try:
        remove(shelf, "item-11")
        top = ids(shelf.retrieve(**body, filter={"price": {"max": 25}})["results"][0])
        lost = next(item for item in reversed(everything) if item in cheap and item not in top and item not in ("item-9", "item-11"))
        wanted = [top[1], "item-9" if "item-9" in cheap else top[0], dear, "item-11", "unheard-of", lost]
        result = shelf.retrieve(**body, filter={"price": {"max": 25}}, explain_items=wanted)["results"][0]
    finally:
        remove(shelf)
    assert ids(result) == top
    found = {entry["id"]: entry for entry in result["explain"]["items"]}
    assert found[top[1]]["outcome"] == "returned"
    assert found[top[1]]["place"] == 2
    assert found["item-11"]["outcome"] == "removed"
    assert found["unheard-of"] == {"id": "unheard-of", "outcome": "unknown"}
    assert found[dear]["outcome"] == "filtered"
    assert found[lost]["outcome"] == "pruned"
    assert found[lost]["rank"] <= found[lost]["cut"]
    if "item-9" in cheap:
        assert found["item-9"]["outcome"] == "excluded"
    levels = result["explain"]["levels"]
    assert [level["level"] for level in levels] == list(range(levels[0]["level"], 6))
    for level in levels:
        assert level["kept"] <= level["candidates"]
        assert (level["dropped"] is None) == (level["kept"] == level["candidates"])
        assert level["kept"] <= (4 if level["level"] == 5 else result["beam_size"])
        if level["dropped"] is not None:
            assert level["dropped"] <= level["cut"]


def test_min_score_is_told_apart_and_explanations_are_for_few_queries(shelf: Running) -> None:
    body: Json = {"queries": [{"history": ["item-3"]}], "m": 10, "beam_size": 50}
    items = shelf.retrieve(**body)["results"][0]["items"]
    least = items[4]["score"]
    last = items[-1]["id"]
    result = shelf.retrieve(**body, min_score=least, explain_items=[last])["results"][0]
    assert items[-1]["score"] < least
    assert result["explain"]["items"][0]["outcome"] == "below_min_score"
    answer = shelf.client.post("/retrieve", json={"model": "books", "queries": [{"history": []}] * 9, "explain": True})
    assert answer.status_code == 422
    assert problem(answer)["errors"][0]["field"] == "queries"


# -- an explained search names its nodes, an item's ancestors among them, and what a memory adds to its key ---------------


HISTORY = ["item-3", "item-7", "item-3", "item-11", "item-20"]
"""The memory weighs the last four."""
BODY: Json = {"queries": [{"history": ["item-1", "item-7"]}], "m": 5, "beam_size": 6}


@pytest.fixture(scope="module")
def explained_shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One model `books` of 82 items and with a memory."""
    folder, rng = tmp_path_factory.mktemp("nodes"), np.random.default_rng(3)
    tree = random_tree(rng, height=5, branching=3, empty_share=0.1)
    memory = random_memory(rng, tree.item_count, 4, integer=False)
    make_bundle(folder, rng, tree, name="books", integer=False, memory=memory, beam_size=8, m=5, max_beam_size=500, max_m=500)
    with run(folder, lambda bundle: open_engine(bundle, "cpu"), max_answer_values=280) as running:
        yield running


def explained(explained_shelf: Running, **more: object) -> Json:
    found: Json = explained_shelf.retrieve(**BODY, **more)["results"][0]["explain"]
    return found


def test_levels_name_their_nodes_best_first_and_those_kept_before_the_others(explained_shelf: Running) -> None:
    tree = explained_shelf.app.state.service.registry.choose("books", None).bundle.tree
    plain, levels = (
        explained(explained_shelf, explain=True)["levels"],
        explained(explained_shelf, explain=True, explain_nodes=True)["levels"],
    )
    assert [{key: level[key] for key in level if key not in ("nodes", "keys")} for level in levels] == plain
    for level in levels:
        kept, keys = level["kept"], level["keys"]
        assert len(level["nodes"]) == len({*level["nodes"]}) == len(keys) == level["candidates"]
        assert keys[:kept] == sorted(keys[:kept], reverse=True)
        assert keys[kept:] == sorted(keys[kept:], reverse=True)
        assert (keys[kept - 1], keys[kept]) == pytest.approx((level["cut"], level["dropped"]))
        assert {*level["nodes"]} <= {*tree.level(level["level"])}
    for above, below in pairwise(levels):
        children, _ = tree.children(np.sort(np.array(above["nodes"][: above["kept"]])))
        assert {*below["nodes"]} <= {*children.tolist()}


def test_an_items_ancestors_have_their_places_among_the_nodes(explained_shelf: Running) -> None:
    wide = ids(explained_shelf.retrieve(**BODY | {"m": 500, "beam_size": 500})["results"][0])
    returned = ids(explained_shelf.retrieve(**BODY)["results"][0])[2]
    for item in (returned, wide[-1], wide[40]):
        found = explained(explained_shelf, explain_items=[item], explain_nodes=True)
        (entry,) = found["items"]
        assert [one["level"] for one in entry["path"]] == [level["level"] for level in found["levels"]]
        reached = [one for one in entry["path"] if one["place"] is not None]
        for one in reached:
            level = next(level for level in found["levels"] if level["level"] == one["level"])
            at = level["nodes"].index(one["node"])
            assert (one["kept"], one["place"]) == (at < level["kept"], at + 1)
            assert one["key"] == pytest.approx(level["keys"][at])
        if entry["outcome"] == "pruned":
            assert (reached[-1]["level"], reached[-1]["kept"]) == (entry["level"], False)
        else:
            assert (len(reached), reached[-1]["kept"], reached[-1]["place"]) == (len(entry["path"]), True, entry["place"])


def test_excluded_items_have_paths_nodes_count_as_values_and_levels_are_cut_by_keys(explained_shelf: Running) -> None:
    first = ids(explained_shelf.retrieve(**BODY)["results"][0])[0]
    excluding = BODY | {"queries": [BODY["queries"][0] | {"exclude": [first]}]}
    (entry,) = explained_shelf.retrieve(**excluding, explain_items=[first])["results"][0]["explain"]["items"]
    assert (entry["outcome"], entry["path"][-1]["place"], entry["path"][-1]["kept"]) == ("excluded", None, False)
    assert explained(explained_shelf, explain=True, explain_nodes=True)["levels"]
    wide = BODY | {"model": "books", "beam_size": 400, "explain": True, "m": 200}
    assert explained_shelf.client.post("/retrieve", json=wide).status_code == 200
    for body in (wide | {"explain_nodes": True}, BODY | {"model": "books", "explain_nodes": True}):
        answer = explained_shelf.client.post("/retrieve", json=body)
        assert answer.status_code == 422
        assert problem(answer)["errors"][0]["field"] == "explain_nodes"
    body = {"queries": [{"history": HISTORY}], "m": 5, "beam_size": 6}
    everything = ids(explained_shelf.retrieve(**body | {"m": 500, "beam_size": 500})["results"][0])
    result = explained_shelf.retrieve(**body, explain_items=everything[-4:])["results"][0]
    for level in result["explain"]["levels"]:
        assert level["dropped"] is None or level["dropped"] <= level["cut"]
    for entry in result["explain"]["items"]:
        assert entry["outcome"] == "pruned"
        assert entry["rank"] <= entry["key"] <= entry["cut"]


def linked(memory: Memory, item: int) -> dict[str, float]:
    """What each item of the history adds to the key of an item, from the definition."""
    found: dict[str, float] = {}
    for d, source in enumerate(HISTORY[::-1][: len(memory.weight)]):
        row = int(source.removeprefix("item-"))
        for e in range(int(memory.offset[row]), int(memory.offset[row + 1])):
            if memory.item[e] == item:
                found[source] = found.get(source, 0.0) + memory.key_weight * float(memory.weight[d]) * float(memory.value[e])
    return found


def test_explanations_say_which_past_items_spoke_for_an_item(explained_shelf: Running) -> None:
    memory = explained_shelf.app.state.service.registry.choose("books", None).bundle.memory
    body: Json = {"queries": [{"history": HISTORY}], "m": 500, "beam_size": 500}
    found = ids(explained_shelf.retrieve(**body)["results"][0])
    numbers = [int(item.removeprefix("item-")) for item in found]
    most = sorted(numbers, key=lambda item: -len(linked(memory, item)))
    assert len(linked(memory, most[0])) > 1
    wanted = [f"item-{item}" for item in (most[0], most[1], most[-1])]
    told = explained_shelf.retrieve(**body, explain_items=wanted)["results"][0]["explain"]["items"]
    for item, entry in zip((most[0], most[1], most[-1]), told, strict=True):
        expected = sorted(linked(memory, item).items(), key=lambda one: -one[1])
        assert [one["id"] for one in entry["memory"]["items"]] == [source for source, _ in expected[:3]]
        assert [one["part"] for one in entry["memory"]["items"]] == pytest.approx([part for _, part in expected[:3]])
        assert entry["memory"]["part"] == pytest.approx(sum(part for _, part in expected))
        assert entry["key"] == pytest.approx(entry["rank"] + entry["memory"]["part"], abs=1e-4)


def test_an_item_of_the_history_may_be_left_out_or_speak_for_itself(tmp_path: Path) -> None:
    """Item 7 came last and is left out; item 1 came before it and is lifted."""
    rng = np.random.default_rng(4)
    tree = random_tree(rng, height=3, branching=3)
    repeat, left_out = np.array([0, 5, 0, 0, 0, 0], np.float32), np.arange(6) == 0
    memory = replace(random_memory(rng, tree.item_count, 4, integer=False), repeat=repeat, left_out=left_out)
    make_bundle(tmp_path, rng, tree, name="books", integer=False, memory=memory, beam_size=8, m=5, max_beam_size=500, max_m=500)
    every = BODY | {"m": 500, "beam_size": 500}
    with run(tmp_path, lambda bundle: open_engine(bundle, "cpu")) as running:
        found = running.retrieve(**every, explain_items=["item-7", "item-1"])["results"][0]
        again = running.retrieve(**every | {"queries": [{"history": ["item-7", "item-1", "item-7"]}]})["results"][0]
    assert {*ids(found)} == {f"item-{i}" for i in range(tree.item_count)} - {"item-7"} == {*ids(again)}
    out, lifted = found["explain"]["items"]
    assert out["outcome"] == "excluded"
    own = next(source["part"] for source in lifted["memory"]["items"] if source["id"] == "item-1")
    assert own >= 5 * memory.key_weight
