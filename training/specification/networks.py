"""Keys, defaults and limits of the networks of tree models: scorers, their optimisers, and the training of sequence encoders."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from espalier.queries import MAX_HISTORY

from ..specification.sections import Form, Section, auto_or, auto_or_integer, default_kind, number_of

PAPER_HIDDEN = (128, 64, 24)
"""Layers of the network of TDM, JTM and OTM."""

MAX_PLACES = 1 << 20
"""Most places of an update: the encoder's results for all of them are in memory at once."""
WARM_SHARE = 5
"""The learning rate rises during at most a fifth of the steps. In a short trial it would otherwise be too low for too long."""
MAX_NODE_DIM = 1 << 14
MAX_EPOCHS = 1_000_000
"""Most epochs of a training; `steps` ends it long before."""
EPOCHS = auto_or(f"a number above 0 and at most {MAX_EPOCHS:,}", lambda epochs: 0 < epochs <= MAX_EPOCHS)
MAX_TARGETS = 1000
"""Most targets of a place."""
MAX_NEARNESS = 10
"""Above this, all targets are the next item."""
Encoder = Literal["windows", "transformer"]
NEARNESS = auto_or(f"a number from 0 to {MAX_NEARNESS}", lambda nearness: 0 <= nearness <= MAX_NEARNESS)

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


# -- updates --------------------------------------------------------------------------------------------------------------


class _Optimiser(Section):
    steps: int = Field(default=2000, ge=1)
    """largest number of updates"""
    learning_rate: float = Field(default=2e-3, gt=0)
    """learning rate. It falls linearly from the first step to 0 at `steps`"""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """precision of matrix products. Weights stay float32. `"auto"` is bfloat16 where the device computes in it"""
    average: int = Field(default=200, ge=1)
    """steps that the weight average spans. It is exponential; 1: no average"""
    validate_every: int = Field(default=100, ge=1)
    """steps between validations. Each measures recall@`search.m` on at most 1,000 validation users"""
    patience: int = Field(default=8, ge=1)
    """validations without progress that end training"""


class OptimiserConfig(_Optimiser):
    """Adam. The learning rate falls linearly to 0; the averaged weights with the best recall of validation users are kept."""

    batch: int = Field(default=256, ge=1)
    """instances per update. Over all processes together"""

    def learning_rate_at(self, step: int) -> float:
        return self.learning_rate * (1 - step / self.steps)


class SequenceOptimiser(_Optimiser):
    """AdamW. The learning rate rises, then falls linearly to 0; the averaged weights with the best recall of validation users are kept."""

    steps: int = Field(default=8000, ge=1)
    epochs: Annotated[Literal["auto"] | float, EPOCHS] = "auto"
    """passes over the lists, or `"auto"`. `steps` is lowered to them, but to no fewer than 1,000 or those of 100 passes. `"auto"`: 16, or 4
    for logs of fewer than 50 events an item, or 2 where these have more than 65,536 items and no order"""
    places: Annotated[Literal["auto"] | int, auto_or_integer(1, MAX_PLACES)] = "auto"
    """list positions per update, or `"auto"`. Padding included. `"auto"`: 1 in 400 of the log's events, from 1,024 to 4,096"""
    learning_rate: float = Field(default=2e-3, gt=0)
    """learning rate. It rises for `warm_steps`, then falls linearly to 0 at `steps`"""
    warm_steps: int = Field(
        default=200, ge=0, description=f"steps in which the learning rate rises linearly, at most one in {WARM_SHARE} of `steps`"
    )
    weight_decay: float = Field(default=0.0, ge=0)
    """decoupled weight decay"""
    average: int = Field(default=300, ge=1)
    validate_every: int = Field(default=250, ge=1)

    def learning_rate_at(self, step: int) -> float:
        warm_steps = min(self.warm_steps, self.steps // WARM_SHARE)
        return self.learning_rate * min((step + 1) / (warm_steps + 1), 1 - step / self.steps)


# -- sequence encoders ----------------------------------------------------------------------------------------------------


class SequenceInstances(Section):
    """What is predicted at each place of a list."""

    targets: int = Field(default=20, ge=1, le=MAX_TARGETS)
    """largest number of targets. Of a position: 1 is the next item, several are drawn from all that follow in the list"""
    nearness: Annotated[Literal["auto"] | float, NEARNESS] = "auto"
    """preference for near targets, or `"auto"`. The chance of the d-th item that follows falls as d^−nearness; 0: all alike; at most 10.
    `"auto"`: 0 where lists have no order; 1 where validation queries have two relevant items or more, on average; else 2"""
    cold_share: float = Field(default=0.02, ge=0, lt=1)
    """share of training examples without a history. They stand before the first item of a list"""


class SequenceScorer(NodeRows):
    """The inner product of a node row with what encoders make of the history as a sequence, once for all levels."""

    kind: Literal["sequence"] = "sequence"
    init_std: float = Field(default=0.05, gt=0)
    encoders: Literal["auto"] | Annotated[tuple[Encoder, ...], Field(min_length=1, max_length=4)] = "auto"
    """history encoders, or `"auto"`. `"windows"`: averages over the papers' windows through a layer, or over the whole of a list without an
    order; `"transformer"`: a causal transformer. Each has its share of a node row and a softmax of its own in training; their scores are
    added. `"auto"`: both; of lists without an order windows alone"""
    node_dim: Annotated[Literal["auto"] | int, auto_or_integer(2, MAX_NODE_DIM)] = "auto"
    """width of a node row, or `"auto"`. Encoders have equal shares of it, multiples of `heads`. `"auto"`: 256; 128 where `windows` alone
    read a catalogue of more than 65,536 items"""
    window_hidden: int = Field(default=256, ge=1)
    """units of the hidden layer of `windows`"""
    window_dropout: float = Field(default=0.3, ge=0, lt=1)
    """dropout of both layers of `windows`"""
    layers: int = Field(default=2, ge=1, le=32)
    """transformer blocks"""
    heads: int = Field(default=2, ge=1)
    """attention heads"""
    dropout: Annotated[Literal["auto"] | float, auto_or("a number from 0 to below 1", lambda value: 0 <= value < 1)] = "auto"
    """dropout of the transformer, or `"auto"`. Of its inputs, and of what each block adds. `"auto"`: 0.5 for logs of fewer than 50 events
    an item, else 0.2"""
    length: Annotated[Literal["auto"] | int, auto_or_integer(1, MAX_HISTORY)] = "auto"
    """history items that are read, or `"auto"`. The last ones. `"auto"`: as many as 99 of 100 lists hold, from 50 to 200, or to
    1,000 where `windows` alone read lists without an order"""

    @property
    def width(self) -> int:
        """Of a node row; see `number_of`."""
        return number_of("scorer.node_dim", self.node_dim)

    def readers(self, ordered: bool) -> tuple[Encoder, ...]:
        """The encoders of lists with an order or without."""
        if self.encoders != "auto":
            return self.encoders
        return ("windows", "transformer") if ordered else ("windows",)


class SequenceObjective(Section):
    """The softmax over every level at every place of a list, over whole levels or sampled nodes."""

    gamma: float = Field(default=0.5, ge=0, le=1)
    """γ of the ranks in training"""
    level_decay: float = Field(default=0.5, gt=0, le=1)
    """weight of a level over that of the level below"""
    negatives: int = Field(default=2048, ge=1)
    """leaves drawn per update. Half of them by popularity; they are the columns of the softmax"""
    whole: int = Field(default=4096, ge=1)
    """largest level that is not sampled"""
    inner_share: float = Field(default=0.25, gt=0, le=1)
    """share of positions that train inner levels"""
