"""The section `[memory]` of a tree model's configuration: what past items add to the search."""

from __future__ import annotations

from typing import Annotated, Literal

from training.specification.sections import Section, auto_or, auto_or_integer

MOST_NEIGHBOURS = 4096
"""As many as a bundle may hold of an item."""
LEAST_WEIGHT = 0.001
"""A part of a rank this small is within what engines may differ by; far smaller ones vanish in float32, and the memory would do nothing."""
MOST_WEIGHT = 1_000_000
"""Ranks count for nothing long before; and what no float32 can hold would only be found out at the export."""

WEIGHT = auto_or(
    f"0, or a number from {LEAST_WEIGHT} to {MOST_WEIGHT}", lambda weight: weight == 0 or LEAST_WEIGHT <= weight <= MOST_WEIGHT
)


class MemoryConfig(Section):
    """Item neighbours that the search adds to the ranks of a tree: key = rank + weight · memory."""

    neighbours: Annotated[Literal["auto"] | int, auto_or_integer(1, MOST_NEIGHBOURS)] = "auto"
    """neighbours kept per item, 1 to 4096, or `"auto"`. `"auto"`: of 32 to 4096 the fewest within a standard error of the best"""
    weight: Annotated[Literal["auto"] | float, WEIGHT] = "auto"
    """λ, the weight of the memory, or `"auto"`. From 0.001 to 1,000,000, in units of the mean difference between the first and the last of
    the 200 items that a history's memory ranks highest. 0: no memory. `"auto"`: the best for validation users, or no memory where they do
    not gain more than a standard error"""
