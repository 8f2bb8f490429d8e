"""The kinds of n-grams that a vectoriser counts, as manifests and training options name them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TextBlock(BaseModel):
    """One kind of n-grams.

    unit          of words, or of characters within a word that has a blank before and after ("char_wb"); one too short gives itself
    max_features  most n-grams of the vocabulary, those of the highest document frequency; 0 = all
    min_count     least document frequency
    max_share     largest document frequency, as a share of the documents
    unknown       what an n-gram outside the vocabulary is: 0 nothing, 1 a feature that all share, more: one of so many, by its hash
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    unit: Literal["word", "char"]
    n: int = Field(ge=1, le=8)
    max_features: int = Field(default=0, ge=0)
    min_count: int = Field(default=1, ge=1)
    max_share: float = Field(default=0.98, gt=0, le=1)
    unknown: int = Field(default=0, ge=0, le=2**31 - 1)
