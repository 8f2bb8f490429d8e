"""The section `[memory]` of a tree model's configuration: what past items add to the search."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from training.specification.sections import Section

MOST_NEIGHBOURS = 4096
"""As many as a bundle may hold of an item."""


class MemoryConfig(Section):
    """Item neighbours that the search adds to the ranks of a tree: key = rank + weight · memory."""

    neighbours: Literal["auto"] | Annotated[int, Field(ge=1, le=MOST_NEIGHBOURS)] = Field(
        default="auto",
        description='most neighbours kept of an item, 1 to 4096, or `"auto"`: of 32 to 512 the fewest within a standard error of the best',
    )
    weight: Literal["auto"] | Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default="auto",
        description='what the item that a history remembers most adds to its rank, on average; 0: no memory. `"auto"`: the best of '
        "validation users, or no memory where they do not gain by it more than a standard error",
    )

    @field_validator("neighbours", "weight", mode="before")
    @classmethod
    def _auto_or_number(cls, value: object) -> object:
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError('"auto" or a number')
        return value
