"""The configuration of a model of linear scorers: one TOML file with `algorithm = "xr-linear"`, checked on reading.

Knows keys, defaults and limits. Paths in the file are relative to the current directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from espalier.errors import InvalidConfig
from espalier.manifest import Activation, ModelName, Ranking
from espalier.text.blocks import TextBlock
from training.config import SearchLimits

Columns = tuple[str, ...]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Data(_Section):
    """What every format has.

    train, test  files to learn from and to measure on; without `test`, `test_share` of the training queries is held out
    items        Parquet table of the items, with a column `id`
    """

    train: Path | None = None
    test: Path | None = None
    items: Path | None = None
    test_share: float = Field(default=0.1, ge=0, lt=1)


class XmcData(_Data):
    """The text format of the Extreme Classification Repository; `unit`: points are divided by their length (L2), and queries will be.

    Items are the labels in their order: row i of `items`, or "0", "1", …
    """

    format: Literal["xmc"]
    train: Path
    unit: bool = True


class NpzData(_Data):
    """SciPy's sparse matrices: points with their features, and points with their labels, whose values are weights."""

    format: Literal["npz"]
    train: Path
    train_labels: Path
    test_labels: Path | None = None
    unit: bool = True

    @model_validator(mode="after")
    def _both_or_none(self) -> NpzData:
        if (self.test is None) != (self.test_labels is None):
            raise InvalidConfig("data.test_labels", self.test_labels, "a file exactly where data.test is one")
        return self


class LogData(_Data):
    """A log of query texts and the items that they led to: CSV (or TSV) or Parquet.

    query, item, weight  its columns; equal pairs are one, of the sum of their weights (1 without a column)
    texts                Parquet table with a column `id`: then `query` holds ids, and `text_columns` of this table are the texts
    own_texts            lists of columns of `items`: each makes a query of every item, to which it is the answer
    """

    format: Literal["log"]
    query: str = "query"
    item: str = "item"
    weight: str | None = None
    texts: Path | None = None
    text_columns: Columns = ()
    own_texts: tuple[Columns, ...] = ()

    @model_validator(mode="after")
    def _something_to_learn(self) -> LogData:
        if self.train is None and not self.own_texts:
            raise InvalidConfig("data.train", None, "a log, or data.own_texts to learn from")
        if self.own_texts and self.items is None:
            raise InvalidConfig("data.items", None, "a table of items, since data.own_texts names columns of it")
        if (self.texts is None) != (not self.text_columns):
            raise InvalidConfig("data.text_columns", list(self.text_columns), "columns exactly where data.texts is a table")
        return self


class LabelConfig(_Section):
    """What the tree is made from: each item's training queries (`pifa`), its own text in `columns` of the item table (`text`), or both."""

    kind: Literal["pifa", "text", "both"] = "pifa"
    columns: Columns = ()

    @model_validator(mode="after")
    def _columns_named(self) -> LabelConfig:
        if (self.kind == "pifa") != (not self.columns):
            raise InvalidConfig("labels.columns", list(self.columns), "columns of the item table exactly where labels.kind is text or both")
        return self


class LinearTree(_Section):
    """Balanced hierarchical k-means: most children of a node, and most items of a leaf cluster."""

    branching: int = Field(default=128, ge=2, le=1 << 15)
    max_leaf: int = Field(default=32, ge=2, le=1 << 15)


class LinearOptions(_Section):
    """How linear node scorers are trained.

    negatives   whose points a node's children learn from: "teacher" (a positive below), "matcher" (kept by the beam), "both"
    beam_size   of that beam
    loss        "squared-hinge" or "logistic"
    cost        C, what a unit of loss costs against ½‖w‖²
    weighted    a positive's costs C times its weight in the data, divided by their mean; an inner node has its largest below
    tolerance, passes   of the descent
    bias        value of the feature that all points have
    threshold   weights below are left out of the model
    prior       β: weights are drawn to β times the node's centroid, and biases to −β / 2, instead of to 0. What few queries tell of a
                node, its centroid does: an item that one query led to is found by queries like it
    few         nodes whose items have fewer training queries each, on average over them, are not trained: children stay at their
                centroids. None where prior is 0
    activation  what a scorer's product is turned into; the search ranks by them along the path. Unless it is said, sigmoid where
                the loss is logistic, whose probability it is
    gamma       γ of the ranks: an item's own activation counts in full, its parent's to the power of γ, and so on; 1 is their product
    """

    negatives: Literal["teacher", "matcher", "both"] = "both"
    beam_size: int = Field(default=10, ge=1)
    loss: Literal["squared-hinge", "logistic"] = "squared-hinge"
    cost: float = Field(default=1.0, gt=0)
    weighted: bool = False
    tolerance: float = Field(default=0.1, gt=0)
    passes: int = Field(default=10, ge=1)
    bias: float = Field(default=1.0, ge=0)
    threshold: float = Field(default=0.05, ge=0)
    prior: float = Field(default=3.0, ge=0)
    few: float = Field(default=3.0, ge=0)
    activation: Activation = "l3-hinge"
    gamma: float = Field(default=0.5, ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _activation_of_the_loss(cls, given: Any) -> Any:
        return {"activation": "sigmoid"} | given if isinstance(given, dict) and given.get("loss") == "logistic" else given

    @property
    def ranking(self) -> Ranking:
        """How the beam ranks, in training and in serving."""
        return Ranking(activation=self.activation, own="log_activation", gamma=self.gamma)


class LinearSearch(SearchLimits):
    """Search defaults and limits of the exported model."""

    beam_size: int = Field(default=10, ge=1)
    m: int = Field(default=10, ge=1)


class LinearConfig(_Section):
    """A whole training run. `seed` reproduces it; `threads` 0 takes all cores.

    text  what makes features of texts, for data of format log: words, pairs of words and character trigrams by default
    """

    algorithm: Literal["xr-linear"]
    name: ModelName
    seed: int = Field(default=1, ge=0, lt=2**32)
    threads: int = Field(default=0, ge=0)
    data: Annotated[XmcData | NpzData | LogData, Field(discriminator="format")]
    text: tuple[TextBlock, ...] | None = None
    labels: LabelConfig = LabelConfig()
    tree: LinearTree = LinearTree()
    linear: LinearOptions = LinearOptions()
    search: LinearSearch = LinearSearch()

    @property
    def blocks(self) -> tuple[TextBlock, ...]:
        """The kinds of n-grams."""
        return self.text or (TextBlock(unit="word", n=1), TextBlock(unit="word", n=2), TextBlock(unit="char", n=3))

    @model_validator(mode="after")
    def _texts_where_there_are_some(self) -> LinearConfig:
        if not isinstance(self.data, LogData):
            if self.text is not None:
                raise InvalidConfig("text", len(self.text), f"nothing, since data of format {self.data.format} has no texts")
            if self.labels.kind != "pifa":
                raise InvalidConfig("labels.kind", self.labels.kind, f"pifa, since data of format {self.data.format} has no texts")
        elif self.text is not None and not self.text:
            raise InvalidConfig("text", 0, "at least one block of n-grams")
        if self.labels.columns and self.data.items is None:
            raise InvalidConfig("data.items", None, "a table of items, since labels.columns names columns of it")
        return self
