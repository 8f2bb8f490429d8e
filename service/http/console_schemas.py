"""The JSON of the routes that the console asks for: answers are documented by these classes."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class FacetValue(BaseModel):
    value: str | int | float | bool
    count: int = Field(description="Eligible items that have it.")


class Bin(BaseModel):
    """Values from `min` to below `max`; in the last bin `max` itself too."""

    min: float
    max: float
    count: int


class Facets(BaseModel):
    """How many eligible items have each value of a column."""

    column: str
    values: list[FacetValue] = Field(description="The most frequent values, then the lower ones.")
    others: int = Field(description="Eligible items that have values, and none of `values`.")
    missing: int = Field(description="Eligible items without a value: null, not finite, or an empty list.")
    eligible: int = Field(description="Items that pass the conditions on other columns.")
    distinct: int | None = Field(description="Distinct values among them; null where there are more than 131,072, of which none is listed.")
    min: float | None = Field(None, description="Numbers, where not all values are listed: the least.")
    max: float | None = Field(None, description="The largest.")
    histogram: list[Bin] | None = Field(None, description="How many values lie in each of 20 bins of equal width.")


class TypicalValue(BaseModel):
    value: str | int | float | bool
    count: int = Field(description="Items that have it, of those that were looked at.")
    share: float = Field(description="`count` ÷ `looked_at`.")
    lift: float = Field(description="`share` ÷ the value's share in the catalogue.")


class ItemBelow(BaseModel):
    id: str
    title: str | None
    live: bool = Field(description="Whether its leaf is live.")
    eligible: bool = Field(description="Whether a query without a filter may get it.")


class Node(BaseModel):
    """A node of a tree and what is below it."""

    node: int
    level: int
    height: int = Field(description="Level of the leaves.")
    trained_nodes: int = Field(description="Nodes of the tree. Nodes with a number from this on are live leaves.")
    parent: int | None = Field(description="Null at the root.")
    path: list[int] = Field(description="Node numbers from the root to it.")
    children: list[int] = Field(description="Node numbers, at most 4096. Live leaves have those from the number of nodes on.")
    children_items: list[int] = Field(description="Items below each of `children`.")
    child_count: int
    item_count: int = Field(description="Items below it now: not those that were deleted.")
    items: list[ItemBelow] = Field(description="Some of them: live ones first, then at even distances.")
    looked_at: int = Field(description="How many of them `values` were counted from.")
    values: dict[str, list[TypicalValue]] = Field(description="By column: the values that are most typical of the items below, at most 5.")


class ItemPath(BaseModel):
    """Where an item is in a tree."""

    item: str
    nodes: list[int] = Field(description="Node numbers from the root to its leaf.")


class HeldOutQuery(BaseModel):
    """A query that the model was not trained on."""

    query: dict[str, Any] = Field(description="A query as `POST /retrieve` takes it.")
    relevant: list[str] = Field(description="Ids of the items that it should find.")
    recall: dict[str, float | None] = Field(description="m → recall@m when the version was made, by its default beam; empty if unknown.")


class HeldOutQueries(BaseModel):
    queries: list[HeldOutQuery]
