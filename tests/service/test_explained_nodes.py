"""An explained search names its nodes, and an item's ancestors among them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from espalier.checks.random_bundles import make_bundle, random_tree
from espalier.engines import open_engine
from tests.service.running import Json, Running, ids, problem, run

BODY: Json = {"queries": [{"history": ["item-1", "item-7"]}], "m": 5, "beam_size": 6}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One model `books` of 82 items, on onnx-cpu."""
    folder, rng = tmp_path_factory.mktemp("nodes"), np.random.default_rng(3)
    tree = random_tree(rng, height=5, branching=3, empty_share=0.1)
    make_bundle(folder, rng, tree, name="books", integer=False, beam_size=8, m=5, max_beam_size=500, max_m=500)
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
