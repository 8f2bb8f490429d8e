"""SASRec's configuration and its trained model, which answers by inner product with every item.

Knows a sequence encoder and an item table. Does not know lists or losses.

Legend: B queries, T places, I items, D width, M results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.errors import InvalidData
from training.deep.scorers.transformer import SequenceEncoder
from training.retrieval.scores import best_of_all

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]

PLACES = 1 << 13
"""Places of histories that are encoded at a time; at least one history."""


@dataclass(frozen=True)
class SasRecConfig:
    """What is trained, and for how long.

    width, layers, heads  of the encoder
    length         most items of a history; the last ones count
    dropout        share of the encoder's inputs, and of what each of its parts adds, that is 0 in training
    loss           `full` softmax, or `sampled`
    negatives      sampled: draws per batch, with replacement, from a mixture, half uniform and half by popularity
    places         places of a batch
    init           the item table at the start: `embeddings`, the co-occurrence embeddings that trees start from, or `random`
    init_std       its root mean square
    learning_rate  of Adam, after `warm_steps` in which it rises linearly
    weight_decay   of all weights, decoupled (AdamW)
    average        steps over which the weights that are measured and kept are averaged, exponentially
    patience       rounds without a better figure after which training ends
    max_rounds     rounds after which it ends anyway
    bfloat16       whether matrix products of training run in it; weights, losses and answers stay float32
    """

    width: int = 128
    layers: int = 2
    heads: int = 2
    length: int = 200
    dropout: float = 0.2
    loss: Literal["full", "sampled"] = "full"
    negatives: int = 2048
    places: int = 2048
    init: Literal["embeddings", "random"] = "embeddings"
    init_std: float = 0.05
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    warm_steps: int = 200
    average: int = 300
    patience: int = 4
    max_rounds: int = 200
    bfloat16: bool = False


@dataclass(frozen=True)
class SasRec:
    """A trained model.

    encoder     of histories
    item_ID     float32[I, D]
    events_I    float32[I], by which a history without a known item is answered
    """

    encoder: SequenceEncoder
    item_ID: Tensor
    events_I: Float32

    @property
    def bytes(self) -> int:
        """Of what answering needs."""
        tensors = [self.item_ID, *self.encoder.parameters()]
        return self.events_I.nbytes + sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def rank(self, histories: Sequence[Int64], m: int, exclude_seen: bool) -> Int64:
        """int64[B, M = m]: items by inner product, ties by the lower row; the most popular for a history without a known item."""
        return best_of_all(self._scores, len(self.item_ID), histories, m, exclude_seen)

    @torch.inference_mode()
    def _scores(self, histories: Sequence[Int64]) -> Float32:
        """float32[B, I]."""
        length = len(self.encoder.position_TD)
        known = [history[history >= 0][-length:] for history in histories]
        score_BI = np.empty((len(known), len(self.item_ID)), np.float32)
        order = sorted(range(len(known)), key=lambda query: len(known[query]))
        while order and len(known[order[0]]) == 0:
            score_BI[order.pop(0)] = self.events_I
        while order:  # the longest first: as many as their padded places allow
            longest = len(known[order[-1]])
            part = order[-max(1, PLACES // longest) :]
            del order[-len(part) :]
            history_BT = np.full((len(part), longest), -1, np.int64)
            for row_T, query in zip(history_BT, part, strict=True):
                row_T[: len(known[query])] = known[query]
            if history_BT.max() >= len(self.item_ID):
                raise InvalidData("histories", int(history_BT.max()), f"item rows below {len(self.item_ID)}")
            state_BTD = self.encoder(self.item_ID[torch.from_numpy(history_BT).clamp(min=0)])
            last_B = torch.tensor([len(known[query]) - 1 for query in part])
            score_BI[part] = (state_BTD[torch.arange(len(part)), last_B] @ self.item_ID.T).numpy()
        return score_BI
