"""Fits a node scorer to a tree: batches, objective, updates, checkpoints; in one process or several (parallel.py).

A run is a function of its configuration and data: batch and random nodes of step s come from (seed, s), so a run that was killed and
resumed ends as an uninterrupted one would.

Legend: B instances, T history, P targets.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

from espalier.errors import InvalidConfig
from espalier.tree import Tree
from training.data.user_item_matrix import events_of_items
from training.deep.instances import InstanceSource
from training.deep.objectives.otm import otm_loss, otm_no_bs_loss, otm_no_optest_loss
from training.deep.objectives.otm_robust import otm_robust_loss
from training.deep.objectives.plt import hsm_loss, plt_loss
from training.deep.objectives.tdm import tdm_loss
from training.deep.parallel import average, average_gradients, own_rows, process, processes, share_weights
from training.deep.prepare import Prepared, item_embeddings
from training.deep.scorers.heads import ProductHead
from training.deep.scorers.initial_rows import popularity_biases, rows_from_embeddings
from training.deep.scorers.model import NodeScorer, new_scorer
from training.deep.topology import Topology
from training.deep.validation import ranked_by, validation_pairs, validation_recall
from training.specification.deep import DeepConfig, Objective, PathObjective, TdmObjective

log = logging.getLogger(__name__)

Loss = Callable[[NodeScorer, Topology, Tensor, Tensor, Any, torch.Generator], Tensor]
LOSSES: dict[str, Loss] = {
    "otm-robust": otm_robust_loss,
    "otm": otm_loss,
    "otm-no-optest": otm_no_optest_loss,
    "otm-no-bs": otm_no_bs_loss,
    "tdm": tdm_loss,
    "plt": plt_loss,
    "hsm": hsm_loss,
}

Parts = Mapping[str, NodeScorer | AveragedModel | torch.optim.Optimizer]
"""What a checkpoint holds besides the progress."""

VALIDATION_QUERIES = 1000
FEWEST_VALIDATION_QUERIES = 30
"""With fewer, whose recall moves in steps, the first measurements would decide."""
CURVE = "curve.json"
"""Beside the checkpoint, when a run has ended: the validation recalls, the step whose weights were kept, and the steps made."""
AVERAGE_EVERY = 5
"""Steps between two updates of the averaged weights: one reads and writes all node rows."""
CHECKPOINT_EVERY = 500
"""Steps between checkpoints."""
READ_EVERY = 20
"""Steps between looks at the losses: reading one waits for the device."""


def pick_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device to train on. Raises InvalidConfig when a GPU was asked for and is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("--device", device, "cpu or auto, since no CUDA device is there")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def build_model(config: DeepConfig, tree: Tree, prepared: Prepared) -> NodeScorer:
    """The model at the start of training: seeded, its node rows from training users' co-occurrence, or all of it an earlier one's."""
    torch.manual_seed(config.seed)
    scorer = config.scorer
    model = new_scorer(scorer, config.instances.windows, tree.node_count)
    if scorer.init == "embeddings":
        biased = isinstance(model.head, ProductHead)  # then the last entry of a row is a bias
        embeddings_ID = item_embeddings(prepared, scorer.node_dim - biased, config.seed)
        rows_ND = rows_from_embeddings(tree, embeddings_ID, scorer.init_std)
        model.node_rows.data[:, : embeddings_ID.shape[1]] = torch.from_numpy(rows_ND)
        if biased:
            events_I = events_of_items(prepared.interactions, prepared.split.train)
            model.node_rows.data[:, -1] = torch.from_numpy(popularity_biases(tree, events_I, ranked_by(config)[1]))
    elif scorer.init == "earlier" and prepared.earlier is not None:
        model.load_state_dict(prepared.earlier.model.state_dict())
    return model


def fit(config: DeepConfig, prepared: Prepared, tree: Tree, device: torch.device, work: Path, resume: bool) -> NodeScorer:
    """Train and return the model (on `device`, and the same on every process).

    work    folder for the checkpoint and the validation curve, which process 0 writes and all read
    resume  go on from the checkpoint there, if there is one; its configuration and log must be the same

    Raises InvalidConfig for a batch that the processes cannot share alike, FloatingPointError when a loss or a weight is not finite.
    """
    if config.optimiser.batch % processes():
        raise InvalidConfig("optimiser.batch", config.optimiser.batch, f"a multiple of the {processes()} processes")
    model = build_model(config, tree, prepared).to(device)
    topology = Topology(tree, device)
    source = InstanceSource(prepared.interactions, prepared.split.train, config.instances, config.seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=config.optimiser.learning_rate, fused=True)
    checkpoint = work / "checkpoint.pt"
    averaged = AveragedModel(model, multi_avg_fn=partial(average_in, 1 - AVERAGE_EVERY / config.optimiser.average))
    parts: Parts = {"model": model, "averaged": averaged, "optimiser": optimiser}
    progress = _restore(checkpoint, _identity(config, prepared, tree), parts) if resume and checkpoint.exists() else Progress(0, [], {})
    if resume and progress.step == 0:
        log.info("no checkpoint to resume from: training starts anew")
    share_weights(model)
    steps, every = config.optimiser.steps, config.optimiser.validate_every
    pairs = validation_pairs(config, prepared, VALIDATION_QUERIES)
    if len(pairs) < FEWEST_VALIDATION_QUERIES:
        log.info("%d validation users are too few to choose weights by: those of the last step are kept", len(pairs))
        pairs = []
    losses: list[Tensor] = []
    begin, first = time.perf_counter(), progress.step
    with tqdm(total=steps, initial=first, unit="step", desc=config.name, mininterval=1.0, disable=process() > 0) as bar:
        while progress.step < steps and not progress.out_of_patience(config.optimiser.patience):
            losses.append(train_step(config, model, topology, source, optimiser, progress.step))
            progress.step += 1
            bar.update()
            last = progress.step == steps
            validate = bool(pairs) and (progress.step % every == 0 or last)
            save = progress.step % CHECKPOINT_EVERY == 0 or last
            if validate or save or len(losses) == READ_EVERY:
                loss = _read(config, losses, progress.step - 1)
                losses.clear()
                bar.set_postfix(loss=f"{loss:.3f}", recall=f"{progress.recalls[-1]:.4f}" if progress.recalls else "-", refresh=False)
            if validate or progress.step % AVERAGE_EVERY == 0:
                averaged.update_parameters(model)
            if validate:
                kept = cast(NodeScorer, averaged.module)
                recall = validation_recall(config, topology, kept, pairs)
                progress.add(float(average(torch.tensor(recall, device=device))), kept)
            save = save or progress.out_of_patience(config.optimiser.patience)
            if save and process() == 0:
                _save(checkpoint, _identity(config, prepared, tree), parts, progress)
    if progress.recalls:
        model.load_state_dict(progress.best)
        best, ending = max(progress.recalls), "" if progress.step < steps else "; all steps were used"
        log.info("validation recall@%d: %.4f at step %d of %d%s", config.search.m, best, progress.best_step(every), progress.step, ending)
    if process() == 0:
        curve = {"recalls": progress.recalls, "best_step": progress.best_step(every), "steps": progress.step}
        (work / CURVE).write_text(json.dumps(curve) + "\n")
    if not all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
        raise FloatingPointError(
            f"the trained weights are not finite; lower optimiser.learning_rate (now {config.optimiser.learning_rate})"
        )
    log.info("%d steps in %.1f s", progress.step - first, time.perf_counter() - begin)
    return model


@torch.no_grad()
def average_in(decay: float, averaged: Sequence[Tensor], current: Sequence[Tensor], times: Tensor) -> None:
    """averaged ← d · averaged + (1 − d) · current, with a decay d that grows to `decay` from 0.1: the start is forgotten soon."""
    warm = (1 + int(times)) / (10 + int(times))
    for mean, value in zip(averaged, current, strict=True):
        mean.lerp_(value, 1 - max(0.0, min(decay, warm)))


@dataclass
class Progress:
    """How far a run is: steps made, the validation recalls so far, and the weights of the best of them (the last at a tie)."""

    step: int
    recalls: list[float]
    best: dict[str, Tensor]

    def add(self, recall: float, model: NodeScorer) -> None:
        if recall >= max(self.recalls, default=-1.0):
            self.best = {name: values.detach().clone() for name, values in model.state_dict().items()}
        self.recalls.append(recall)

    def best_step(self, every: int) -> int:
        """The step whose weights are kept."""
        if not self.recalls:
            return self.step
        return min(self.step, every * (len(self.recalls) - self.recalls[::-1].index(max(self.recalls))))

    def out_of_patience(self, patience: int) -> bool:
        """Whether the last `patience` recalls were no better than what came before."""
        return len(self.recalls) > patience and max(self.recalls[-patience:]) <= max(self.recalls[:-patience])


def stage(config: DeepConfig, step: int) -> tuple[str, Objective]:
    """The kind and the objective of a step: `tdm` in a warm start, then the configured ones."""
    objective = config.objective
    if isinstance(objective, TdmObjective | PathObjective) or step >= round(objective.warm_start * config.optimiser.steps):
        return config.kind, objective
    return "tdm", TdmObjective(negatives=objective.negatives, negative_decay=objective.negative_decay)


def train_step(
    config: DeepConfig,
    model: NodeScorer,
    topology: Topology,
    source: InstanceSource,
    optimiser: torch.optim.Optimizer,
    step: int,
) -> Tensor:
    """One batch, of which this process takes its rows, and one update; returns the loss of those rows (a scalar on the device)."""
    device, (kind, objective) = topology.device, stage(config, step)
    instances = source.batch(step, config.optimiser.batch)
    own = own_rows(config.optimiser.batch)
    generator = torch.Generator(device).manual_seed(config.seed * 1_000_003 + step)
    for group in optimiser.param_groups:
        group["lr"] = config.optimiser.learning_rate * (1 - step / config.optimiser.steps)
    optimiser.zero_grad()
    with torch.autocast(device.type, torch.bfloat16, enabled=use_bfloat16(config, device)):
        query = topology.history_nodes(torch.from_numpy(instances.history_BT[own]).to(device))
        targets = torch.from_numpy(instances.target_BP[own]).to(device)
        loss = LOSSES[kind](model, topology, query, targets, objective, generator)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    average_gradients(model.parameters())
    optimiser.step()
    return loss.detach()


def _read(config: DeepConfig, losses: Sequence[Tensor], step: int) -> float:
    """The mean of the losses up to `step`. Raises FloatingPointError when one is not finite, so that no broken model is saved."""
    values: list[float] = average(torch.stack(list(losses)).float()).tolist()
    for at, value in enumerate(values, start=step + 1 - len(values)):
        if not math.isfinite(value):
            raise FloatingPointError(
                f"step {at}: the loss is {value}; lower optimiser.learning_rate (now {config.optimiser.learning_rate})"
            )
    return sum(values) / len(values)


def use_bfloat16(config: DeepConfig, device: torch.device) -> bool:
    """Whether matrix products run in bfloat16; elsewhere a CPU would emulate it, slowly."""
    if config.optimiser.precision != "auto":
        return config.optimiser.precision == "bfloat16"
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _identity(config: DeepConfig, prepared: Prepared, tree: Tree) -> dict[str, str]:
    """What a checkpoint belongs to."""
    nodes = hashlib.sha256(tree.first_child.tobytes() + tree.leaf_item.tobytes()).hexdigest()
    return {"config": config.model_dump_json(), "log": prepared.interactions.fingerprint, "tree": nodes}


def _save(file: Path, identity: dict[str, str], parts: Parts, progress: Progress) -> None:
    state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
    state |= {"identity": identity, "progress": asdict(progress)}
    part_file = file.with_suffix(".part")
    with part_file.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part_file, file)


def _restore(file: Path, identity: dict[str, str], parts: Parts) -> Progress:
    """Load a checkpoint (tensors and plain values only) and return how far it was."""
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises almost anything
        raise InvalidConfig("--resume", str(file), f"a readable checkpoint ({type(error).__name__}); delete it to start anew") from error
    if state.get("identity") != identity:
        expected = "a checkpoint of the same configuration, log and tree; delete it or leave out --resume to start anew"
        raise InvalidConfig("--resume", str(file), expected)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    progress = Progress(**state["progress"])
    log.info("resumed at step %d", progress.step)
    return progress
