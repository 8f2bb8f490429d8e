"""The configuration of an extreme regressor (`kind = "xreg"`): how relevant each item is, not only whether it is.

XReg (Prabhu et al. 2020) is trained and served as XR-Linear is. Its tree is binary above larger leaf clusters, and its scorers regress on
relevance, so that scores estimate it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from espalier.manifest import MAX_TREES, Activation
from training.specification.linear import COST, LARGEST, LeafItems, LinearConfig, LinearOptions, LinearTree
from training.specification.sections import SHARE
from training.specification.stacking import XRegStackingOptions


class XRegTree(LinearTree):
    """Balanced hierarchical 2-means over relevance-weighted sums of points (§4.1)."""

    branching: int = Field(default=2, ge=2, le=1 << 15, description="most children of a node above the leaf clusters")
    max_leaf: LeafItems = Field(default=100, description='most items of a leaf cluster, at least 2, or `"auto"` as for xr-linear')
    count: int = Field(default=3, ge=1, le=MAX_TREES, description="trees of the forest; an item's score is the mean over them")


class XRegOptions(LinearOptions):
    """How edge regressors are trained (§4.2, Eq. 5)."""

    bias: ClassVar[float] = 0.3
    """Points have length 1: a feature of 1 that they all share would be as large as all their other features together."""

    negatives: Literal["teacher", "matcher", "both"] = Field(
        default="teacher", description='as for xr-linear; `"teacher"` is Eq. 5, where a point that only a beam brings has no weight'
    )
    loss: Literal["squared-hinge", "logistic", "relevance"] = Field(
        default="relevance", description="of a regressor: the logistic loss with fractional targets, weighted by the parent's relevance"
    )
    cost: Annotated[float, COST] = Field(default=10.0, gt=0, le=LARGEST, description="C, the mean cost of a node's points against ½‖w‖²")
    threshold: float = Field(default=0.0, ge=0, le=LARGEST, description="drop smaller weights: the larger, the smaller and faster a model")
    relative_threshold: float = Field(default=0.05, ge=0, lt=1, description="drop weights smaller than this share of a scorer's largest")
    prior: float = Field(
        default=0.0,
        ge=0,
        le=LARGEST,
        description="β: regularise weights towards β times the node's centroid, and biases towards −β / 2, instead of 0",
    )
    activation: Activation | None = Field(default=None, description='of a scorer\'s product; the default is `"sigmoid"`')
    gamma: Annotated[float, SHARE] = Field(
        default=1.0, ge=0, le=1, description="γ of the ranks: 1 multiplies along the path, so that scores estimate relevance"
    )


class XRegConfig(LinearConfig):
    """XReg: sparse linear regressors of relevance."""

    kind: Literal["xreg"] = "xreg"  # type: ignore[assignment]  # another kind of the same family
    tree: XRegTree = XRegTree()
    linear: XRegOptions = XRegOptions()
    stacking: XRegStackingOptions = XRegStackingOptions()
