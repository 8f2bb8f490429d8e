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

    branching: int = Field(default=2, ge=2, le=1 << 15, description="largest number of children above the leaf clusters")
    max_leaf: LeafItems = Field(default=100, description='largest leaf cluster, or `"auto"`. At least 2 items. `"auto"` as for xr-linear')
    count: int = Field(default=3, ge=1, le=MAX_TREES, description="trees of a forest. An item's score is the mean over them")


class XRegOptions(LinearOptions):
    """How edge regressors are trained (§4.2, Eq. 5)."""

    bias: ClassVar[float] = 0.3
    """Points have length 1: a feature of 1 that they all share would be as large as all their other features together."""

    negatives: Literal["teacher", "matcher", "both"] = Field(
        default="teacher",
        description=(
            'points that train a node: `"teacher"`, `"matcher"`, `"both"`. `"teacher"` is Eq. 5, where a point '
            "that only a beam brings has no weight"
        ),
    )
    loss: Literal["squared-hinge", "logistic", "relevance"] = Field(
        default="relevance",
        description="loss of a node scorer. The logistic loss with fractional targets, weighted by the parent's relevance",
    )
    cost: Annotated[float, COST] = Field(
        default=10.0, gt=0, le=LARGEST, description="C, the cost of a unit of loss. The mean cost of a node's points against ½‖w‖²"
    )
    threshold: float = Field(
        default=0.0, ge=0, le=LARGEST, description="drop smaller weights. The larger, the smaller and faster the model"
    )
    relative_threshold: float = Field(default=0.05, ge=0, lt=1, description="drop weights below this share of the largest")
    prior: float = Field(
        default=0.0,
        ge=0,
        le=LARGEST,
        description="β: regularise weights towards β · centroid. Biases towards −β / 2",
    )
    activation: Activation | None = Field(
        default=None, description='activation of a product: `"sigmoid"`, `"l1-hinge"` … `"l4-hinge"`. The default is `"sigmoid"`'
    )
    gamma: Annotated[float, SHARE] = Field(
        default=1.0,
        ge=0,
        le=1,
        description='γ of the ranks, 0 to 1, or `"auto"`. 1 multiplies along the path, so that scores estimate relevance',
    )


class XRegConfig(LinearConfig):
    """XReg: sparse linear regressors of relevance."""

    kind: Literal["xreg"] = "xreg"  # type: ignore[assignment]  # another kind of the same family
    tree: XRegTree = XRegTree()
    linear: XRegOptions = XRegOptions()
    stacking: XRegStackingOptions = XRegStackingOptions()
