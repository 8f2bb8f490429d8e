"""The second stage of a forest's scores: the keys of `tail` (espalier.tail)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from training.specification.sections import Section


class TailOptions(Section):
    """How near a query is to an item's training points enters the item's score, for a forest of at least 2 trees."""

    form: Literal["none", "product", "gaussian"] = Field(
        default="none",
        description='`"product"` of the query and the mean of the item\'s points (XReg-t), or `"gaussian"` of their distance (PfastreXML)',
    )
    alpha: float = Field(default=0.5, gt=0, lt=1, description="α: rank = α · log score + (1 − α) · log nearness")
    gamma: float = Field(default=30.0, ge=0, le=1000, description="how steep the gaussian is; without effect on the product")
