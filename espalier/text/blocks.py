"""The kinds of n-grams that a vectoriser counts, as manifests and training options name them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from espalier.text.sparse_rows import MAX_FEATURES


class TextBlock(BaseModel):
    """One kind of n-grams."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    unit: Literal["word", "char"] = Field(
        description=(
            '`"word"` or `"char"`. N-grams of words, or of characters within a word that has a blank before and '
            "after; a shorter word is one n-gram"
        )
    )
    n: int = Field(ge=1, le=8, description="words or characters of an n-gram")
    max_features: int = Field(default=0, ge=0, description="largest number of n-grams. Those that are in most texts; 0 keeps all")
    min_count: int = Field(default=1, ge=1, description="leave out n-grams in fewer texts. They are unknown")
    max_share: float = Field(default=0.98, gt=0, le=1, description="leave out n-grams in a larger share of texts")
    unknown: int = Field(
        default=0,
        ge=0,
        le=MAX_FEATURES,
        description="features of unknown n-grams. 0: none. 1: one that all share. More: one of so many, by a hash of the n-gram",
    )
    endings: bool = Field(
        default=False,
        description=(
            "for `unit` word, `n` 1: words that differ only in endings that many words have, such as connect and connection, are one n-gram"
        ),
    )

    @model_validator(mode="after")
    def _check(self) -> TextBlock:
        if self.endings and (self.unit, self.n) != ("word", 1):
            raise ValueError(f"endings: got true for unit {self.unit}, n {self.n}, expected unit word, n 1")
        return self
