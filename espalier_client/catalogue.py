"""What is in a model: facets of a column, nodes of a tree. Types of documents that are as the service sent them."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class FacetValue(TypedDict):
    """A value of a column, and how many eligible items have it."""

    value: str | float | bool
    count: int


class Bin(TypedDict):
    """How many values lie from `min` to below `max`; in the last bin `max` itself too."""

    min: float
    max: float
    count: int


class Facets(TypedDict):
    """The values of a column among the items that a query with some filter may get.

    `others` are items that have none of `values`, `missing` those without a value. `distinct` is None where the values were too many to be
    counted. Numbers of which not all values are listed have `min`, `max` and `histogram`.
    """

    column: str
    values: list[FacetValue]
    others: int
    missing: int
    eligible: int
    distinct: int | None
    min: NotRequired[float | None]
    max: NotRequired[float | None]
    histogram: NotRequired[list[Bin] | None]


class TypicalValue(TypedDict):
    """A value that is typical of the items below a node: `share` of them have it, `lift` times its share in the catalogue."""

    value: str | float | bool
    count: int
    share: float
    lift: float


class ItemBelow(TypedDict):
    """`eligible`: whether a query without a filter may get it."""

    id: str
    title: str | None
    live: bool
    eligible: bool


class Node(TypedDict):
    """A node of a tree: some of its children with their numbers of items, some of its items, and what is typical of these.

    height         level of the leaves
    trained_nodes  nodes of the tree; those with a number from this on are live leaves
    """

    node: int
    level: int
    height: int
    trained_nodes: int
    parent: int | None
    path: list[int]
    children: list[int]
    children_items: list[int]
    child_count: int
    item_count: int
    items: list[ItemBelow]
    looked_at: int
    values: dict[str, list[TypicalValue]]


def facets(document: Any) -> Facets:
    """Raises KeyError or TypeError where a part is missing; so does `node`."""
    _check(document, "column", "values", "others", "missing", "eligible", "distinct")
    found: Facets = document
    return found


def node(document: Any) -> Node:
    _check(document, *Node.__annotations__)
    found: Node = document
    return found


def item_path(document: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in document["nodes"])


def _check(document: Any, *names: str) -> None:
    for name in names:
        document[name]
