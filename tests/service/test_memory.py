"""A model with a memory over HTTP: what is explained of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from espalier.checks.random_bundles import make_bundle, random_memory, random_tree
from espalier.engines import open_engine
from espalier.memory import Memory
from tests.service.running import Json, Running, ids, run

HISTORY = ["item-3", "item-7", "item-3", "item-11", "item-20"]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service with one model, `books`, whose memory weighs the last four items of a history."""
    rng = np.random.default_rng(5)
    tree, folder = random_tree(rng, height=5, branching=3, empty_share=0.1), tmp_path_factory.mktemp("memory")
    memory = random_memory(rng, tree.item_count, 4, integer=False)
    make_bundle(folder, rng, tree, name="books", integer=False, memory=memory, max_beam_size=500, max_m=500)
    with run(folder, lambda bundle: open_engine(bundle, "cpu")) as running:
        yield running


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
