"""What enters scores besides the trees: the keys of `tail` (espalier.tail) and of `stacking` (espalier.stacking)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from espalier.stacking import MOST_POINTS
from training.specification.sections import Section


class TailOptions(Section):
    """How near a query is to an item's training points enters the item's score, for a forest of at least 2 trees."""

    form: Literal["none", "product", "gaussian"] = "none"
    """`"none"`, `"product"` (XReg-t) or `"gaussian"` (PfastreXML). The product of the query and the mean of the item's points, or a
    gaussian of their distance"""
    alpha: float = Field(default=0.5, gt=0, lt=1)
    """α: rank = α · log score + (1 − α) · log nearness"""
    gamma: float = Field(default=30.0, ge=0, le=1000)
    """steepness of the gaussian. Without effect on the product"""


class StackingOptions(Section):
    """A small network estimates the relevance of the best candidates, from the trees' scores and from similar training points."""

    model: Literal["auto", "none", "network"] = "auto"
    """`"network"`, `"none"` or `"auto"`. `"auto"`: a network where it finds more on training points held out, and there are at least 2,000
    that are not texts of items"""
    candidates: int = Field(default=64, ge=1, le=1024)
    """candidates that are ordered again"""
    points: int = Field(default=MOST_POINTS, ge=1, le=MOST_POINTS)
    """largest number of training points that vote"""
    power: float = Field(default=1.0, ge=0, le=1)
    """weight of rarity, 0 to 1. Where relevance is inverse propensity: 1 orders by the estimate of it, 0 by the probability that an item is
    relevant. The lower, the more of the first results are relevant, and the fewer are rare items"""


class XRegStackingOptions(StackingOptions):
    """The same, off by default: XReg as published has none."""

    model: Literal["auto", "none", "network"] = "none"
    """`"network"`, `"none"` or `"auto"`. As for xr-linear; `"none"` is XReg as published"""
