"""The section `[memory]` of a tree model's configuration: what past items add to the search."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from training.specification.sections import Section, auto_or_number

MOST_NEIGHBOURS = 4096
"""As many as a bundle may hold of an item."""
LEAST_WEIGHT = 0.001
"""A part of a rank this small is within what engines may differ by; far smaller ones vanish in float32, and the memory would do nothing."""
MOST_WEIGHT = 1_000_000
"""Ranks count for nothing long before; and what no float32 can hold would only be found out at the export."""


class MemoryConfig(Section):
    """Item neighbours that the search adds to the ranks of a tree: key = rank + weight · memory."""

    neighbours: Literal["auto"] | int = Field(
        default="auto",
        description='most neighbours kept of an item, 1 to 4096, or `"auto"`: of 32 to 4096 the fewest within a standard error of the best',
    )
    weight: Literal["auto"] | float = Field(
        default="auto",
        description="by how much memory parts the first of the 200 items that a history remembers most from the last, on average, 0.001 "
        "to 1,000,000; 0: no memory. "
        '`"auto"`: the best of validation users, or no memory where they do not gain by it more than a standard error',
    )

    @field_validator("neighbours", mode="before")
    @classmethod
    def _auto_or_neighbours(cls, neighbours: object) -> object:
        return auto_or_number(neighbours, MOST_NEIGHBOURS)

    @field_validator("weight", mode="before")
    @classmethod
    def _auto_or_weight(cls, weight: object) -> object:
        if weight == "auto" or (weight == 0 and not isinstance(weight, bool)):
            return weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise ValueError(f'"auto", 0 or a number from {LEAST_WEIGHT} to {MOST_WEIGHT}')
        return weight
