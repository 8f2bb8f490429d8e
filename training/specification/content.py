"""What of the item table enters node rows: the keys of `[content]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from espalier.content_info import MOST_FEATURES
from training.specification.sections import Section


class ContentConfig(Section):
    """Attributes and texts of items in the rows of their leaves."""

    columns: Literal["auto"] | tuple[str, ...] = ()
    """item table columns that enter leaf rows, or `"auto"`. `"auto"`: all but `id` that hold strings, lists of strings or numbers. None:
    rows know nothing of content"""
    features: int = Field(default=16_384, ge=16, le=MOST_FEATURES)
    """largest number of features. They are made of the columns: values, then words, by frequency"""
    drop: float = Field(default=0.2, ge=0, lt=1)
    """share of items without their own part in a step. Content alone then finds them"""

    @field_validator("columns", mode="before")
    @classmethod
    def _auto_or_names(cls, columns: object) -> object:
        if isinstance(columns, str) and columns != "auto":
            raise ValueError('"auto" or a list of column names')
        return columns
