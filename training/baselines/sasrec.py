"""SASRec (Kang & McAuley 2018, arXiv 1808.09781) with a softmax over the whole catalogue, or over thousands of shared negatives.

Knows lists, items and a sequence encoder. Does not know trees. Every place of a list predicts the next item; the published binary loss with
one negative is most of what SASRec lacked (Klenitskiy & Vasilev 2023, arXiv 2309.07602). One table holds the items that are read and those
that are predicted. Answers are searched exactly.

    P(i | history) = softmax_i ⟨h, v_i⟩,   h = the encoder's state at the last item

A fit is a function of task, configuration and seed.

Legend: B queries, T places, N predicted places of a batch, I items, D width, M results.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from itertools import chain, count, islice, pairwise
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from espalier.errors import InvalidConfig, InvalidData
from training.baselines.blocked_softmax import sampled_loss, whole_softmax_loss
from training.baselines.sampled_softmax import Proposal
from training.baselines.scores import best_of_all
from training.baselines.sequence_batches import SequenceBatch, SequenceSource
from training.baselines.sequence_encoder import Dropout, SequenceEncoder
from training.baselines.task import Deadline, Fitted, Task, Trial
from training.data.user_item_matrix import events_of_items
from training.deep.averaging import AVERAGE_EVERY, averaged_over
from training.deep.fit import computes_in_bfloat16
from training.trees.embeddings import item_embeddings, spread_unseen

log = logging.getLogger(__name__)

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]

PLACES = 1 << 13
"""Places of histories that are encoded at a time; at least one history."""
STEPS = 1000
"""Most steps between two measurements on validation queries."""
VALIDATION_QUERIES = 5000
WHOLE_ITEMS = 10_000
"""Most items for which the whole softmax is the default: then it costs about what the encoder does."""
MAX_BYTES = 8 << 30
"""Most that item tables may take in training."""
FEW_EVENTS = 50
"""Events an item below which the stronger dropout is tried first."""


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
    patience: int = 6
    max_rounds: int = 200
    bfloat16: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "length", "negatives", "places", "average", "patience", "max_rounds"):
            if getattr(self, name) < 1:
                raise InvalidConfig(name, getattr(self, name), "at least 1")
        for name in ("init_std", "learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidConfig(name, getattr(self, name), "a positive number")
        for name, most in (("dropout", 1.0), ("weight_decay", math.inf), ("warm_steps", math.inf)):
            if not 0 <= getattr(self, name) < most:
                raise InvalidConfig(name, getattr(self, name), f"at least 0 and below {most:g}")
        for name, known in (("loss", ("full", "sampled")), ("init", ("embeddings", "random"))):
            if getattr(self, name) not in known:
                raise InvalidConfig(name, getattr(self, name), " or ".join(known))


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


# -- training -------------------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """What is trained."""

    def __init__(self, item_ID: Tensor, config: SasRecConfig) -> None:
        super().__init__()
        self.item_ID = nn.Parameter(item_ID)
        self.encoder = SequenceEncoder(config.width, config.layers, config.heads, config.length)

    def forward(self, history_BT: Tensor, dropout: Dropout | None = None) -> Tensor:
        """int64[B, T], −1 = padding behind → states [B, T, D]."""
        state_BTD: Tensor = self.encoder(nn.functional.embedding(history_BT.clamp(min=0), self.item_ID), dropout)
        return state_BTD


class Training:
    """One fit, round by round: an epoch, or STEPS steps where that is less, then the figure of the averaged weights."""

    def __init__(self, task: Task, config: SasRecConfig) -> None:
        lists, users = task.split.lists, task.split.train
        self.task, self.config, self.pairs = task, config, task.validation_pairs(VALIDATION_QUERIES)
        self.source = SequenceSource(lists, users, config.length, config.places, task.seed)
        self.events_I = events_of_items(lists, users).astype(np.float32)
        torch.manual_seed(task.seed)
        self.network = Network(start_table(task, config), config)
        self.averaged = averaged_over(config.average, self.network)
        self.kept = self._copied()
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
        """Whether the figure has not risen for `patience` rounds, or `max_rounds` are over."""
        behind = len(self.curve) - 1 - self.curve.index(self.best) if self.curve else 0
        return behind >= self.config.patience or len(self.curve) >= self.config.max_rounds

    def round(self, deadline: Deadline) -> None:
        """Train for a round, or until the deadline, and measure; the best weights are kept."""
        losses: list[Tensor] = []
        for batch, last in islice(self.batches, STEPS):
            losses.append(self._step(batch))
            if last or deadline.is_over():
                break
        self.averaged.update_parameters(self.network)
        loss = float(torch.stack(losses).mean())
        if not math.isfinite(loss):
            raise FloatingPointError(f"step {self.step}: the loss is {loss}; lower learning_rate (now {self.config.learning_rate})")
        now = self._copied()
        figure = self.task.measured(now.rank, self.pairs)
        if figure > self.best:
            self.kept = now
        self.curve.append(figure)
        log.info("  step %d: loss %.4f, validation %s %.4f", self.step, loss, self.task.metric, figure)

    def _step(self, batch: SequenceBatch) -> Tensor:
        config, network = self.config, self.network
        for group in self.optimiser.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (self.step + 1) / max(1, config.warm_steps))
        target_BT = torch.from_numpy(batch.target_BT)
        real_BT = target_BT >= 0
        self.optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=config.bfloat16):
            state_BTD = network(torch.from_numpy(batch.history_BT), self.dropout)
        state_ND, target_N = state_BTD[real_BT], target_BT[real_BT]
        state_ND = state_ND.bfloat16() if config.bfloat16 else state_ND
        if config.loss == "full":
            loss = whole_softmax_loss(state_ND, network.item_ID, target_N)
        else:
            loss = sampled_loss(state_ND, network.item_ID, target_N, *self.proposal.draw(config.negatives, self.generator))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        self.optimiser.step()
        self.step += 1
        if self.step % AVERAGE_EVERY == 0:
            self.averaged.update_parameters(network)
        return loss.detach()

    def _copied(self) -> SasRec:
        """The averaged weights as a model."""
        network = cast(Network, deepcopy(self.averaged.module)).requires_grad_(False).eval()
        return SasRec(network.encoder, network.item_ID.detach(), self.events_I)


def start_table(task: Task, config: SasRecConfig) -> Tensor:
    """float32[I, D]: the items before training, from torch's generator as it stands."""
    lists, users = task.split.lists, task.split.train
    table_ID = torch.randn(lists.item_count, config.width)
    if config.init == "embeddings":
        known = max(1, min(config.width, len(users) - 1, lists.item_count - 1))
        table_ID *= 1 / math.sqrt(config.width)
        embeddings_ID = spread_unseen(item_embeddings(lists, users, known, seed=task.seed), lists.category_of_item_I, seed=task.seed)
        table_ID[:, :known] = nn.functional.normalize(torch.from_numpy(embeddings_ID))
    return table_ID * config.init_std / table_ID.square().mean().sqrt()


def fit_sasrec(task: Task, candidates: Sequence[SasRecConfig]) -> Fitted:
    """The best of some configurations by the task's metric, each with the weights of its best round.

    One after the other trains until its figure has stopped rising: with dropout a model that ends higher often starts lower, so none is
    given up early. A deadline ends the one that is trained; of the first at least one batch is.
    """
    begin, deadline = time.monotonic(), task.deadline()
    best: Training | None = None
    trials: list[Trial] = []
    ended: str | None = None
    for config in candidates:
        if best is not None and deadline.is_over():
            ended = ended or f"the deadline left no time for {len(candidates) - len(trials)} of {len(candidates)} configurations"
            break
        log.info("sasrec %s", config)
        training = Training(task, config)
        while not training.is_over and not (training.curve and deadline.is_over()):
            training.round(deadline)
        if not training.is_over:
            ended = f"training ended at its deadline after {training.step} steps of configuration {len(trials) + 1} of {len(candidates)}"
        trials.append(Trial(asdict(config), training.best))
        if best is None or training.best > best.best:
            best = training
    if best is None:
        raise InvalidConfig("candidates", candidates, "at least one")
    return Fitted(
        rank=best.kept.rank,
        options=asdict(best.config),
        trials=trials,
        bytes=best.kept.bytes,
        seconds=time.monotonic() - begin,
        ended=ended,
    )


def sasrec(task: Task) -> Fitted:
    """The whole softmax where the catalogue has at most WHOLE_ITEMS items, else the sampled one."""
    return _fitted(task, "full" if task.split.lists.item_count <= WHOLE_ITEMS else "sampled")


def sasrec_full(task: Task) -> Fitted:
    """Softmax over the catalogue, whatever it costs."""
    return _fitted(task, "full")


def sasrec_sampled(task: Task) -> Fitted:
    """Softmax over sampled negatives."""
    return _fitted(task, "sampled")


def _fitted(task: Task, loss: Literal["full", "sampled"]) -> Fitted:
    return fit_sasrec(task, grid(task, loss))


def grid(task: Task, loss: Literal["full", "sampled"]) -> list[SasRecConfig]:
    """Dropout 0.5 and 0.2: the one that suits the log's events an item first, since a deadline may leave no time for the other.

    The rest is by rule: histories as long as 19 of 20 lists, from 20 to 200 places; some 400 steps an epoch in batches of 1,024 to 4,096
    places; the width halved, down to 32, until training fits in MAX_BYTES. Raises InvalidData where it does not fit.
    """
    lists, users = task.split.lists, task.split.train
    length_U = np.diff(lists.offset_U1)[users]
    length = int(np.clip(np.quantile(length_U, 0.95), 20, 200)) if len(users) else 20
    width = next((width for width in (128, 64, 32) if _training_bytes(lists.item_count, width) <= MAX_BYTES), None)
    if width is None:
        needed = f"{lists.item_count} items, whose training takes {_training_bytes(lists.item_count, 32)} bytes at width 32"
        raise InvalidData("log", needed, f"at most {MAX_BYTES} bytes")
    sparse = length_U.sum() < FEW_EVENTS * lists.item_count
    common = SasRecConfig(
        width=width,
        length=length,
        loss=loss,
        places=int(np.clip(length_U.sum() // 400, 1024, 4096)),
        bfloat16=computes_in_bfloat16(torch.device("cpu")),
    )
    return [replace(common, dropout=dropout) for dropout in ((0.5, 0.2) if sparse else (0.2, 0.5))]


def _training_bytes(items: int, width: int) -> int:
    """Of the item table in training: itself, two gradients, two moments, the average, the best, and the average as it is measured."""
    return 8 * 4 * items * width
