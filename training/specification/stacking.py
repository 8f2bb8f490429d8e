"""What enters scores besides the trees: the keys of `tail` (espalier.tail) and of `stacking` (espalier.stacking)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from espalier.stacking import MOST_POINTS
from training.specification.sections import Section


class TailOptions(Section):
    """How near a query is to an item's training points enters the item's score, for a forest of at least 2 trees."""

    form: Literal["none", "product", "gaussian"] = Field(
        default="none",
        description='`"product"` of the query and the mean of the item\'s points (XReg-t), or `"gaussian"` of their distance (PfastreXML)',
    )
    alpha: float = Field(default=0.5, gt=0, lt=1, description="α: rank = α · log score + (1 − α) · log nearness")
    gamma: float = Field(default=30.0, ge=0, le=1000, description="how steep the gaussian is; without effect on the product")


class StackingOptions(Section):
    """A small network estimates the relevance of the best candidates, from the trees' scores and from similar training points."""

    model: Literal["auto", "none", "network"] = Field(
        default="auto",
        description='`"network"`; or `"auto"`: a network where it finds more on training points held out, and there are at least 2,000 '
        "that are not texts of items",
    )
    candidates: int = Field(default=64, ge=1, le=1024, description="items of a search that are ordered anew")
    points: int = Field(default=MOST_POINTS, ge=1, le=MOST_POINTS, description="most training points that vote")
    power: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="where relevance is inverse propensity: 1 orders by the estimate of it, 0 by the probability that an item is relevant; "
        "between them, the lower, the more of the first results are relevant, and the fewer of them are rare items",
    )


class XRegStackingOptions(StackingOptions):
    """The same, off by default: XReg as published has none."""

    model: Literal["auto", "none", "network"] = Field(default="none", description='as for xr-linear; `"none"` is XReg as published')
