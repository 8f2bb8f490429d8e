"""What a node of a tree is said to have below it, compared with the paths of all items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.random_bundles import make_bundle, make_linear_bundle, tree_over
from espalier.bundle import Bundle
from espalier.bundle_writer import write_bundle
from espalier.engines import open_engine
from espalier.items import ItemTable
from espalier.manifest import Ranking
from espalier.search import Engine
from espalier.tree import Tree, complete_tree, tree_from_children
from service.retrieval import subtree, typical_values
from service.retrieval.subtree import TreeView, describe_node
from tests.espalier.bundle.parts import content_of, draft_of
from tests.service.live_running import ALL, Live, live_service
from tests.service.running import ITEMS, LIMITS, Json, Running, bearer, document, problem, run

COLUMNS: dict[str, Any] = {
    "colour": [("red", "blue", "green", None)[i % 4] for i in range(ITEMS)],
    "tags": pa.array([["odd" if i % 2 else "even", "all", "all"] for i in range(ITEMS)]),
    "year": [1990 + i // 8 for i in range(ITEMS)],
    "serial": [f"{i:08}" for i in range(ITEMS)],
}
TYPICAL = ("colour", "tags", "year")
ADMIN = "admin-key-00000001"


def ragged(seed: int) -> Tree:
    """Levels of one to four children a node, and leaves without items."""
    rng = np.random.default_rng(seed)
    children, nodes = [np.array([3])], 3
    while nodes < ITEMS + 8:
        children.append(rng.integers(1, 5, nodes))
        nodes = int(children[-1].sum())
    leaf_item = np.full(nodes, -1, np.int64)
    leaf_item[rng.permutation(nodes)[:ITEMS]] = rng.permutation(ITEMS)
    return tree_from_children(children, leaf_item)


TREES = [complete_tree(np.random.default_rng(4).permutation(ITEMS), 2), ragged(1)]
every_tree = pytest.mark.parametrize("models", range(len(TREES)), indirect=True)


def books_over(folder: Path, tree: Tree, **columns: Any) -> Path:
    """A models folder."""
    make_bundle(folder, np.random.default_rng(0), tree, name="books", columns=columns, **LIMITS)
    return folder


@pytest.fixture
def models(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return books_over(tmp_path, TREES[getattr(request, "param", 0)], **COLUMNS)


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service for tests that change nothing in it."""
    with run(books_over(tmp_path_factory.mktemp("books"), TREES[0], **COLUMNS)) as running:
        yield running


def node(running: Running, number: int, **params: int) -> Json:
    """Over HTTP."""
    return document(running.client.get(f"/models/books/tree/{number}", params={"limit": 1000} | params))


def path(running: Running, item: str, tree: int = 0) -> list[int]:
    answer = document(running.client.get("/models/books/tree", params={"item": item, "tree": tree}))
    assert answer["item"] == item
    nodes: list[int] = answer["nodes"]
    return nodes


def refused(running: Running, address: str) -> Json:
    return problem(running.client.get(f"/models/books/{address}"))


def agree(running: Running, fields: Mapping[str, Json], tree: int = 0) -> dict[int, Json]:
    """All nodes that are reached from the root say of themselves what the paths of these items say. fields: of every item that is there."""
    trees = TreeView(running.app.state.service.registry.choose("books", None), tree)
    paths = {item: trees.path_to_item(item) for item in fields}
    nodes, waiting = dict[int, Json](), [0]
    while waiting:
        number = waiting.pop()
        assert number not in nodes
        nodes[number] = describe_node(trees, number, 1000, running.app.state.service.typical_values, lambda: None)
        waiting += nodes[number]["children"]
    assert {number for way in paths.values() for number in way} <= set(nodes)
    for number, found in nodes.items():
        below = {item for item, way in paths.items() if number in way}
        assert (found["node"], found["item_count"], found["looked_at"]) == (number, len(below), len(below))
        assert found["height"] == max(len(way) for way in paths.values()) - 1
        assert sorted(item["id"] for item in found["items"]) == sorted(below)
        assert found["children_items"] == [nodes[child]["item_count"] for child in found["children"]]
        assert found["child_count"] == len(found["children"])
        assert [nodes[child]["parent"] for child in found["children"]] == [number] * len(found["children"])
        assert found["path"] == ([] if found["parent"] is None else nodes[found["parent"]]["path"]) + [number]
        assert found["level"] == len(found["path"]) - 1
        assert set(found["values"]) == set(TYPICAL)
        for column, values in found["values"].items():
            counts = Counter(value for item in below for value in values_of(fields[item][column]))
            assert len(values) == min(len(counts), typical_values.MAX_LISTED)
            for value in values:
                everywhere = sum(value["value"] in values_of(own[column]) for own in fields.values())
                assert value["count"] == counts[value["value"]]
                assert value["share"] == pytest.approx(value["count"] / len(below))
                assert value["lift"] == pytest.approx(value["share"] / (everywhere / len(fields)))
    return nodes


def values_of(field: Any) -> set[Any]:
    return {value for value in (field if isinstance(field, list) else [field]) if value is not None}


def fields_of_all(running: Running, **query: Any) -> dict[str, Json]:
    """Of all items that a search can find."""
    answer = running.retrieve(queries=[query or {"history": ["item-1"]}], fields=list(TYPICAL), **ALL)["results"][0]
    return {item["id"]: item["fields"] for item in answer["items"]}


@every_tree
def test_every_node_has_below_it_what_the_paths_of_items_say(models: Path) -> None:
    tree = Bundle.open(models / "books" / "1").tree
    with run(models, admin_keys=ADMIN) as running:
        nodes = agree(running, fields_of_all(running))
        assert set(nodes) == set(range(tree.node_count))
        for row in range(ITEMS):
            assert path(running, f"item-{row}") == tree.ancestors(tree.leaf_of_item[row : row + 1])[0].tolist()
        even = [{"value": colour, "count": 8, "share": 0.25, "lift": 1.0} for colour in ("blue", "green", "red")]
        assert nodes[0]["values"]["colour"] == even
        running.client.request("PUT", "/models/books/removed", json={"ids": ["item-5"]}, headers=bearer(ADMIN))
        items = node(running, 0)["items"]
        assert (len(items), [item["id"] for item in items if not item["eligible"]]) == (ITEMS, ["item-5"])


@every_tree
def test_live_items_hang_where_they_were_placed(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Bundle.open(models / "books" / "1").tree.node_count
    with live_service(models, monkeypatch, admin_keys=ADMIN) as live:
        parents = {}
        for i in range(5):
            placed = live.put(f"new-{i}", like=(f"item-{i % 2}",), fields={"colour": "grey", "year": 2000 + i}).placed
            assert placed is not None
            parents[f"new-{i}"] = placed.parent
        live.put("item-7", like=("item-9",), fields={"colour": "grey"})  # moved
        live.put("item-8", fields={"colour": "grey", "tags": ["new"]})  # other fields
        for deleted in ("new-1", "item-3", "item-4"):
            live.delete(deleted)
        del parents["new-1"]
        found = agree(live.running, fields_of_all(live.running))
        assert found[0]["item_count"] == ITEMS + 4 - 2
        assert {each["trained_nodes"] for each in found.values()} == {nodes}
        for item, parent in parents.items():
            way = path(live.running, item)
            assert (way[-2], way[-1] >= nodes) == (parent, True)
        assert path(live.running, "item-7")[-1] >= nodes
        assert {item["id"] for item in found[0]["items"] if item["live"]} == {*parents, "item-7"}
        grey = next(value for value in found[0]["values"]["colour"] if value["value"] == "grey")
        assert (grey["count"], grey["lift"]) == (6, 1.0)
        assert [item["live"] for item in node(live.running, 0, limit=4)["items"]] == [True, True, False, False]
        removed = {"ids": ["new-0", "item-5"]}
        answer = live.running.client.request("PUT", "/models/books/removed", json=removed, headers=bearer(ADMIN))
        assert answer.status_code == 200
        after = node(live.running, 0)
        assert after["item_count"] == found[0]["item_count"]  # they are there, and no query gets them
        assert {item["id"] for item in after["items"] if not item["eligible"]} == {"new-0", "item-5"}
        for item in ("new-1", "item-3"):
            gone = refused(live.running, f"tree?item={item}")
            assert (gone["status"], gone["detail"]) == (404, f'"{item}" was deleted.')
        for number in (nodes + 1, -1, 10**20, -(10**20)):
            gone = refused(live.running, f"tree/{number}")
            assert (gone["status"], f"{nodes} + HANDLE" in gone["detail"]) == (404, True)


def test_every_tree_of_a_forest_is_shown(tmp_path: Path) -> None:
    rng, trees = np.random.default_rng(0), 2
    first, *others = [tree_over(rng, 40, 4) for _ in range(trees)]
    ranking = Ranking(own="log_activation", gamma=1.0, activation="sigmoid")
    columns = {name: (list(COLUMNS[name]) * 2)[:40] for name in ("colour", "year")} | {"tags": [["a"]] * 40}
    make_linear_bundle(tmp_path, rng, first, ranking, integer=False, name="books", others=others, columns=columns)

    def opened(bundle: Bundle) -> Engine:
        return open_engine(bundle, "cpu", "sparse-cpu", 1, "float32")

    event = {"indices": [1, 4, 7], "values": [1.0, 2.0, 0.5]}
    with run(tmp_path, opened, write_keys="a-key-that-may-write") as running:
        live = Live(running)
        live.put("new", events=(event,), fields={"colour": "red"})
        live.delete("item-3")
        fields = fields_of_all(running, features=event)
        assert len(fields) == 40
        for place, tree in enumerate([first, *others]):
            assert set(range(tree.node_count)) <= set(agree(running, fields, tree=place))
            assert path(running, "new", tree=place)[-1] == tree.node_count
            assert node(running, 0, tree=place)["item_count"] == 40
        assert running.client.get("/models/books/facets?column=tags").json()["values"] == [{"value": "a", "count": 39}]
        for address in (f"tree/0?tree={trees}", f"tree?item=new&tree={trees}"):
            wrong = refused(running, address)
            assert (wrong["status"], wrong["errors"][0]["field"]) == (422, "tree")


def test_titles_values_and_ids_alone_are_shown(tmp_path: Path) -> None:
    made = make_bundle(tmp_path / "made", np.random.default_rng(0), complete_tree(np.arange(8), 2), name="books", **LIMITS)
    bare = content_of(made, items=ItemTable.build(pa.table({"id": [f"item-{i}" for i in range(8)]})))
    write_bundle(tmp_path / "models" / "books" / "1", draft_of(made), bare)
    with run(tmp_path / "models") as running:
        assert node(running, 7)["items"] == [{"id": "item-0", "title": None, "live": False, "eligible": True}]
        assert node(running, 0)["values"] == {}
        assert running.client.get("/models/books/facets?column=id&limit=1").json()["others"] == 7
        assert refused(running, "facets?column=title")["errors"][0]["expected"] == "a column that can be filtered: id"
    # Not the most frequent one, if it is as frequent everywhere, and not the rarest.
    colours = ["red"] * 6 + ["blue", "odd"] + ["red"] * 7 + ["blue"]
    kinds = ["x"] * 5 + ["y", "y", "y"] + ["y"] * 8
    with run(books_over(tmp_path, complete_tree(np.arange(16), 2), colour=colours, kind=kinds)) as running:
        values = node(running, 1)["values"]
        assert [value["value"] for value in values["kind"]] == ["x", "y"]
        assert [value["value"] for value in values["colour"]] == ["odd", "blue", "red"]
        assert values["kind"][0] == {"value": "x", "count": 5, "share": 5 / 8, "lift": 2.0}


@pytest.mark.parametrize(
    ("columns", "titles"),
    [
        ({}, [f"Title {i}" for i in range(8)]),
        ({"title": list(range(8))}, [None] * 8),
        ({"title": ["é" * (subtree.MAX_TITLE + i) for i in range(8)]}, ["é" * subtree.MAX_TITLE] * 8),
    ],
)
def test_titles_are_texts_and_cut_where_they_are_long(tmp_path: Path, columns: Json, titles: list[str | None]) -> None:
    with run(books_over(tmp_path, complete_tree(np.arange(8), 2), **columns)) as running:
        found = node(running, 0)
        assert [item["title"] for item in found["items"]] == titles
        assert found["values"] == {}
        assert [item["id"] for item in node(running, 1, limit=2)["items"]] == ["item-0", "item-3"]


@every_tree
def test_a_large_node_is_looked_at_in_part(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subtree, "SAMPLED_ITEMS", 7)
    monkeypatch.setattr(subtree, "MAX_CHILDREN", 1)
    monkeypatch.setattr(typical_values, "SAMPLED_BASE", 16)
    with live_service(models, monkeypatch) as live:
        for i in range(5):
            live.put(f"new-{i}", like=("item-1",), fields={"colour": "grey"})
        found = node(live.running, 0)
        assert 4 <= found["looked_at"] <= 9
        assert found["item_count"] == ITEMS + 5
        assert (len(found["children"]), len(found["children_items"])) == (1, 1)
        assert found["child_count"] >= 2
        for values in found["values"].values():
            assert all(0 < value["count"] <= found["looked_at"] and value["lift"] == 1 for value in values)
            assert [value["count"] for value in values] == sorted((value["count"] for value in values), reverse=True)
        parent = node(live.running, path(live.running, "new-0")[-2])
        assert len(parent["children"]) == 1
        assert parent["child_count"] >= 6


def test_the_most_frequent_values_are_first_at_the_root_whatever_is_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    colours = ["red"] * 15 + ["blue"] * 7 + [f"rare-{i // 2}" for i in range(10)]
    with live_service(books_over(tmp_path, TREES[0], colour=colours), monkeypatch) as live:
        live.put("new", like=("item-1",), fields={"colour": "green"})
        values = node(live.running, 0)["values"]["colour"]
        assert [(value["value"], value["count"]) for value in values[:2]] == [("red", 15), ("blue", 7)]
        assert {value["lift"] for value in values} == {1.0}


@pytest.mark.parametrize("number", ["-1", "63", "64", str(1 << 63), str(1 << 64), "-9223372036854775809", "9" * 40])
def test_a_node_that_is_not_there_names_the_range(books: Running, number: str) -> None:
    assert node(books, 62)["item_count"] == 1
    gone = refused(books, f"tree/{number}")
    assert (gone["status"], "0 to 62" in gone["detail"]) == (404, True)


@pytest.mark.parametrize("item", ["nobody", "a%2Fb%00%E2%80%AE"])
def test_an_item_that_is_not_there_is_404(books: Running, item: str) -> None:
    assert refused(books, f"tree?item={item}")["status"] == 404


@pytest.mark.settings(timeout_ms=1e-6)
def test_a_scan_that_takes_longer_than_a_request_may_is_504(running: Running) -> None:
    for address in ("tree/0", "facets?column=colour", "items?prefix=x"):
        assert refused(running, address)["status"] == 504
