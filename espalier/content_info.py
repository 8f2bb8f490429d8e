"""The fields of an item from which its node row is computed: the columns and how they become features.

Knows names and sizes. Does not know values: see `espalier.content.features`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from espalier.text.blocks import TextBlock

MOST_COLUMNS = 1024
MOST_FEATURES = 1 << 20
MOST_ENTRIES = 4096
"""Most features of one item."""


class ContentColumn(BaseModel):
    """A column of the item table.

    kind         `string`: its words, and the whole value; `list`: its strings; `number`: itself, (x − mean) / scale
    mean, scale  of a number; None for other kinds
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: Literal["string", "list", "number"]
    mean: float | None = Field(default=None, allow_inf_nan=False)
    scale: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _numbers_have_a_scale(self) -> ContentColumn:
        if (self.kind == "number") != (self.mean is not None) or (self.mean is None) != (self.scale is None):
            raise ValueError(f"column {self.name}: mean and scale belong to numbers, got kind {self.kind}")
        return self


class ContentInfo(BaseModel):
    """content.onnx: (`features int64[I, X]`, `values float32[I, X]`) → `rows float32[I, D]`, leaf rows of items by their content.

    columns   columns whose values become features
    blocks    n-grams of the string columns; empty if no column is a string
    values    number of known values of string and list columns
    features  number of all features: one that every item has, one for each number column, the known values, the n-grams
    entries   most features of one item, X; of more features the largest values are kept
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    columns: tuple[ContentColumn, ...] = Field(min_length=1, max_length=MOST_COLUMNS)
    blocks: tuple[TextBlock, ...] = ()
    values: int = Field(ge=0, le=MOST_FEATURES)
    features: int = Field(ge=1, le=MOST_FEATURES)
    entries: int = Field(ge=1, le=MOST_ENTRIES)

    @property
    def numbers(self) -> int:
        """How many columns are numbers."""
        return sum(column.kind == "number" for column in self.columns)

    @model_validator(mode="after")
    def _columns_are_different(self) -> ContentInfo:
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names):
            raise ValueError(f"each column once, got {names}")
        return self
