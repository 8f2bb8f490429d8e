"""Fits a node scorer to a tree: batches, objective, updates, checkpoints; in one process or several (parallel.py).

A run is a function of its configuration and data: batch and random nodes of step s come from (seed, s), so a run that was killed and
resumed ends as an uninterrupted one would.

Legend: B instances, T history, P targets.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from espalier.errors import InvalidConfig
from espalier.tree import Tree
from espalier.wording import option

from ..deep.checkpoint import Checkpoint, RunState
from ..deep.content_rows import ContentRows
from ..deep.first_model import first_model
from ..deep.instances import InstanceSource
from ..deep.objectives.otm import otm_loss, otm_no_bs_loss, otm_no_optest_loss
from ..deep.objectives.otm_robust import otm_robust_loss
from ..deep.objectives.plt import hsm_loss, plt_loss
from ..deep.objectives.tdm import tdm_loss
from ..deep.optimiser import AVERAGE_EVERY, Optimiser
from ..deep.parallel import average, process, process_rows, processes
from ..deep.prepare import Prepared
from ..deep.queries import model_input
from ..deep.row_shares import unshare_rows
from ..deep.scorers.model import NodeScorer
from ..deep.sequence.steps import SequenceSteps
from ..deep.topology import Topology, on_device
from ..deep.validation import validation_pairs, validation_recall
from ..retrieval.task import NO_DEADLINE, Deadline
from ..run_log import current
from ..specification.deep import DeepConfig, Objective, PathObjective, SequenceConfig, TdmObjective, WindowConfig
from ..specification.networks import SequenceObjective

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

VALIDATION_QUERIES = 1000
MIN_VALIDATION_QUERIES = 30
"""With fewer, recall is so coarse that the first measurements would decide."""
CURVE = "curve.json"
"""File beside the checkpoint, written at the end: the validation recalls, the step whose weights were used, and the steps made."""
CHECKPOINT_EVERY = 500
"""Steps between checkpoints."""
BETAS = 0.9, 0.999
"""Adam's betas, for kinds that train on instances."""
READ_EVERY = 20
"""Steps between readings of the losses: reading one waits for the device."""


def pick_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device to train on. Raises InvalidConfig if a GPU is requested and there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig(option("device"), device, "cpu or auto, since no CUDA device is there")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def fit(
    config: DeepConfig,
    prepared: Prepared,
    tree: Tree,
    device: torch.device,
    work: Path,
    resume: bool,
    deadline: Deadline = NO_DEADLINE,
    last: int | None = None,
) -> NodeScorer:
    """Train and return the model, on `device`. With several processes, only process 0 gets all node rows.

    work      folder for the checkpoint and the validation curve, which process 0 writes and all read
    resume    go on from the checkpoint there, if there is one; its configuration and log must be the same
    deadline  after which no step begins; for a single process only: several would not see it at the same step
    last      train to this step and use its averaged weights; None: validation users choose the step
    Raises InvalidConfig for a batch that the processes cannot share equally, FloatingPointError when a loss or a weight is not finite.
    """
    run = Run(config, prepared, tree, device, work / "checkpoint.pt", resume)
    state, steps = run.state, last or config.optimiser.steps
    begin, first = time.perf_counter(), state.step
    with tqdm(total=steps, initial=first, unit="step", desc=config.name, mininterval=1.0, disable=process() > 0) as bar:
        while state.step < steps and not state.out_of_patience(config.optimiser.patience) and not deadline.is_over():
            loss = run.advance()
            bar.update()
            if loss is not None:
                if process() == 0:
                    current().step(state.step, {"loss": loss} | ({f"recall@{config.search.m}": state.recalls[-1]} if state.recalls else {}))
                bar.set_postfix(loss=f"{loss:.3f}", recall=f"{state.recalls[-1]:.4f}" if state.recalls else "-", refresh=False)
    run.optimiser.refresh()  # a deadline may have come between two validations
    best_step = state.best_step(config.optimiser.validate_every)
    if last is not None:
        run.optimiser.average()
        run.optimiser.refresh()
        run.model.load_state_dict(run.optimiser.averaged.state_dict())
    elif state.recalls:
        run.model.load_state_dict(state.best)
        best, ending = max(state.recalls), "" if state.step < steps else "; all steps were used"
        log.info("validation recall@%d: %.4f at step %d of %d%s", config.search.m, best, best_step, state.step, ending)
    if process() == 0:
        (work / CURVE).write_text(json.dumps({"recalls": state.recalls, "best_step": best_step, "steps": state.step}) + "\n")
    if not all(bool(torch.isfinite(parameter).all()) for parameter in run.model.parameters()):
        raise FloatingPointError(
            f"the trained weights are not finite; lower optimiser.learning_rate (now {config.optimiser.learning_rate})"
        )
    log.info("%d steps in %.1f s", state.step - first, time.perf_counter() - begin)
    model = run.model
    if run.steps.content is not None:
        run.steps.content.join_rows(model)
    del run, state  # frees the optimiser's moments before process 0 takes all rows
    unshare_rows(model)
    return model


class Run:
    """A training run: the model, the mean of its weights, the validation users and the state that a checkpoint stores."""

    def __init__(self, config: DeepConfig, prepared: Prepared, tree: Tree, device: torch.device, file: Path, resume: bool) -> None:
        self.config = config
        self.model = first_model(config, tree, prepared, device)
        self.topology = Topology(tree, device)
        self.steps = steps_of(config, self.model, self.topology, prepared)
        self.optimiser = self.steps.optimiser
        self.checkpoint = Checkpoint(file, self.model, self.optimiser, tree.node_count)
        self.state = self.checkpoint.restore() if resume else RunState()
        if resume and self.state.step == 0:
            log.info("no checkpoint to resume from: training starts anew")
        self.pairs = validation_pairs(config, prepared, VALIDATION_QUERIES)
        if len(self.pairs) < MIN_VALIDATION_QUERIES:
            if self.pairs:
                log.info("%d validation users are too few to choose weights by: those of the last step are used", len(self.pairs))
            self.pairs = []
        self._losses: list[Tensor] = []

    def advance(self) -> float | None:
        """One step, with the averaging, validation and checkpoint after it. Returns the mean loss since the last reading, if any."""
        state, optimiser, loss = self.state, self.config.optimiser, None
        self._losses.append(self.steps.make(state.step))
        state.step += 1
        last = state.step == optimiser.steps
        validate = bool(self.pairs) and (state.step % optimiser.validate_every == 0 or last)
        save = state.step % CHECKPOINT_EVERY == 0 or last
        if validate or save or len(self._losses) == READ_EVERY:
            loss = self._read_losses()
        if validate or state.step % AVERAGE_EVERY == 0:
            self.optimiser.average()
        if validate or save:
            self.optimiser.refresh()
        if validate:
            averaged = self.optimiser.averaged
            state.add(validation_recall(self.config, self.topology, averaged, self.pairs), averaged)
        if save or state.out_of_patience(optimiser.patience):
            self.checkpoint.save(state)
        return loss

    def _read_losses(self) -> float:
        """The mean of the losses since the last reading. Raises FloatingPointError when one is not finite: no broken model is saved."""
        values: list[float] = average(torch.stack(self._losses).float()).tolist()
        self._losses.clear()
        for step, value in enumerate(values, start=self.state.step - len(values)):
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"step {step}: the loss is {value}; lower optimiser.learning_rate (now {self.config.optimiser.learning_rate})"
                )
        return sum(values) / len(values)


def steps_of(config: DeepConfig, model: NodeScorer, topology: Topology, prepared: Prepared) -> InstanceSteps | SequenceSteps:
    """The training steps of the configured kind. Raises InvalidConfig if the processes cannot share a batch."""
    content = None
    if prepared.content is not None:
        content = ContentRows(prepared.content.rows, topology, prepared.seen_I, config.content.drop)
        # With content, untouched items are no negatives: nothing says that they are not relevant.
        topology = Topology(topology.tree, topology.device, prepared.seen_I)
    if isinstance(config, SequenceConfig):
        return SequenceSteps(config, model, topology, prepared, use_bfloat16(config, topology.device), content)
    if isinstance(config, WindowConfig):
        return InstanceSteps(config, model, topology, prepared, content)
    raise InvalidConfig("kind", config.kind, "a kind of tree models")


class InstanceSteps:
    """The steps of a kind that trains on instances. Raises InvalidConfig for a batch that the processes cannot share equally."""

    def __init__(
        self, config: WindowConfig, model: NodeScorer, topology: Topology, prepared: Prepared, content: ContentRows | None
    ) -> None:
        if config.optimiser.batch % processes():
            raise InvalidConfig("optimiser.batch", config.optimiser.batch, f"a multiple of the {processes()} processes")
        self.config, self.model, self.topology, self.content = config, model, topology, content
        self.source = InstanceSource(prepared.interactions, prepared.split.train, config.instances, config.seed)
        self.optimiser = Optimiser(model, BETAS, config.optimiser.average, content=content)

    def make(self, step: int) -> Tensor:
        """One update with this process's rows of a batch; returns their loss (a scalar on the device)."""
        config, device, (kind, objective) = self.config, self.topology.device, stage(self.config, step)
        instances, rows = self.source.batch(step, config.optimiser.batch), process_rows(config.optimiser.batch)
        generator = torch.Generator(device).manual_seed(config.seed * 1_000_003 + step)
        if self.content is not None:
            self.content.draw(config.seed * 1_000_003 + step)
        self.optimiser.zero_gradients()
        with torch.autocast(device.type, torch.bfloat16, enabled=use_bfloat16(config, device)):
            query = model_input(self.model, self.topology, instances.query[rows])
            targets = on_device(instances.target_BP[rows], device)
            loss = LOSSES[kind](self.model, self.topology, query, targets, objective, generator)
        loss.backward()
        self.optimiser.step(config.optimiser.learning_rate_at(step))
        return loss.detach()


def stage(config: DeepConfig, step: int) -> tuple[str, Objective]:
    """The kind and the objective of a step: `tdm` in a warm start, then the configured ones."""
    objective = config.objective
    if isinstance(objective, TdmObjective | PathObjective | SequenceObjective):
        return config.kind, objective
    if step >= round(objective.warm_start * config.optimiser.steps):
        return config.kind, objective
    return "tdm", TdmObjective(negatives=objective.negatives, negative_decay=objective.negative_decay)


def use_bfloat16(config: DeepConfig, device: torch.device) -> bool:
    """Whether matrix products run in bfloat16."""
    if config.optimiser.precision != "auto":
        return config.optimiser.precision == "bfloat16"
    return computes_in_bfloat16(device)


def computes_in_bfloat16(device: torch.device) -> bool:
    """Whether the device has bfloat16 products; without them a CPU would emulate them slowly."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
