"""How relevant a label is to a point: the keys of `relevance`, which all linear kinds have."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from training.specification.sections import Form, Section


class RelevanceOptions(Section):
    """What is made of the weights of labels, in training and in evaluation."""

    source: Literal["weights", "inverse-propensity", "binary"] = "weights"
    """relevance of a label: `"weights"`, `"inverse-propensity"`, `"binary"`. `"weights"`: as in the data, 1 where they have none.
    `"inverse-propensity"`: the larger, the rarer the label is among training points. `"binary"`: 1"""
    threshold: float = Field(default=0.0, ge=0)
    """drop labels of less relevance. From training and from evaluation"""
    propensity_a: float = Field(default=0.55, gt=0, le=2)
    """A of the propensity model. .5 for data like Wikipedia, .6 like Amazon's"""
    propensity_b: float = Field(default=1.5, ge=0.01, le=1000)
    """B of the propensity model. .4 for data like Wikipedia, 2.6 like Amazon's"""


RELEVANCE_OPTIONS: Form[RelevanceOptions] = Form(RelevanceOptions)
