"""What a node of a tree is said to have below it, compared with the paths of all items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from espalier.bundle import Bundle
from espalier.bundle_writer import write_bundle
from espalier.checks.random_bundles import make_bundle, make_linear_bundle, tree_over
from espalier.engines import open_engine, open_live_engine
from espalier.items import ItemTable
from espalier.manifest import Ranking
from espalier.search import Engine
from espalier.tree import Tree, complete_tree, tree_from_children
from service.retrieval import subtree, typical_values
from tests.service.damaged_models import content_of, draft_of
from tests.service.live_running import ALL, ITEMS, Live, live_service
from tests.service.running import LIMITS, Json, Running, bearer, problem, run

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


TREES = [complete_tree(np.random.default_rng(4).permutation(ITEMS), 2), ragged(1), ragged(2)]


every_tree = pytest.mark.parametrize("models", range(len(TREES)), indirect=True)


def books_over(folder: Path, tree: Tree) -> Path:
    """A models folder."""
    make_bundle(folder, np.random.default_rng(0), tree, name="books", columns=COLUMNS, **LIMITS)
    return folder


@pytest.fixture
def models(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return books_over(tmp_path, TREES[getattr(request, "param", 0)])


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service for tests that change nothing in it."""
    with run(books_over(tmp_path_factory.mktemp("books"), TREES[0])) as running:
        yield running


def node(running: Running, number: int, **params: int) -> Json:
    answer = running.client.get(f"/models/books/tree/{number}", params={"limit": 1000} | params)
    assert answer.status_code == 200, answer.text
    document: Json = answer.json()
    return document


def path(running: Running, item: str, **params: Any) -> list[int]:
    answer = running.client.get("/models/books/tree", params={"item": item} | params)
    assert answer.status_code == 200, answer.text
    assert answer.json()["item"] == item
    nodes: list[int] = answer.json()["nodes"]
    return nodes


def walked(running: Running, **params: int) -> dict[int, Json]:
    """Every node that is reached from the root."""
    found, waiting = dict[int, Json](), [0]
    while waiting:
        number = waiting.pop()
        assert number not in found
        found[number] = node(running, number, **params)
        waiting += found[number]["children"]
    return found


def agree(running: Running, fields: Mapping[str, Json], **params: int) -> dict[int, Json]:
    """All nodes say of themselves what the paths of these items say. fields: of every item that is there."""
    paths = {item: path(running, item, **params) for item in fields}
    nodes = walked(running, **params)
    assert {number for way in paths.values() for number in way} <= set(nodes)
    for number, found in nodes.items():
        below = {item for item, way in paths.items() if number in way}
        assert (found["node"], found["item_count"], found["looked_at"]) == (number, len(below), len(below))
        assert found["height"] == max(len(way) for way in paths.values()) - 1
        assert {item["id"] for item in found["items"]} == below
        assert len(found["items"]) == len(below)
        assert found["children_items"] == [nodes[child]["item_count"] for child in found["children"]]
        assert found["child_count"] == len(found["children"])
        assert [nodes[child]["parent"] for child in found["children"]] == [number] * len(found["children"])
        assert found["path"] == ([] if found["parent"] is None else nodes[found["parent"]]["path"]) + [number]
        assert found["level"] == len(found["path"]) - 1
        assert set(found["values"]) == set(TYPICAL)
        for column, values in found["values"].items():
            counts = Counter(value for item in below for value in values_of(fields[item][column]))
            assert len(values) == min(len(counts), typical_values.LISTED)
            for value in values:
                everywhere = sum(value["value"] in values_of(own[column]) for own in fields.values())
                assert value["count"] == counts[value["value"]]
                assert value["share"] == pytest.approx(value["count"] / len(below))
                assert value["lift"] == pytest.approx(value["share"] / (everywhere / len(fields)))
    return nodes


def values_of(field: Any) -> set[Any]:
    return {value for value in (field if isinstance(field, list) else [field]) if value is not None}


def all_fields(running: Running) -> dict[str, Json]:
    """Of all items that a search can find, whatever is removed."""
    answer = running.retrieve(queries=[{"history": ["item-1"]}], fields=list(TYPICAL), **ALL)["results"][0]
    return {item["id"]: item["fields"] for item in answer["items"]}


@every_tree
def test_every_node_has_below_it_what_the_paths_of_items_say(models: Path) -> None:
    tree = Bundle.open(models / "books" / "1").tree
    with run(models, lambda bundle: open_engine(bundle, "cpu")) as running:
        fields = all_fields(running)
        assert len(fields) == ITEMS
        nodes = agree(running, fields)
        assert set(nodes) == set(range(tree.node_count))
        for row in range(ITEMS):
            assert path(running, f"item-{row}") == tree.ancestors(tree.leaf_of_item[row : row + 1])[0].tolist()
        assert nodes[0]["values"]["colour"] == [
            {"value": colour, "count": 8, "share": 0.25, "lift": 1.0} for colour in ("blue", "green", "red")
        ]


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
        found = agree(live.running, all_fields(live.running))
        assert found[0]["item_count"] == ITEMS + 4 - 2
        assert {each["trained_nodes"] for each in found.values()} == {nodes}
        for item, parent in parents.items():
            if item != "new-1":
                way = path(live.running, item)
                assert (way[-2], way[-1] >= nodes) == (parent, True)
        assert path(live.running, "item-7")[-1] >= nodes
        listed = {item["id"]: item["live"] for item in found[0]["items"]}
        assert {item for item, is_live in listed.items() if is_live} == {"new-0", "new-2", "new-3", "new-4", "item-7"}
        grey = next(value for value in found[0]["values"]["colour"] if value["value"] == "grey")
        assert (grey["count"], grey["lift"]) == (6, 1.0)
        few = node(live.running, 0, limit=4)["items"]
        assert [item["live"] for item in few] == [True, True, False, False]
        removed = {"ids": ["new-0", "item-5"]}
        answer = live.running.client.request("PUT", "/models/books/removed", json=removed, headers=bearer(ADMIN))
        assert answer.status_code == 200
        after = node(live.running, 0)
        assert after["item_count"] == found[0]["item_count"]  # they are there, and no query gets them
        assert {item["id"] for item in after["items"] if not item["eligible"]} == {"new-0", "item-5"}
        for item in ("new-1", "item-3"):
            refused = problem(live.running.client.get("/models/books/tree", params={"item": item}))
            assert (refused["status"], refused["detail"]) == (404, f"'{item}' was deleted.")
        gone = problem(live.running.client.get(f"/models/books/tree/{nodes + 1}"))
        assert gone["status"] == 404
        assert f"{nodes} + HANDLE" in gone["detail"]


@every_tree
def test_removed_items_are_shown_as_such_without_live_ones(models: Path) -> None:
    with run(models, admin_keys=ADMIN) as running:
        running.client.request("PUT", "/models/books/removed", json={"ids": ["item-5"]}, headers=bearer(ADMIN))
        items = node(running, 0)["items"]
        assert [item["id"] for item in items if not item["eligible"]] == ["item-5"]
        assert len(items) == ITEMS


@pytest.mark.parametrize("trees", [1, 3])
def test_every_tree_of_a_forest_is_shown(tmp_path: Path, trees: int) -> None:
    rng = np.random.default_rng(0)
    first, *others = [tree_over(rng, 40, 4) for _ in range(trees)]
    ranking = Ranking(own="log_activation", gamma=1.0, activation="sigmoid")
    columns = {name: (list(COLUMNS[name]) * 2)[:40] for name in ("colour", "year")} | {"tags": [["a"]] * 40}
    make_linear_bundle(tmp_path, rng, first, ranking, integer=False, name="books", others=others, columns=columns)

    def opened(bundle: Bundle) -> Engine:
        return open_live_engine(bundle, "cpu", "sparse-cpu", 1, "float32")

    event = {"indices": [1, 4, 7], "values": [1.0, 2.0, 0.5]}
    with run(tmp_path, opened, write_keys="a-key-that-may-write") as running:
        live = Live(running)
        live.put("new", events=(event,), fields={"colour": "red"})
        live.delete("item-3")
        answer = running.retrieve(queries=[{"features": event}], m=50, beam_size=64, fields=list(TYPICAL))["results"][0]
        fields = {item["id"]: item["fields"] for item in answer["items"]}
        assert len(fields) == 40
        for place, tree in enumerate([first, *others]):
            nodes = agree(running, fields, tree=place)
            assert set(range(tree.node_count)) <= set(nodes)
            assert path(running, "new", tree=place)[-1] == tree.node_count
        refused = problem(running.client.get(f"/models/books/tree/0?tree={trees}"))
        assert (refused["status"], refused["errors"][0]["field"]) == (422, "tree")
        assert problem(running.client.get(f"/models/books/tree?item=new&tree={trees}"))["status"] == 422


def test_a_model_without_columns_has_nodes_too(tmp_path: Path) -> None:
    make_bundle(tmp_path, np.random.default_rng(0), complete_tree(np.arange(8), 2), name="books", **LIMITS)
    with run(tmp_path) as running:
        found = node(running, 1, limit=2)
        assert found["values"] == {}
        assert [item["id"] for item in found["items"]] == ["item-0", "item-3"]
        assert found["items"][0]["title"] == "Title 0"


def test_items_may_have_ids_alone(tmp_path: Path) -> None:
    made = make_bundle(tmp_path / "made", np.random.default_rng(0), complete_tree(np.arange(8), 2), name="books", **LIMITS)
    bare = replace(content_of(made), items=ItemTable.build(pa.table({"id": [f"item-{i}" for i in range(8)]})))
    write_bundle(tmp_path / "models" / "books" / "1", draft_of(made, 1), bare)
    with run(tmp_path / "models") as running:
        assert node(running, 7)["items"] == [{"id": "item-0", "title": None, "live": False, "eligible": True}]
        assert node(running, 0)["values"] == {}
        assert running.client.get("/models/books/facets?column=id&limit=1").json()["others"] == 7
        refused = problem(running.client.get("/models/books/facets?column=title"))
        assert refused["errors"][0]["expected"] == "a column that can be filtered: id"


def test_titles_that_are_no_texts_are_no_titles(tmp_path: Path) -> None:
    columns = {"title": list(range(8))}
    make_bundle(tmp_path, np.random.default_rng(0), complete_tree(np.arange(8), 2), name="books", columns=columns, **LIMITS)
    with run(tmp_path) as running:
        assert {item["title"] for item in node(running, 0)["items"]} == {None}


def test_long_titles_are_cut(tmp_path: Path) -> None:
    titles = ["é" * (subtree.MAX_TITLE + i) for i in range(2)]
    make_bundle(tmp_path, np.random.default_rng(0), complete_tree(np.arange(2), 2), name="books", columns={"title": titles}, **LIMITS)
    with run(tmp_path) as running:
        assert [item["title"] for item in node(running, 0)["items"]] == ["é" * subtree.MAX_TITLE] * 2


@every_tree
def test_a_large_node_is_looked_at_in_part(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subtree, "SAMPLED_ITEMS", 7)
    monkeypatch.setattr(subtree, "MAX_CHILDREN", 1)
    monkeypatch.setattr(typical_values, "BASE_ITEMS", 16)
    with live_service(models, monkeypatch) as live:
        for i in range(5):
            live.put(f"new-{i}", like=("item-1",), fields={"colour": "grey"})
        found = node(live.running, 0)
        assert 4 <= found["looked_at"] <= 9
        assert found["item_count"] == ITEMS + 5
        assert (len(found["children"]), len(found["children_items"])) == (1, 1)
        assert found["child_count"] >= 2
        for values in found["values"].values():
            for value in values:
                assert 0 < value["count"] <= found["looked_at"]
                assert value["lift"] == 1
            assert [value["count"] for value in values] == sorted((value["count"] for value in values), reverse=True)
        parent = node(live.running, path(live.running, "new-0")[-2])
        assert len(parent["children"]) == 1
        assert parent["child_count"] >= 6


def test_the_most_typical_value_is_first(tmp_path: Path) -> None:
    """Not the most frequent one, if it is as frequent everywhere, and not the rarest."""
    colours = ["red"] * 6 + ["blue", "odd"] + ["red"] * 7 + ["blue"]
    kinds = ["x"] * 5 + ["y", "y", "y"] + ["y"] * 8
    make_bundle(
        tmp_path,
        np.random.default_rng(0),
        complete_tree(np.arange(16), 2),
        name="books",
        columns={"colour": colours, "kind": kinds},
        **LIMITS,
    )
    with run(tmp_path) as running:
        values = node(running, 1)["values"]
        assert [value["value"] for value in values["kind"]] == ["x", "y"]
        assert [value["value"] for value in values["colour"]] == ["odd", "blue", "red"]
        assert values["kind"][0] == {"value": "x", "count": 5, "share": 5 / 8, "lift": 2.0}


def test_the_most_frequent_values_are_first_at_the_root_whatever_is_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    colours = ["red"] * 15 + ["blue"] * 7 + [f"rare-{i // 2}" for i in range(10)]
    make_bundle(tmp_path, np.random.default_rng(0), TREES[0], name="books", columns={"colour": colours}, **LIMITS)
    with live_service(tmp_path, monkeypatch) as live:
        live.put("new", like=("item-1",), fields={"colour": "green"})
        values = node(live.running, 0)["values"]["colour"]
        assert [(value["value"], value["count"]) for value in values[:2]] == [("red", 15), ("blue", 7)]
        assert {value["lift"] for value in values} == {1.0}


@pytest.mark.parametrize("number", ["-1", "63", "64", str(1 << 63), str(1 << 64), "-9223372036854775809", "9" * 40])
def test_a_node_that_is_not_there_names_the_range(books: Running, number: str) -> None:
    assert node(books, 62)["item_count"] == 1
    refused = problem(books.client.get(f"/models/books/tree/{number}"))
    assert refused["status"] == 404
    assert "0 to 62" in refused["detail"]


@pytest.mark.parametrize(
    ("address", "field"),
    [
        ("tree/x", "node"),
        ("tree/1.5", "node"),
        ("tree/0?limit=0", "limit"),
        ("tree/0?limit=1001", "limit"),
        ("tree/0?tree=-1", "tree"),
        ("tree/0?tree=99999999999999999999", "tree"),
        ("tree", "item"),
        ("tree?item=", "item"),
        (f"tree?item={'x' * 513}", "item"),
        ("tree/0?version=0", "version"),
    ],
)
def test_wrong_values_are_named(books: Running, address: str, field: str) -> None:
    refused = problem(books.client.get(f"/models/books/{address}"))
    assert (refused["status"], refused["errors"][0]["field"]) == (422, field)


@pytest.mark.parametrize("address", ["tree?item=nobody", "tree?item=a%2Fb%00%E2%80%AE", "tree/0?version=2", "tree/0/1", "tree/"])
def test_what_is_not_there_is_404(books: Running, address: str) -> None:
    assert problem(books.client.get(f"/models/books/{address}"))["status"] == 404


def test_a_retrieval_key_is_needed(models: Path) -> None:
    with run(models, retrieve_keys="retrieve-key-000001") as running:
        for address in ("tree/0", "tree?item=item-1"):
            assert problem(running.client.get(f"/models/books/{address}"))["status"] == 401
            assert running.client.get(f"/models/books/{address}", headers=bearer("retrieve-key-000001")).status_code == 200


def test_nodes_have_the_deadline_of_scans(models: Path) -> None:
    with run(models, timeout_ms=1e-6) as running:
        assert problem(running.client.get("/models/books/tree/0"))["status"] == 504
