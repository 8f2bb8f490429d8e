"""The sections of trees with a sequence encoder: their keys, defaults and limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from espalier.queries import MAX_HISTORY
from training.specification.scorers import NodeRows
from training.specification.sections import Section, auto_or, auto_or_integer

MAX_TARGETS = 1000
"""Of a place."""
MAX_NEARNESS = 10
"""Beyond it all targets are the next item."""
Encoder = Literal["windows", "transformer"]
NEARNESS = auto_or(f"a number from 0 to {MAX_NEARNESS}", lambda nearness: 0 <= nearness <= MAX_NEARNESS)


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
    node_dim: int = Field(default=256, ge=2)
    """width of a node row. Encoders have equal shares of it, multiples of `heads`"""
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
    """history items that are read, or `"auto"`. The last ones. `"auto"`: as many as 99 of 100 lists hold, from 50 to 200"""

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
