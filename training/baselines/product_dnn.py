"""YouTube's product-DNN (Covington et al. 2016), the two-tower baseline of TDM, JTM and OTM: softmax over the catalogue, inner product.

Knows histories, items and two tables of item vectors. Does not know trees. The network's input is that of our node scorers, the averaged
windows of a history, over its own input table. Its output is the user vector. Items have vectors and biases in an output table.

    P(i | x) = softmax_i(s_i),   s_i = ⟨u(x), v_i⟩ + b_i

A fit is a function of configuration, seed and data: batch, dropout and negatives of step s come from (seed, s). It learns from training
users only; validation users choose the step whose weights are kept.

Legend: B queries, T history, W windows, P targets, I items, E input width, D vector width, F features, M results.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from espalier.arrays import Float32, Int64
from espalier.errors import InvalidData
from espalier.queries import HistoryKind, pad_histories

from ..baselines.proposal import Proposal
from ..data.interactions import Interactions
from ..data.splits import EvaluationPair, Split, without_seen
from ..data.user_item_matrix import events_of_items
from ..deep.fit import computes_in_bfloat16
from ..deep.instances import InstanceSource
from ..deep.optimiser import AVERAGE_EVERY, averaged_over
from ..deep.scorers.encoders import WindowEncoder
from ..deep.scorers.heads import dropped
from ..deep.sequence.blocked_softmax import mean_log_sum, positions_in
from ..retrieval.needs import Needs, of_steps, seconds_each
from ..retrieval.scores import best_of_all
from ..retrieval.task import NO_DEADLINE, Deadline, Fitted, Metric, Task, Trial
from ..specification.deep import InstanceConfig
from ..trees.embeddings import item_embeddings, spread_unseen

log = logging.getLogger(__name__)


VALIDATION_QUERIES = 2000
TIMED_QUERIES = 50
WHOLE_ITEMS = 50_000
"""Most items for the whole softmax: a step then takes a fraction of a second."""


@dataclass(frozen=True)
class ProductDnnConfig:
    """The configuration of the network and of its training.

    instances      how users become instances, as for trees; with several targets the loss is the cross-entropy against their uniform
                   distribution
    input_dim      width of the input table
    hidden         layers between the windows and the user vector
    dim            width of the user vector and of the output table
    dropout        share of each dense layer's inputs that is set to 0 in training
    init           initial values of both tables: `embeddings`, the co-occurrence embeddings that trees start from, or `random`
    init_std       their root mean square
    average        steps of the exponential average of weights, which is measured and kept, as for trees
    loss           `full` softmax over the catalogue, or `sampled`
    negatives      sampled: draws per batch, all items alike, with replacement
    learning_rate  of Adam, at the first step; it falls linearly to 0 at `max_steps`
    round_steps    steps between two measurements on validation users
    patience       rounds without a better figure after which training ends
    metric         figure of validation queries that chooses the step
    exclude_seen   whether answers leave out the items of the history
    bfloat16       whether matrix products run in it, as `training.deep.fit.use_bfloat16` decides for trees; weights and losses stay float32
    """

    instances: InstanceConfig = field(default_factory=lambda: InstanceConfig(targets=1))
    input_dim: int = 128
    hidden: tuple[int, ...] = (256,)
    dim: int = 128
    dropout: float = 0.3
    init: Literal["embeddings", "random"] = "embeddings"
    init_std: float = 0.3
    average: int = 200
    loss: Literal["sampled", "full"] = "sampled"
    negatives: int = 2000
    batch: int = 256
    learning_rate: float = 2e-3
    max_steps: int = 4000
    round_steps: int = 200
    patience: int = 5
    metric: Metric = field(default_factory=lambda: Metric("recall", 200))
    exclude_seen: bool = True
    bfloat16: bool = False


@dataclass(frozen=True)
class ProductDnn:
    """A trained model in NumPy, so that a single query has no framework overhead.

    windows        history window lengths, old to recent
    input_IE       float32[I, E], the input table
    layers         (float32[in, out], float32[out]) of each dense layer; ReLU between them
    item_vectors   float32[I, D], contiguous; the last number of each is its bias
    curve          (step, validation figure) of every round
    """

    windows: tuple[int, ...]
    input_IE: Float32
    layers: tuple[tuple[Float32, Float32], ...]
    item_vectors: Float32
    curve: tuple[tuple[int, float], ...] = ()

    def user_vectors(self, histories: Sequence[Int64]) -> Float32:
        """float32[B, D], the last number of each is 1, so that ⟨user, item⟩ has the bias in it.

        histories  item rows, oldest first; entries below 0 (unknown items) are skipped
        """
        history_BT = pad_histories(HistoryKind(length=sum(self.windows)), histories).array
        start_W = np.cumsum((0, *self.windows[:-1]))
        present_BT = history_BT >= 0
        rows_BTE = self.input_IE[history_BT]
        rows_BTE[~present_BT] = 0
        count_BW: NDArray[np.floating] = np.maximum(np.add.reduceat(present_BT, start_W, axis=1, dtype=np.float32), 1)
        hidden_BF: Float32 = (np.add.reduceat(rows_BTE, start_W, axis=1) / count_BW[:, :, None]).reshape(len(history_BT), -1)
        for number, (weight, bias) in enumerate(self.layers):
            hidden_BF = (np.maximum(hidden_BF, 0) if number else hidden_BF) @ weight + bias
        return np.concatenate([hidden_BF, np.ones((len(hidden_BF), 1), np.float32)], axis=1)

    @property
    def bytes(self) -> int:
        """Bytes of the arrays that answers need."""
        return self.input_IE.nbytes + self.item_vectors.nbytes + sum(weight.nbytes + bias.nbytes for weight, bias in self.layers)

    def rank(self, histories: Sequence[Int64], m: int, exclude_seen: bool) -> Int64:
        """int64[B, M = m]: items by inner product, ties by the lower row, without the history's own when `exclude_seen`.

        NO_ITEM fills the row where fewer than m items are left.
        """
        return best_of_all(lambda part: self.user_vectors(part) @ self.item_vectors.T, len(self.item_vectors), histories, m, exclude_seen)


def product_dnn(task: Task) -> Fitted:
    """Train with the whole softmax, or with the sampled one if the catalogue has more than WHOLE_ITEMS items.

    Instances have one target, or as many as the task's. If these differ, both are trained, each in half of the time, and validation queries
    choose.
    """
    begin, deadline = time.monotonic(), task.deadline()
    fits, shares = [], []
    configs = configurations(task)
    for number, config in enumerate(configs):
        model = fit_product_dnn(task.split, config, seed=task.seed, deadline=deadline.part(len(configs) - number))
        options = asdict(config) | {"instances": config.instances.model_dump(mode="json")}
        fits.append((model, max(figure for _, figure in model.curve), options))
        shares.append(1.0 if _behind(model.curve) >= config.patience else model.curve[-1][0] / config.max_steps)
    best, _, options = max(fits, key=lambda fit: fit[1])
    steps, share = sum(config.max_steps for config in configs), sum(shares) / len(shares)
    return Fitted(
        rank=best.rank,
        options=options,
        trials=[Trial(options, figure) for _, figure, options in fits],
        bytes=best.bytes,
        seconds=time.monotonic() - begin,
        ended=None if share == 1 else f"{round(share * steps):,} of {steps:,} steps",
        share=share,
    )


def configurations(task: Task) -> list[ProductDnnConfig]:
    """The configurations with one target an instance, and with the task's number if that is another one."""
    return [
        ProductDnnConfig(
            instances=task.instances.model_copy(update={"targets": targets}),
            loss="full" if task.split.lists.item_count <= WHOLE_ITEMS else "sampled",
            metric=task.metric,
            exclude_seen=task.exclude_seen,
            bfloat16=computes_in_bfloat16(torch.device("cpu")),
        )
        for targets in sorted({1, task.instances.targets})
    ]


def needs(task: Task) -> Needs:
    """The needs of the steps and measurements of all configurations. Timed with random tables, which take no time to make."""
    configs, split = configurations(task), task.split
    config = replace(configs[-1], init="random")
    network = build_network(split.lists, split.train, config, task.seed)
    source = InstanceSource(split.lists, split.train, config.instances, task.seed)
    proposal = Proposal(np.ones(split.lists.item_count), torch.device("cpu"))
    optimiser = torch.optim.Adam(network.parameters(), lr=config.learning_rate, fused=True)
    step_s = seconds_each(lambda: float(_train_step(network, source, optimiser, proposal, config, task.seed, 0)), task.clock)
    pairs, timed = task.validation_pairs(VALIDATION_QUERIES), task.validation_pairs(TIMED_QUERIES)
    query_s = seconds_each(lambda: _figure(network.frozen(), timed, config), task.clock) / len(timed)
    steps = len(configs) * config.max_steps
    return of_steps(0.0, step_s + query_s * len(pairs) / config.round_steps, steps)


def fit_product_dnn(
    split: Split,
    config: ProductDnnConfig,
    *,
    seed: int,
    deadline: Deadline = NO_DEADLINE,
) -> ProductDnn:
    """A model trained on `split.train`, with the weights of the round with the best figure on at most 2,000 queries of `split.validation`.

    A deadline ends training with a last measurement. The learning rate falls linearly to 0 at `max_steps`, or at an earlier deadline.

    Raises InvalidData if there is no validation query, FloatingPointError if a loss is not finite.
    """
    interactions = split.lists
    pairs = without_seen(split.validation) if config.exclude_seen else list(split.validation)
    pairs = pairs[:: max(1, -(-len(pairs) // VALIDATION_QUERIES))]
    if not pairs:
        raise InvalidData("split.validation", f"{len(split.validation)} users", "at least one with a query and something relevant")
    device = torch.device("cpu")
    seconds = deadline.left_s()
    network = build_network(interactions, split.train, config, seed).to(device)
    proposal = Proposal(np.ones(interactions.item_count), device)
    source = InstanceSource(interactions, split.train, config.instances, seed)
    optimiser = torch.optim.Adam(network.parameters(), lr=config.learning_rate, fused=True)
    averaged = averaged_over(config.average, network)
    averaged_network = cast(Network, averaged.module)
    curve: list[tuple[int, float]] = []
    best = network.frozen()
    with tqdm(total=config.max_steps, unit="step", desc="product-dnn", mininterval=1.0, disable=None) as bar:
        for step in range(config.max_steps):
            time_left = 1.0 if math.isinf(seconds) else deadline.left_s() / max(seconds, 1e-9)
            for group in optimiser.param_groups:
                group["lr"] = config.learning_rate * min(time_left, 1 - step / config.max_steps)
            loss = _train_step(network, source, optimiser, proposal, config, seed, step)
            bar.update()
            is_last = step + 1 == config.max_steps or deadline.is_over()
            is_measured = (step + 1) % config.round_steps == 0 or is_last
            if is_measured or (step + 1) % AVERAGE_EVERY == 0:
                averaged.update_parameters(network)
            if not is_measured:
                continue
            if not math.isfinite(float(loss)):
                raise FloatingPointError(f"step {step}: the loss is {float(loss)}; lower learning_rate (now {config.learning_rate})")
            frozen = averaged_network.frozen()
            curve.append((step + 1, _figure(frozen, pairs, config)))
            log.info("step %d: loss %.4f, validation %s %.4f", step + 1, float(loss), config.metric, curve[-1][1])
            behind = _behind(curve)
            if behind == 0:
                best = frozen
            if is_last or behind >= config.patience:
                break
    return replace(best, curve=tuple(curve))


def _behind(curve: Sequence[tuple[int, float]]) -> int:
    """Rounds since the best one; of equal ones the first."""
    return len(curve) - 1 - max(range(len(curve)), key=lambda round_: (curve[round_][1], -round_))


def _train_step(
    network: Network,
    source: InstanceSource,
    optimiser: torch.optim.Optimizer,
    proposal: Proposal,
    config: ProductDnnConfig,
    seed: int,
    step: int,
) -> Tensor:
    """Make one batch and one update. Returns the loss, which the caller reads once a round."""
    device = network.item_ID.device
    instances = source.batch(step, config.batch)
    history_BT, target_BP = (torch.from_numpy(array).to(device) for array in (instances.query, instances.target_BP))
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + step)
    optimiser.zero_grad()
    with torch.autocast(device.type, torch.bfloat16, enabled=config.bfloat16):
        user_BD = network(history_BT, generator)
    negatives = None if config.loss == "full" else proposal.draw(config.negatives, generator)
    loss = targets_loss(user_BD, network.item_ID, network.bias_I, target_BP, negatives)
    loss.backward()
    optimiser.step()
    return loss.detach()


def targets_loss(
    user_BD: Tensor, item_ID: Tensor, bias_I: Tensor, target_BP: Tensor, negatives: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """The mean over instances of log Σ_i exp(s_i) − mean_{p ∈ targets} s_p: cross-entropy against the uniform distribution of the targets.

    user_BD    float32 or bfloat16, in which products then run
    target_BP  int64[B, P], −1 = none behind the first; a repeated target counts as often as it occurs
    negatives  as `Proposal.draw` returns them, from which the sum is estimated; None: the sum is over all items
    """
    row_BP, is_target_BP = target_BP.clamp(min=0), target_BP >= 0
    positive_BP = (item_ID[row_BP] * user_BD.float().unsqueeze(1)).sum(-1) + bias_I[row_BP]
    if negatives is None:
        log_sum = mean_log_sum(user_BD, item_ID, bias_I)
    else:
        negative_S, log_weight_S = negatives
        own_B = positions_in(row_BP[:, 0].contiguous(), negative_S)
        log_sum = mean_log_sum(user_BD, item_ID[negative_S], bias_I[negative_S] + log_weight_S, positive_BP[:, 0], own_B)
    return log_sum - (torch.where(is_target_BP, positive_BP, 0).sum(1) / is_target_BP.sum(1)).mean()


def _figure(model: ProductDnn, pairs: Sequence[EvaluationPair], config: ProductDnnConfig) -> float:
    found_BM = model.rank([pair.history for pair in pairs], config.metric.m, config.exclude_seen)
    return float(config.metric.of(found_BM, pairs).mean())


class Network(nn.Module):
    """The trained network: input_IE, dense layers, item_ID and bias_I."""

    def __init__(self, input_IE: Tensor, item_ID: Tensor, bias_I: Tensor, config: ProductDnnConfig) -> None:
        super().__init__()
        self.windows, self.dropout = config.instances.windows, config.dropout
        self.encoder = WindowEncoder(self.windows, input_IE.shape[1])
        self.input_IE, self.item_ID = nn.Parameter(input_IE), nn.Parameter(item_ID)
        self.bias_I = nn.Parameter(bias_I)
        widths = (self.encoder.features, *config.hidden, item_ID.shape[1])
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))

    def forward(self, history_BT: Tensor, generator: torch.Generator) -> Tensor:
        """history_BT int64[B, T], −1 = padding → user vectors [B, D], without the constant 1 of `ProductDnn.user_vectors`."""
        hidden_B1F: Tensor = self.encoder(history_BT.unsqueeze(1), self.input_IE)
        for number, layer in enumerate(self.layers):
            hidden_B1F = layer(dropped(torch.relu(hidden_B1F) if number else hidden_B1F, self.dropout, generator))
        return hidden_B1F.squeeze(1)

    def frozen(self) -> ProductDnn:
        layers = tuple((_array(layer.weight.T), _array(layer.bias)) for layer in self.layers if isinstance(layer, nn.Linear))
        item_ID = torch.cat([self.item_ID, self.bias_I.unsqueeze(1)], 1)
        return ProductDnn(self.windows, _array(self.input_IE), layers, _array(item_ID))


def build_network(interactions: Interactions, users: Int64, config: ProductDnnConfig, seed: int) -> Network:
    """A network with seeded initial weights; biases start at the log of the items' popularity among `users`."""
    torch.manual_seed(seed)
    width = max(config.input_dim, config.dim)
    start_ID = torch.randn(interactions.item_count, width) / math.sqrt(width)  # about as long as the embeddings
    if config.init == "embeddings":
        embedding_width = max(1, min(width, len(users) - 1, interactions.item_count - 1))
        learned_ID = item_embeddings(interactions, users, embedding_width, seed=seed)
        embeddings_ID = spread_unseen(learned_ID, interactions.category_of_item_I, seed=seed)
        start_ID[:, :embedding_width] = nn.functional.normalize(torch.from_numpy(embeddings_ID))
    input_IE, item_ID = (
        start_ID[:, :dim] * config.init_std / start_ID[:, :dim].square().mean().sqrt() for dim in (config.input_dim, config.dim)
    )
    bias_I = torch.from_numpy(events_of_items(interactions, users) + 1).log().float()
    return Network(input_IE, item_ID, bias_I - bias_I.mean(), config)


def _array(tensor: Tensor) -> Float32:
    return tensor.detach().cpu().numpy().astype(np.float32, order="C")
