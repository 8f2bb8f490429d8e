"""SASRec's configuration, its training and its trained model, which answers by inner product with every item.

Every place of a list predicts the next item. Validation queries choose the weights. Knows lists, losses and the task's metric. Does not
know which configurations are tried.

Legend: B queries or sequences, T places, N predicted places of a batch, I items, D width, M results.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, count, islice, pairwise
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from espalier.arrays import Float32, Int64
from espalier.search import padded

from ..baselines.proposal import Proposal
from ..data.user_item_matrix import events_of_items
from ..deep.directed_start import followers
from ..deep.optimiser import AVERAGE_EVERY, averaged_over
from ..deep.scorers.row_table import RowTable
from ..deep.scorers.transformer import Dropout, SequenceEncoder
from ..deep.sequence.batches import SequenceBatch, SequenceSource
from ..deep.sequence.blocked_softmax import positions_in, softmax_loss
from ..retrieval.scores import best_of_all
from ..retrieval.task import Deadline, Task
from ..trees.embeddings import item_embeddings, spread_unseen

log = logging.getLogger(__name__)


PLACES = 1 << 13
"""Most places of histories encoded at a time; at least one history is."""
STEPS = 1000
"""Most steps between two measurements on validation queries."""
ROUNDS = 20
"""About the rounds of a fit until its figure has stopped rising. `steps_of` counts the steps of so many."""
VALIDATION_QUERIES = 5000
ANNEALED = 0.25
"""Rounds, or time, in which the learning rate falls to 0, as a share of those before."""


@dataclass(frozen=True)
class SasRecConfig:
    """The configuration of the model and of its training.

    width, layers, heads  of the encoder
    length         most items of a history; the last ones count
    dropout        share of the encoder's inputs, and of each sublayer's output, that is 0 in training
    loss           `full` softmax, or `sampled`
    negatives      sampled: draws per batch, with replacement, from a mixture, half uniform and half by popularity
    places         places of a batch
    init           initial item table: `random`, or `embeddings` of which item follows which, as for a tree's transformer; of lists without
                   an order, of which user touched which item
    init_std       its root mean square
    learning_rate  of Adam, after `warm_steps` in which it rises linearly
    weight_decay   of all weights, decoupled (AdamW)
    average        steps of the exponential average of weights, which is measured and kept
    patience       rounds without a better figure after which the learning rate begins to fall
    max_rounds     rounds after which it begins to fall in any case
    bfloat16       whether matrix products of training use bfloat16; weights, losses and answers stay float32
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
    events_I    float32[I]: scores for a history without a known item
    """

    encoder: SequenceEncoder
    item_ID: Tensor
    events_I: Float32

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that answers need."""
        tensors = [self.item_ID, *self.encoder.parameters()]
        return self.events_I.nbytes + sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def rank(self, histories: Sequence[Int64], m: int, exclude_seen: bool) -> Int64:
        """int64[B, M = m]: items by inner product, ties by the lower row; the most popular for a history without a known item."""
        return best_of_all(self._scores, len(self.item_ID), histories, m, exclude_seen)

    @torch.inference_mode()
    def _scores(self, histories: Sequence[Int64]) -> Float32:
        length = self.encoder.length
        known_items = [history[history >= 0][-length:] for history in histories]
        score_BI = np.empty((len(known_items), len(self.item_ID)), np.float32)
        order = sorted(range(len(known_items)), key=lambda query: len(known_items[query]))
        while order and len(known_items[order[0]]) == 0:
            score_BI[order.pop(0)] = self.events_I
        while order:  # longest first, as many as fit in PLACES with padding
            longest = len(known_items[order[-1]])
            part = order[-max(1, PLACES // longest) :]
            del order[-len(part) :]
            history_BT = padded([known_items[query] for query in part])
            state_BTD = self.encoder(self.item_ID[torch.from_numpy(history_BT).clamp(min=0)])
            last_B = torch.tensor([len(known_items[query]) - 1 for query in part])
            score_BI[part] = (state_BTD[torch.arange(len(part)), last_B] @ self.item_ID.T).numpy()
        return score_BI


class Network(nn.Module):
    def __init__(self, item_ID: Tensor, config: SasRecConfig) -> None:
        super().__init__()
        self.item_ID = nn.Parameter(item_ID)
        self.table = RowTable(self.item_ID, len(item_ID))
        self.encoder = SequenceEncoder(config.width, config.layers, config.heads, config.length)

    def forward(self, history_BT: Tensor, dropout: Dropout | None = None) -> Tensor:
        """int64[B, T], −1 = padding behind → states [B, T, D]."""
        state_BTD: Tensor = self.encoder(self.table.lookup(history_BT.clamp(min=0)), dropout)
        return state_BTD

    def add_gradients(self) -> None:
        """Add the gradients of looked-up rows to those of the item table."""
        places_R, gradient_RD = self.table.gradients()
        if self.item_ID.grad is None:
            self.item_ID.grad = torch.zeros_like(self.item_ID)
        self.item_ID.grad.index_add_(0, places_R, gradient_RD)


class Training:
    """One fit. A round is an epoch, or STEPS steps if that is less, and then the figure of the averaged weights.

    When the figure has stopped rising, training goes on from the best weights while the learning rate falls linearly to 0.
    """

    def __init__(self, task: Task, config: SasRecConfig, start_ID: Tensor) -> None:
        lists, users = task.split.lists, task.split.train
        self.task, self.config, self.pairs = task, config, task.validation_pairs(VALIDATION_QUERIES)
        self.source = SequenceSource(lists, users, config.length, config.places, task.seed)
        self.events_I = events_of_items(lists, users).astype(np.float32)
        torch.manual_seed(task.seed)
        self.network = Network(start_ID.clone(), config)
        self.averaged = averaged_over(config.average, self.network)
        self.best_model = self.copied()
        self.generator = torch.Generator().manual_seed(task.seed)
        self.dropout = Dropout(config.dropout, self.generator)
        share_I = self.events_I / max(1.0, float(self.events_I.sum())) + 1 / len(self.events_I)
        self.proposal = Proposal(share_I.astype(np.float64), torch.device("cpu"))
        self.optimiser = torch.optim.AdamW(
            self.network.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=config.weight_decay, fused=True
        )
        self.batches = self._endless()
        self.step = 0
        self.curve: list[float] = []
        self.begin_s = task.clock()
        self.rounds_left: int | None = None
        self.steps_left = self.falling_steps = 1

    def _endless(self) -> Iterator[tuple[SequenceBatch, bool]]:
        """Batches of epoch after epoch, and whether each is the last of its epoch."""
        for number in count():
            for batch, following in pairwise(chain(self.source.epoch(number), [None])):
                if batch is not None:
                    yield batch, following is None

    @property
    def best(self) -> float:
        return max(self.curve, default=-math.inf)

    @property
    def is_over(self) -> bool:
        return self.rounds_left == 0

    @property
    def has_stopped_rising(self) -> bool:
        """Whether the figure has not risen for `patience` rounds, or `max_rounds` are over."""
        behind = len(self.curve) - 1 - self.curve.index(self.best)
        return behind >= self.config.patience or len(self.curve) >= self.config.max_rounds

    def anneal(self) -> None:
        """Return to the best weights. From now on the learning rate falls."""
        weights = {"item_ID": self.best_model.item_ID}
        weights |= {f"encoder.{name}": value for name, value in self.best_model.encoder.state_dict().items()}
        for network in (self.network, self.averaged.module):
            network.load_state_dict(weights)
        self.rounds_left = max(1, round(ANNEALED * len(self.curve)))
        self.steps_left = self.falling_steps = 1 + self.rounds_left * self.step // len(self.curve)

    def round(self, deadline: Deadline) -> None:
        """Train for a round, or until the deadline, and measure. `best_model` has the best weights."""
        losses: list[Tensor] = []
        for batch, is_last in islice(self.batches, STEPS):
            losses.append(self.update(batch))
            if is_last or deadline.is_over():
                break
        self.averaged.update_parameters(self.network)
        loss = float(torch.stack(losses).mean())
        if not math.isfinite(loss):
            raise FloatingPointError(f"step {self.step}: the loss is {loss}; lower learning_rate (now {self.config.learning_rate})")
        candidate = self.copied()
        figure = self.task.measured(candidate.rank, self.pairs)
        if figure > self.best:
            self.best_model = candidate
        self.curve.append(figure)
        if self.rounds_left is not None:
            self.rounds_left -= 1
        elif self.has_stopped_rising or deadline.left_s() <= ANNEALED * (self.task.clock() - self.begin_s):
            self.anneal()
        log.info("  step %d: loss %.4f, validation %s %.4f", self.step, loss, self.task.metric, figure)

    def update(self, batch: SequenceBatch) -> Tensor:
        """Make one step and return its loss."""
        config, network = self.config, self.network
        for group in self.optimiser.param_groups:
            warm_share = min(1.0, (self.step + 1) / max(1, config.warm_steps))
            group["lr"] = config.learning_rate * warm_share * max(0, self.steps_left) / self.falling_steps
        target_BT = torch.from_numpy(batch.target_BT)
        is_target_BT = target_BT >= 0
        self.optimiser.zero_grad(set_to_none=False)  # new arrays of the item table's size take longer than old ones
        with torch.autocast("cpu", torch.bfloat16, enabled=config.bfloat16):
            state_BTD = network(torch.from_numpy(batch.history_BT), self.dropout)
        state_ND, target_N = state_BTD[is_target_BT], target_BT[is_target_BT]
        state_ND = state_ND.bfloat16() if config.bfloat16 else state_ND
        target_ND = network.table.lookup(target_N)
        if config.loss == "full":
            loss = softmax_loss(state_ND, target_ND, network.item_ID, target_N)
        else:
            negative_S, log_weight_S = self.proposal.draw(config.negatives, self.generator)
            target_position_N = positions_in(target_N, negative_S)
            loss = softmax_loss(state_ND, target_ND, network.table.lookup(negative_S), target_position_N, log_weight_S)
        loss.backward()
        network.add_gradients()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        self.optimiser.step()
        self.step += 1
        self.steps_left -= int(self.rounds_left is not None)
        if self.step % AVERAGE_EVERY == 0:
            self.averaged.update_parameters(network)
        return loss.detach()

    def copied(self) -> SasRec:
        network = cast(Network, deepcopy(self.averaged.module)).requires_grad_(False).eval()
        return SasRec(network.encoder, network.item_ID.detach(), self.events_I)


def steps_of(task: Task, config: SasRecConfig) -> int:
    """The steps of ROUNDS rounds on this log."""
    events = int(np.diff(task.split.lists.offset_U1)[task.split.train].sum())
    return ROUNDS * max(1, min(STEPS, events // config.places))


def start_table(task: Task, config: SasRecConfig) -> Tensor:
    """float32[I, D]: the initial item table. For a large log its embeddings take minutes, and ignore the deadline."""
    generator = torch.Generator().manual_seed(task.seed)
    lists, users = task.split.lists, task.split.train
    table_ID = torch.randn(lists.item_count, config.width, generator=generator)
    if config.init == "embeddings":
        width = max(1, min(config.width, len(users) - 1, lists.item_count - 1))
        table_ID *= 1 / math.sqrt(config.width)
        has_order = lists.order != "none"
        learned_ID = followers(lists, users, width, task.seed) if has_order else item_embeddings(lists, users, width, seed=task.seed)
        embeddings_ID = spread_unseen(learned_ID, lists.category_of_item_I, seed=task.seed)
        table_ID[:, :width] = nn.functional.normalize(torch.from_numpy(embeddings_ID))
    return table_ID * config.init_std / table_ID.square().mean().sqrt()
