"""Fits a node scorer to a tree: batches, objective, Adam, checkpoints.

A run is a function of its configuration and data: batch and random nodes of step s come from (seed, s), so a run that was killed and
resumed ends as an uninterrupted one would.

Legend: B instances, T history, P targets.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from espalier.errors import InvalidConfig
from espalier.tree import Tree
from training.config import ObjectiveConfig, TrainingConfig
from training.instances import InstanceSource
from training.objectives.otm import otm_loss
from training.objectives.plt import plt_loss
from training.objectives.tdm import tdm_loss
from training.prepare import Prepared, item_embeddings
from training.scorers.encoders import WindowEncoder
from training.scorers.heads import LinearHead, MlpHead
from training.scorers.initial_rows import rows_from_embeddings
from training.scorers.model import NodeScorer
from training.topology import Topology

log = logging.getLogger(__name__)

Loss = Callable[[NodeScorer, Topology, Tensor, Tensor, ObjectiveConfig, torch.Generator], Tensor]
LOSSES: dict[str, Loss] = {"tdm": tdm_loss, "plt": plt_loss, "otm": otm_loss}


def pick_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device to train on. Raises InvalidConfig when a GPU was asked for and is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("--device", device, "cpu or auto, since no CUDA device is there")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def build_model(config: TrainingConfig, tree: Tree, prepared: Prepared) -> NodeScorer:
    """A freshly initialised model (seeded), its node rows from the training users' co-occurrence where so configured."""
    torch.manual_seed(config.seed)
    scorer = config.scorer
    encoder = WindowEncoder(config.instances.windows, scorer.node_dim)
    head: MlpHead | LinearHead
    if scorer.kind == "mlp":
        head = MlpHead(encoder.features, scorer.node_dim, scorer.hidden)
    else:
        head = LinearHead(encoder.features, scorer.node_dim, project=True)
    model = NodeScorer(tree.node_count, scorer.node_dim, encoder, head, scorer.init_std)
    if scorer.init == "embeddings":
        embeddings_ID = item_embeddings(prepared, scorer.node_dim - (scorer.kind == "linear"), config.seed)  # its last entry is the bias
        rows_ND = rows_from_embeddings(tree, embeddings_ID, scorer.init_std)
        model.node_rows.data[:, : embeddings_ID.shape[1]] = torch.from_numpy(rows_ND)
    return model


def fit(config: TrainingConfig, prepared: Prepared, tree: Tree, device: torch.device, work: Path, resume: bool) -> NodeScorer:
    """Train and return the model (on `device`).

    work    folder for the checkpoint
    resume  go on from the checkpoint there, if there is one; its configuration and log must be the same
    """
    model = build_model(config, tree, prepared).to(device)
    topology = Topology(tree, device)
    source = InstanceSource(prepared.interactions, prepared.split.train, config.instances, config.seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=config.optimiser.learning_rate, fused=True)
    checkpoint = work / "checkpoint.pt"
    first = _restore(checkpoint, config, prepared, model, optimiser) if resume and checkpoint.exists() else 0
    if resume and first == 0:
        log.info("no checkpoint to resume from: training starts anew")
    steps = config.optimiser.steps
    warm = round(config.objective.warm_start * steps) if config.objective.kind == "otm" else 0
    smooth, begin = None, time.perf_counter()
    with tqdm(total=steps, initial=first, unit="step", desc=config.name, mininterval=1.0) as bar:
        for step in range(first, steps):
            for group in optimiser.param_groups:
                group["lr"] = config.optimiser.learning_rate * (1 - step / steps)
            loss = train_step(config, model, topology, source, optimiser, step, "tdm" if step < warm else config.objective.kind)
            smooth = loss if smooth is None else 0.98 * smooth + 0.02 * loss
            bar.update()
            bar.set_postfix(loss=f"{smooth:.3f}", refresh=False)
            if (step + 1) % config.optimiser.checkpoint_every == 0 or step + 1 == steps:
                _save(checkpoint, config, prepared, model, optimiser, step + 1)
    if not all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
        raise FloatingPointError(
            f"the trained weights are not finite; lower optimiser.learning_rate (now {config.optimiser.learning_rate})"
        )
    log.info("%d steps in %.1f s", steps - first, time.perf_counter() - begin)
    return model


def train_step(
    config: TrainingConfig,
    model: NodeScorer,
    topology: Topology,
    source: InstanceSource,
    optimiser: torch.optim.Optimizer,
    step: int,
    kind: Literal["tdm", "plt", "otm"],
) -> float:
    """One batch and one update; returns the loss. Raises FloatingPointError when it is not finite, so that no broken model is exported."""
    device = topology.device
    instances = source.batch(step, config.optimiser.batch)
    generator = torch.Generator(device).manual_seed(config.seed * 1_000_003 + step)
    optimiser.zero_grad()
    with torch.autocast(device.type, torch.bfloat16, enabled=use_bfloat16(config, device)):
        query = topology.history_nodes(torch.from_numpy(instances.history_BT).to(device))
        loss = LOSSES[kind](model, topology, query, torch.from_numpy(instances.target_BP).to(device), config.objective, generator)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    optimiser.step()
    value = float(loss.detach())
    if not value < float("inf"):
        raise FloatingPointError(f"step {step}: the loss is {value}; lower optimiser.learning_rate (now {config.optimiser.learning_rate})")
    return value


def use_bfloat16(config: TrainingConfig, device: torch.device) -> bool:
    """Whether matrix products run in bfloat16; elsewhere a CPU would emulate it, slowly."""
    if config.optimiser.precision != "auto":
        return config.optimiser.precision == "bfloat16"
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _save(file: Path, config: TrainingConfig, prepared: Prepared, model: NodeScorer, optimiser: torch.optim.Optimizer, step: int) -> None:
    state = {
        "config": config.model_dump_json(),
        "log": prepared.interactions.fingerprint,
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "step": step,
    }
    partial = file.with_suffix(".part")
    with partial.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, file)


def _restore(file: Path, config: TrainingConfig, prepared: Prepared, model: NodeScorer, optimiser: torch.optim.Optimizer) -> int:
    """Load a checkpoint (tensors and plain values only) and return its step."""
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises almost anything
        raise InvalidConfig("--resume", str(file), f"a readable checkpoint ({type(error).__name__}); delete it to start anew") from error
    if state["config"] != config.model_dump_json() or state["log"] != prepared.interactions.fingerprint:
        expected = "a checkpoint of the same configuration and log; delete it or leave out --resume to start anew"
        raise InvalidConfig("--resume", str(file), expected)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    log.info("resumed at step %d", state["step"])
    return int(state["step"])
