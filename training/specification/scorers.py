"""The scorers of a tree model: keys, defaults and limits of each kind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from training.specification.sections import Form, Section, default_kind

PAPER_HIDDEN = (128, 64, 24)
"""Layers of the network of TDM, JTM and OTM."""

Layers = tuple[Annotated[int, Field(ge=1)], ...]


class NodeRows(Section):
    """The node rows of a scorer."""

    init: Literal["embeddings", "random", "earlier"] = "embeddings"
    """first node rows: `"embeddings"`, `"random"`, `"earlier"`. `"embeddings"`: the mean co-occurrence embedding of the items below.
    `"earlier"`: rows and weights of `earlier_model`"""
    init_std: float = Field(default=0.3, gt=0)
    """root mean square of the first node rows"""
    dtype: Literal["auto", "float16", "float32", "int8"] = "auto"
    """stored type of node rows. `"auto"` is float16, or int8 where float16 takes over 32 MiB and validation recall falls by .2 % at most"""


class ProductScorer(NodeRows):
    """The inner product of a node row with a network of the history."""

    kind: Literal["product"] = "product"
    node_dim: int = Field(default=128, ge=2)
    """width of a node row"""
    hidden: Layers = (256,)
    """widths of hidden layers"""
    dropout: float = Field(default=0.3, ge=0, lt=1)
    """dropout of each layer's inputs"""


class _PaperScorer(NodeRows):
    node_dim: int = Field(default=24, ge=2)
    """width of a node row"""
    hidden: Layers = Field(default=PAPER_HIDDEN, min_length=1)
    """widths of hidden layers"""


class MlpScorer(_PaperScorer):
    """The papers' network of history and node row."""

    kind: Literal["mlp"] = "mlp"


class AttentionScorer(_PaperScorer):
    """The papers' network with TDM's attention unit."""

    kind: Literal["attention"] = "attention"
    attention_hidden: int = Field(default=36, ge=1)
    """units of the attention network"""


Scorer = Annotated[ProductScorer | MlpScorer | AttentionScorer, Field(discriminator="kind"), default_kind("product")]
SCORER: Form[Scorer] = Form(Scorer)
