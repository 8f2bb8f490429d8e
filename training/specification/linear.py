"""The configuration of a model of linear scorers (`kind = "xr-linear"`, `"xreg"`): keys, defaults and limits.

Paths in the file are relative to the current directory. XReg (Prabhu et al. 2020) is trained and served as XR-Linear is. Its tree is binary
above larger leaf clusters, and its scorers regress on relevance, so that scores say how relevant each item is.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field, FiniteFloat, model_validator

from espalier.errors import MISSING, InvalidConfig
from espalier.manifest import MAX_TREES, Activation, ModelName, Ranking
from espalier.stacking import MOST_POINTS
from espalier.text.blocks import TextBlock

from ..specification.log_format import TextTable
from ..specification.sections import SHARE, Form, SearchLimits, Section, auto_or, auto_or_integer

Columns = tuple[str, ...]
AUTO: Literal["auto"] = "auto"


class _Data(Section):
    test: Path | None = None
    """test data, in the same format. Nothing is chosen by it"""
    items: Path | None = None
    """item table. Parquet or text"""
    items_id: str = "id"
    """column of its ids"""
    items_format: TextTable = TextTable()
    """how `data.items` and other tables than the log are read, if they are text"""
    test_share: float = Field(default=0.1, ge=0, lt=1)
    """share held out without `data.test`. Of a log: of its own queries"""


class XmcData(_Data):
    """Text files of the Extreme Classification Repository, gzipped or not: at most 67,108,864 features and as many labels.

    Row i of `data.items` is label i.
    """

    format: Literal["xmc"]
    train: Path
    """training data. `--train` reads another file"""
    label_weights: bool | None = None
    """labels are written `label:weight`. By default where a line of it or of the training file begins with several such pairs, with
    commas"""
    unit: bool = True
    """divide points and queries by their L2 norm"""


class NpzData(_Data):
    """SciPy's sparse matrices: points with their features, and points with their labels. Row i of `data.items` is label i."""

    format: Literal["npz"]
    train: Path
    """training data. A matrix [points, features]; `--train` reads another file"""
    train_labels: Path
    """matrix [points, labels] of weights. 0, or from 1e-9 to 1e9"""
    test_labels: Path | None = None
    """weights of `data.test`. As `data.train_labels`"""
    unit: bool = True
    """divide points and queries by their L2 norm"""

    @model_validator(mode="after")
    def _both_or_none(self) -> NpzData:
        if (self.test is None) != (self.test_labels is None):
            raise InvalidConfig("data.test_labels", self.test_labels, "a file exactly where data.test is one")
        return self


NEAR_ITEMS = 3


class LogData(_Data, TextTable):
    """A log of query texts and the items that they led to: CSV, TSV or Parquet."""

    SECTION = "data"
    format: Literal["log"]
    train: Path | None = None
    """training data. The log; `--train` reads another file. Needed unless `data.own_texts` is given"""
    query: str = "query"
    """column of the query texts"""
    item: str = "item"
    """column of the item ids"""
    weight: str | None = None
    """column of weights. Equal pairs are added up"""
    views: str | None = None
    """column of views, with `data.clicks`. Equal pairs are added up. The weight is the rate (clicks + a · prior) / (views + a), a being
    `data.smoothing` and prior the training log's rate, and 0 without clicks"""
    clicks: str | None = None
    """column of clicks. At most as many as views"""
    smoothing: float = Field(default=10.0, ge=0, le=1e9)
    """views that the log's mean rate is worth"""
    texts: Path | None = None
    """table of query texts. Parquet with a column `id`, where the query column holds ids and not texts"""
    text_columns: Columns = ()
    """text columns of `data.texts`"""
    own_texts: Columns = ()
    """columns of `data.items` that are searched, whether or not a query led to the item. A word of a column whose texts are long
    says less"""
    own_weights: tuple[Annotated[FiniteFloat, Field(ge=0.001, le=1000)], ...] = ()
    """weight of a word in each of these columns. None: ∛(8 / mean words) of a column, at most 1, or what finds clearly more of what at
    least 30 queries of the log led to"""
    near_items: int = Field(default=NEAR_ITEMS, ge=0, le=10)
    """nearest items by these texts whose words find an item, too. Such a word weighs at most half. 0: only its own words"""

    @model_validator(mode="after")
    def _a_weight_for_each(self) -> LogData:
        if self.own_weights and len(self.own_weights) != len(self.own_texts):
            expected = f"none, or {len(self.own_texts)}, one for each of data.own_texts"
            raise InvalidConfig("data.own_weights", list(self.own_weights), expected)
        return self

    @model_validator(mode="after")
    def _something_to_learn(self) -> LogData:
        if self.train is None and not self.own_texts:
            raise InvalidConfig("data.train", MISSING, "a log, or data.own_texts to learn from")
        if self.own_texts and self.items is None:
            raise InvalidConfig("data.items", MISSING, "a table of items, since data.own_texts names columns of it")
        if (self.texts is None) != (not self.text_columns):
            raise InvalidConfig("data.text_columns", list(self.text_columns), "columns exactly where data.texts is a table")
        return self

    @model_validator(mode="after")
    def _weights_or_counts(self) -> LogData:
        if (self.views is None) != (self.clicks is None):
            raise InvalidConfig("data.clicks", self.clicks, "a column exactly where data.views is one")
        if self.views is not None and self.weight is not None:
            raise InvalidConfig("data.weight", self.weight, "nothing, since data.views and data.clicks make the weights")
        if self.near_items != NEAR_ITEMS and not self.own_texts:
            raise InvalidConfig("data.near_items", self.near_items, "nothing, since data.own_texts names no texts")
        if self.views is not None and self.own_texts:
            raise InvalidConfig("data.own_texts", list(self.own_texts), "nothing, since such texts have neither views nor clicks")
        return self

    @property
    def numbers(self) -> dict[str, str]:
        """The columns of `weight`, or of `views` and `clicks`; none if all rows have the same weight."""
        every = {"weight": self.weight, "views": self.views, "clicks": self.clicks}
        return {name: column for name, column in every.items() if column is not None}


CHILDREN, MOST_CHILDREN = 128, 1 << 15
"""Meaning of `tree.branching = "auto"` where the root is trained, and where it is not; the second is the largest number, too."""

ITEMS_OF_A_LEAF, ITEMS_OF_ONE_NODE, WEIGHTS_OF_ONE_NODE = 32, 1024, 1 << 26
"""Meaning of `tree.max_leaf = "auto"`: items of a leaf cluster; most items, and most items times features, of a tree of one node. One node
is one-versus-all, which is exact. A node's weights are dense in training, here at most 256 MB."""

LEAST_ITEMS_OF_A_LEAF, FEW_ITEMS = 8, 1 << 14
"""Items of a leaf cluster where the root is not trained, unless it cannot hold so many clusters; most items that have clusters of 32 even
there, since a beam of 100 misses next to nothing then."""

Children = Annotated[Literal["auto"] | int, auto_or_integer(2, MOST_CHILDREN)]


class TreeShape(NamedTuple):
    """How large a tree's nodes are.

    branching  most children of a node above the leaf clusters
    max_leaf   most items of a leaf cluster
    is_wide    whether an untrained root holds all clusters of more than FEW_ITEMS items
    """

    branching: int
    max_leaf: int
    is_wide: bool


class LinearTree(Section):
    """Balanced hierarchical k-means."""

    branching: Children = AUTO
    """largest number of children above the leaf clusters, or `"auto"`. At least 2. `"auto"`: 128, but the root holds all leaf clusters, if
    they are at most 32,768, where it would not be trained (`linear.min_positives`): nodes above them have nearly all words"""
    max_leaf: Children = AUTO
    """largest leaf cluster, or `"auto"`. At least 2 items. `"auto"`: 32, but 8 or more below a root that holds all clusters of more than
    16,384 items, and no clusters for at most 1024 items (and 2^26 items times features) and one tree: one node scores them as fast"""
    count: int = Field(default=1, ge=1, le=MAX_TREES)
    """trees of a forest. They have different seeds. An item's score is the mean over them; time and size grow with their number"""

    def shape_of(self, items: int, features: int, is_trained: bool) -> TreeShape:
        """The shape of a tree over so many items and features. is_trained: whether its root is."""
        is_large = FEW_ITEMS < items <= MOST_CHILDREN * ITEMS_OF_A_LEAF
        is_wide = self.branching == self.max_leaf == AUTO and not is_trained and is_large
        max_leaf = self._leaf_of(items, features, is_wide) if self.max_leaf == AUTO else self.max_leaf
        if self.branching != AUTO:
            return TreeShape(self.branching, max_leaf, is_wide)
        holds_clusters = not is_trained and items <= MOST_CHILDREN * max_leaf
        return TreeShape(MOST_CHILDREN if holds_clusters else CHILDREN, max_leaf, is_wide)

    def _leaf_of(self, items: int, features: int, is_wide: bool) -> int:
        if self.count == 1 and items <= ITEMS_OF_ONE_NODE and items * features <= WEIGHTS_OF_ONE_NODE:
            return ITEMS_OF_ONE_NODE
        if not is_wide:
            return ITEMS_OF_A_LEAF
        max_leaf = LEAST_ITEMS_OF_A_LEAF
        while items > MOST_CHILDREN * max_leaf:
            max_leaf *= 2
        return max_leaf


LARGEST = 1e9
"""Limit of numbers that scale weights: products of larger ones exceed float32."""
COST = auto_or(f"a number greater than 0, at most {LARGEST:g}", lambda cost: 0 < cost <= LARGEST)
UNCHOSEN_COST, UNCHOSEN_GAMMA, UNTRAINED_GAMMA = 1.0, 0.5, 0.15
"""C and γ if there are too few points to choose them, and before they are chosen; γ if there are too few to train the root."""


class LinearOptions(Section):
    """How linear node scorers are trained."""

    beam_size: ClassVar[int] = 20
    """Size of the beam that chooses the points of a node for `matcher`."""
    tolerance: ClassVar[float] = 0.1
    passes: ClassVar[int] = 10
    """A node's descent ends at this difference of projected gradients (logistic: of changes of margins), or after so many passes."""
    bias: ClassVar[float] = 1.0
    """Value of the constant feature of every point; 0: scorers without a bias."""

    negatives: Literal["teacher", "matcher", "both"] = "both"
    """points that train a node: `"teacher"`, `"matcher"`, `"both"`. `"teacher"`: those with a positive below. `"matcher"`: those whose beam
    of 20 keeps the node"""
    loss: Literal["squared-hinge", "logistic", "relevance"] = "squared-hinge"
    """loss of a node scorer. `"relevance"` is the logistic loss of a regressor of weights divided by their maximum (XReg)"""
    cost: Annotated[Literal["auto"] | float, COST] = AUTO
    """C, the cost of a unit of loss. Against ½‖w‖², above 0, or `"auto"`: chosen on training points held out, which are never texts of
    items"""
    weighted: bool = False
    """positives cost in proportion to their weights"""
    threshold: float = Field(default=0.05, ge=0, le=LARGEST)
    """drop smaller weights. The larger, the smaller and faster the model"""
    relative_threshold: float = Field(default=0.0, ge=0, lt=1)
    """drop weights below this share of the largest"""
    prior: float = Field(default=3.0, ge=0, le=LARGEST)
    """β: regularise weights towards β · centroid. Biases towards −β / 2"""
    weights: Literal["float16", "float32"] = "float16"
    """stored type of weights: `"float16"`, `"float32"`. `"float16"` makes the bundle less than half as large, at the same quality.
    `"float32"` is written where float16 cannot hold them"""
    intercept: Literal["zero", "base-rate"] = "zero"
    """regularise biases towards `"zero"` or `"base-rate"`. `"base-rate"`, for the loss `"relevance"`: the log-odds of the child's mean
    target, so that estimates of rare items are not too high"""
    min_positives: float = Field(default=3.0, ge=0, le=LARGEST)
    """fewest positives per label, on average, to train below a node. Below other nodes children are scored by their centroids. Without
    effect where `linear.prior` is 0"""
    activation: Activation | None = None
    """activation of a product: `"sigmoid"`, `"l1-hinge"` … `"l4-hinge"`. `"lp-hinge"` of v is exp(−max(0, 1 − v)^p). The default is
    `"l3-hinge"` for the squared hinge, `"sigmoid"` for the others"""
    gamma: Annotated[Literal["auto"] | float, SHARE] = AUTO
    """γ of the ranks, 0 to 1, or `"auto"`. A rank is log activation + γ · the parent's rank; 1 is the product along the path (XR-Linear).
    `"auto"`: chosen on training points held out"""

    @property
    def known_cost(self) -> float:
        """C, or UNCHOSEN_COST before it is chosen."""
        return UNCHOSEN_COST if self.cost == AUTO else self.cost

    @property
    def ranking(self) -> Ranking:
        """How the beam ranks, in training and in serving, with UNCHOSEN_GAMMA before γ is chosen."""
        activation = self.activation or ("l3-hinge" if self.loss == "squared-hinge" else "sigmoid")
        return Ranking(activation=activation, own="log_activation", gamma=UNCHOSEN_GAMMA if self.gamma == AUTO else self.gamma)


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


class LinearSearch(SearchLimits):
    """Search defaults and limits of the exported model."""

    beam_size: int = Field(default=10, ge=1)
    """beam size where a query names none; with `data.own_texts` or many clusters below an untrained root √items, at least 100"""
    m: int = Field(default=10, ge=1)


LEAST_WIDE_BEAM = 100
"""Words occur in many clusters. Of 100,000 items, a beam of 100 misses a sixth of what a wide one finds, a beam of 300 a twentieth."""


class LinearConfig(Section):
    """XR-Linear: sparse linear scorers of texts or of sparse features."""

    kind: Literal["xr-linear"] = "xr-linear"
    name: ModelName
    """name of the model. The NAME in `--out` overrides it"""
    seed: int = Field(default=1, ge=0, lt=2**32)
    """random seed. The number of threads makes no difference"""
    data: Annotated[XmcData | NpzData | LogData, Field(discriminator="format")]
    text: tuple[TextBlock, ...] | None = None
    """n-grams of texts, for `data.format` log; by default words (with `endings` if items have `data.own_texts`), pairs of words and
    character trigrams"""
    tree: LinearTree = LinearTree()
    linear: LinearOptions = LinearOptions()
    relevance: RelevanceOptions = RelevanceOptions()
    tail: TailOptions = TailOptions()
    stacking: StackingOptions = StackingOptions()
    search: LinearSearch = LinearSearch()

    @property
    def blocks(self) -> tuple[TextBlock, ...]:
        """The kinds of n-grams."""
        words = TextBlock(unit="word", n=1, endings=self._has_own_texts)
        return self.text or (words, TextBlock(unit="word", n=2), TextBlock(unit="char", n=3))

    @property
    def _has_own_texts(self) -> bool:
        return isinstance(self.data, LogData) and bool(self.data.own_texts)

    def with_beam(self, items: int, shape: TreeShape) -> LinearConfig:
        """This configuration with a wide beam for so many items, if words or many clusters ask for one and `search` names none."""
        if "beam_size" in self.search.model_fields_set or not (self._has_own_texts or shape.is_wide):
            return self
        beam_size = min(max(LEAST_WIDE_BEAM, round(math.sqrt(items))), self.search.max_beam_size)
        return self.model_copy(update={"search": self.search.model_copy(update={"beam_size": beam_size})})

    @model_validator(mode="after")
    def _texts_where_there_are_some(self) -> LinearConfig:
        if not isinstance(self.data, LogData):
            if self.text is not None:
                raise InvalidConfig("text", len(self.text), f"nothing, since data of format {self.data.format} has no texts")
        elif self.text is not None and not self.text:
            raise InvalidConfig("text", 0, "at least one block of n-grams")
        if self.tail.form != "none" and self.tree.count < 2:
            raise InvalidConfig("tail.form", self.tail.form, '"none" where tree.count is 1: a tail enters the scores of a forest')
        if self.linear.intercept == "base-rate" and self.linear.loss != "relevance":
            raise InvalidConfig("linear.intercept", self.linear.intercept, f'"zero" where linear.loss is "{self.linear.loss}"')
        if self.stacking.model == "network" and self.tail.form != "none":
            raise InvalidConfig("stacking.model", "network", '"auto" or "none" where tail.form is one: both order candidates')
        return self


# -- XReg -----------------------------------------------------------------------------------------------------------------


class XRegTree(LinearTree):
    """Balanced hierarchical 2-means over relevance-weighted sums of points (§4.1)."""

    branching: Children = 2
    """largest number of children above the leaf clusters, or `"auto"`. At least 2. `"auto"` as for xr-linear"""
    max_leaf: Children = 100
    """largest leaf cluster, or `"auto"`. At least 2 items. `"auto"` as for xr-linear"""
    count: int = Field(default=3, ge=1, le=MAX_TREES)


class XRegOptions(LinearOptions):
    """How edge regressors are trained (§4.2, Eq. 5)."""

    bias: ClassVar[float] = 0.3
    """Points have length 1, so a constant feature of 1 would be as large as all other features together."""

    negatives: Literal["teacher", "matcher", "both"] = "teacher"
    """points that train a node: `"teacher"`, `"matcher"`, `"both"`. `"teacher"` is Eq. 5, where a point that only a beam brings has no
    weight"""
    loss: Literal["squared-hinge", "logistic", "relevance"] = "relevance"
    cost: Annotated[float, COST] = Field(default=10.0, gt=0, le=LARGEST)
    """C, the cost of a unit of loss. The mean cost of a node's points against ½‖w‖²"""
    threshold: float = Field(default=0.0, ge=0, le=LARGEST)
    relative_threshold: float = Field(default=0.05, ge=0, lt=1)
    prior: float = Field(default=0.0, ge=0, le=LARGEST)
    gamma: Annotated[float, SHARE] = Field(default=1.0, ge=0, le=1)
    """γ of the ranks, 0 to 1, or `"auto"`. 1 multiplies along the path, so that scores estimate relevance"""


class XRegStackingOptions(StackingOptions):
    """The same, off by default: XReg as published has none."""

    model: Literal["auto", "none", "network"] = "none"
    """`"network"`, `"none"` or `"auto"`. As for xr-linear; `"none"` is XReg as published"""


class XRegConfig(LinearConfig):
    """XReg: sparse linear regressors of relevance."""

    kind: Literal["xreg"] = "xreg"  # type: ignore[assignment]  # another kind of the same family
    tree: XRegTree = XRegTree()
    linear: XRegOptions = XRegOptions()
    stacking: XRegStackingOptions = XRegStackingOptions()
