"""An explained search names its nodes, an item's ancestors among them, and what a memory adds to its key."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.random_bundles import make_bundle, random_memory, random_tree
from espalier.engines import open_engine
from espalier.memory import Memory
from tests.service.running import Json, Running, ids, problem, run

HISTORY = ["item-3", "item-7", "item-3", "item-11", "item-20"]
"""The memory weighs the last four."""
BODY: Json = {"queries": [{"history": ["item-1", "item-7"]}], "m": 5, "beam_size": 6}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One model `books` of 82 items and with a memory."""
    folder, rng = tmp_path_factory.mktemp("nodes"), np.random.default_rng(3)
    tree = random_tree(rng, height=5, branching=3, empty_share=0.1)
    memory = random_memory(rng, tree.item_count, 4, integer=False)
    make_bundle(folder, rng, tree, name="books", integer=False, memory=memory, beam_size=8, m=5, max_beam_size=500, max_m=500)
    with run(folder, lambda bundle: open_engine(bundle, "cpu"), max_answer_values=280) as running:
        yield running


def explained(shelf: Running, **more: object) -> Json:
    found: Json = shelf.retrieve(**BODY, **more)["results"][0]["explain"]
    return found


def test_levels_name_their_nodes_best_first_and_those_kept_before_the_others(shelf: Running) -> None:
    tree = shelf.app.state.service.registry.choose("books", None).bundle.tree
    plain, levels = explained(shelf, explain=True)["levels"], explained(shelf, explain=True, explain_nodes=True)["levels"]
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


def test_an_items_ancestors_have_their_places_among_the_nodes(shelf: Running) -> None:
    wide = ids(shelf.retrieve(**BODY | {"m": 500, "beam_size": 500})["results"][0])
    returned = ids(shelf.retrieve(**BODY)["results"][0])[2]
    for item in (returned, wide[-1], wide[40]):
        found = explained(shelf, explain_items=[item], explain_nodes=True)
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


def test_an_excluded_item_has_a_path_that_was_not_searched_to_its_end(shelf: Running) -> None:
    first = ids(shelf.retrieve(**BODY)["results"][0])[0]
    body = BODY | {"queries": [BODY["queries"][0] | {"exclude": [first]}]}
    (entry,) = shelf.retrieve(**body, explain_items=[first])["results"][0]["explain"]["items"]
    assert (entry["outcome"], entry["path"][-1]["place"], entry["path"][-1]["kept"]) == ("excluded", None, False)


def test_nodes_count_as_values_of_the_answer(shelf: Running) -> None:
    assert explained(shelf, explain=True, explain_nodes=True)["levels"]
    wide = BODY | {"model": "books", "beam_size": 400, "explain": True, "m": 200}
    assert shelf.client.post("/retrieve", json=wide).status_code == 200
    for body in (wide | {"explain_nodes": True}, BODY | {"model": "books", "explain_nodes": True}):
        answer = shelf.client.post("/retrieve", json=body)
        assert answer.status_code == 422
        assert problem(answer)["errors"][0]["field"] == "explain_nodes"


def linked(memory: Memory, item: int) -> dict[str, float]:
    """What each item of the history adds to the key of an item, from the definition."""
    found: dict[str, float] = {}
    for d, source in enumerate(HISTORY[::-1][: len(memory.weight)]):
        row = int(source.removeprefix("item-"))
        for e in range(int(memory.offset[row]), int(memory.offset[row + 1])):
            if memory.item[e] == item:
                found[source] = found.get(source, 0.0) + memory.key_weight * float(memory.weight[d]) * float(memory.value[e])
    return found


def test_explanations_say_which_past_items_spoke_for_an_item(shelf: Running) -> None:
    memory = shelf.app.state.service.registry.choose("books", None).bundle.memory
    body: Json = {"queries": [{"history": HISTORY}], "m": 500, "beam_size": 500}
    found = ids(shelf.retrieve(**body)["results"][0])
    numbers = [int(item.removeprefix("item-")) for item in found]
    most = sorted(numbers, key=lambda item: -len(linked(memory, item)))
    assert len(linked(memory, most[0])) > 1
    wanted = [f"item-{item}" for item in (most[0], most[1], most[-1])]
    told = shelf.retrieve(**body, explain_items=wanted)["results"][0]["explain"]["items"]
    for item, entry in zip((most[0], most[1], most[-1]), told, strict=True):
        expected = sorted(linked(memory, item).items(), key=lambda one: -one[1])
        assert [one["id"] for one in entry["memory"]["items"]] == [source for source, _ in expected[:3]]
        assert [one["part"] for one in entry["memory"]["items"]] == pytest.approx([part for _, part in expected[:3]])
        assert entry["memory"]["part"] == pytest.approx(sum(part for _, part in expected))
        assert entry["key"] == pytest.approx(entry["rank"] + entry["memory"]["part"], abs=1e-4)


def test_levels_are_cut_by_keys(shelf: Running) -> None:
    body: Json = {"queries": [{"history": HISTORY}], "m": 5, "beam_size": 6}
    everything = ids(shelf.retrieve(**body | {"m": 500, "beam_size": 500})["results"][0])
    result = shelf.retrieve(**body, explain_items=everything[-4:])["results"][0]
    for level in result["explain"]["levels"]:
        assert level["dropped"] is None or level["dropped"] <= level["cut"]
    for entry in result["explain"]["items"]:
        assert entry["outcome"] == "pruned"
        assert entry["rank"] <= entry["key"] <= entry["cut"]
