"""Our model as a method: `fit` trains and exports it with a configuration, and the serving engine searches it at any beam.

Knows the training run and the engines. Does not know other methods. The configuration stays as it is, except for the number of steps if
time is limited.

Legend: B queries, M results.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espalier.arrays import Array, Int64
from espalier.bundle import WEIGHTS, Bundle
from espalier.engines import open_engine
from espalier.errors import InvalidConfig
from espalier.queries import HistoryKind, QueryBatch, pad_histories
from espalier.search import NO_ITEM, Engine, SearchParams, padded

from ..deep.first_model import build_model
from ..deep.fit import CURVE, steps_of
from ..deep.fit import VALIDATION_QUERIES as QUERIES_OF_A_ROUND
from ..deep.memory import FIT_S, NEIGHBOUR_COUNTS, memory_task
from ..deep.prepare import Prepared, SharedStart, build_tree
from ..deep.ranking import GAMMAS, ROUNDS, VALIDATION_QUERIES
from ..deep.run import train_and_export
from ..deep.sequence.rules import with_rules
from ..deep.topology import Topology
from ..deep.validation import validation_pairs, validation_recall
from ..neighbours.fit import neighbours
from ..publish import HELD_OUT_QUERIES
from ..retrieval.needs import Needs, by_parts, of_steps, seconds_each
from ..retrieval.task import Clock, Deadline, Fitted, Trial
from ..specification.deep import DeepConfig

log = logging.getLogger(__name__)


BATCH = 64
"""Queries in one engine call."""
SLOWER = 1.05
"""A training step's time over that of a step measured on its own: averages of weights and checkpoints follow some steps."""
ROUNDS_SHARE = 0.25
"""Largest share of the training time for measuring validation users."""
MEMORY_SHARE = 0.1
"""Largest share of the time for the neighbours of a memory, and again for choosing how it is added."""
MEMORY_FITS, SLOWER_WITH_MEMORY = 40, 2
"""About how many fits of neighbours the choice of their options takes; a search with a memory in searches without one."""
EXPORT_S = 5.0
"""Seconds for writing and verifying a bundle, without its searches."""
TIMED_QUERIES = 100
BEGUN = "begun.pt"
"""File of the first model, with which costs were measured."""
NOT_FOR_ANSWERS = {"golden.parquet", "heldout.parquet", WEIGHTS}
"""Files of a bundle that no answer needs."""


@dataclass(frozen=True)
class Recipe:
    """A trained tree model, opened.

    engine    one thread, on the CPU
    options   the choices of training and export, and the number of steps made
    trials    values of γ and of the memory that were tried, with their validation figures
    seconds   of training and export, with the choice of the memory's neighbours
    ended     why it was trained for fewer steps than configured, or None
    share     of the configured steps that was made
    """

    bundle: Bundle
    engine: Engine
    options: dict[str, Any]
    trials: list[Trial]
    seconds: float
    ended: str | None
    share: float

    def at(self, beam_size: int) -> Fitted:
        """The recipe as a method with a serving beam, at most all leaves."""
        kind, beam = self.bundle.graph_kind, min(beam_size, self.bundle.tree.leaf_count)

        def rank(queries: Sequence[Array], m: int, exclude_seen: bool) -> Int64:
            rows_BM = np.full((len(queries), m), NO_ITEM, np.int64)
            for start in range(0, len(queries), BATCH):
                part = queries[start : start + BATCH]
                params = SearchParams.uniform(len(part), beam, m, padded(part) if exclude_seen else None)
                batch = pad_histories(kind, part) if isinstance(kind, HistoryKind) else QueryBatch(kind, np.stack(part))
                found_BM = self.engine.search(batch, params).item_rows_BM
                rows_BM[start : start + len(part), : found_BM.shape[1]] = found_BM
            return rows_BM

        size = sum(info.size for name, info in self.bundle.manifest.files.items() if name not in NOT_FOR_ANSWERS)
        return Fitted(rank, self.options | {"beam_size": beam}, size, self.seconds, self.trials, self.ended, self.share)


def fit_recipe(
    config: DeepConfig,
    prepared: Prepared,
    folder: Path,
    device: torch.device,
    seconds: float | None = None,
    costs: Costs | None = None,
    clock: Clock = time.monotonic,
    fitted_neighbours: Fitted | None = None,
    refit: bool = False,
) -> Recipe:
    """Train, export to a folder inside `folder`, and open.

    seconds            of all this: as many steps are planned as fit, at most those configured; training ends in time if they take longer
    costs              as `costs_of` measured them; None: they are measured first
    fitted_neighbours  the neighbours for a memory, chosen as the export chooses them; None: the export chooses them
    refit              whether it finally trains on validation events, too, as `fit` does; other methods do not
    """
    begin, work = clock(), folder / "work"
    work.mkdir(parents=True)
    config = with_rules(config, prepared)
    configured_steps, memory_s, end = config.optimiser.steps, FIT_S, Deadline(None)
    if costs is None and seconds is not None:
        costs = costs_of(config, prepared, folder, device, clock)
    if costs is not None:
        prepared = replace(prepared, shared_start=costs.shared_start)
    if fitted_neighbours is not None:
        prepared, costs = replace(prepared, neighbours=fitted_neighbours), costs and replace(costs, memory_s=0.0)
    if costs is not None and seconds is not None:
        memory_s = min(FIT_S, MEMORY_SHARE * seconds)
        training_s = begin + seconds - clock() - export_seconds(config, prepared, costs)
        training_s -= memory_seconds(config, prepared, costs, memory_s)
        config = shortened(config, prepared, costs, training_s)
        end = Deadline(clock() + training_s, clock)
    bundle = train_and_export(config, prepared, folder / "recipe" / "1", device, work, False, memory_s, deadline=end, refit=refit)
    if bundle is None:
        raise InvalidConfig("torchrun", "several processes", "one process for a comparison")
    curve = json.loads(max(work.rglob(CURVE), key=lambda file: file.stat().st_mtime).read_text())
    shutil.rmtree(work)
    manifest, planned = bundle.manifest, config.optimiser
    options = {"kind": config.kind, "gamma": manifest.ranking.gamma, "best_step": curve["best_step"], "steps": curve["steps"]}
    if manifest.memory is not None:
        options |= {"memory_weight": manifest.memory.weight, "memory_entries": manifest.memory.entries}
    is_patient = curve["steps"] - curve["best_step"] >= planned.patience * planned.validate_every
    steps = planned.steps if is_patient else curve["steps"]
    ended = None if steps == configured_steps else f"{steps:,} of {configured_steps:,} steps"
    trials = [Trial(trial["options"], trial["figure"]) for trial in manifest.metrics.get("validation", [])]
    seconds_spent = clock() - begin + (0.0 if fitted_neighbours is None else fitted_neighbours.seconds)
    return Recipe(bundle, open_engine(bundle, "cpu"), options, trials, seconds_spent, ended, steps / configured_steps)


@dataclass(frozen=True)
class Costs:
    """What training costs on this machine, in seconds.

    start_s   a tree and a first model; every round but the first pays it: the first starts from the measured ones
    step_s    a training step
    search_s  a validation query, searched in training
    memory_s  neighbours for a memory; 0 without one
    shared_start  the measured tree and model
    """

    start_s: float
    step_s: float
    search_s: float
    memory_s: float = 0.0
    shared_start: SharedStart | None = None


def costs_of(config: DeepConfig, prepared: Prepared, folder: Path, device: torch.device, clock: Clock) -> Costs:
    """Measure the costs with the tree and the model that training starts from. These stay in `folder`."""
    config, begin = with_rules(config, prepared), clock()
    tree = build_tree(config, prepared, device)
    model, topology = build_model(config, tree, prepared), Topology(tree, device)
    shared_start = SharedStart(tree, folder / BEGUN)
    torch.save(model, shared_start.model)
    model.to(device)
    start_s = clock() - begin
    pairs = validation_pairs(config, prepared, TIMED_QUERIES)
    search_s = seconds_each(lambda: validation_recall(config, topology, model, pairs), clock) / len(pairs) if pairs else 0.0
    begin = clock()
    steps = steps_of(config, model, topology, prepared)
    start_s += clock() - begin
    last = config.optimiser.steps - 1  # the objective that most steps have, after a warm start
    step_s = seconds_each(lambda: float(steps.make(last)), clock)  # waits for a GPU
    memory_s = by_parts(neighbours, MEMORY_FITS)(memory_task(config, prepared, None)).full_s if has_memory(config, prepared) else 0.0
    log.info("a tree and a model take %.1f s, a step %.0f ms, a search %.2f ms", start_s, 1e3 * step_s, 1e3 * search_s)
    return Costs(start_s, step_s, search_s, memory_s, shared_start)


def needs_of(config: DeepConfig, prepared: Prepared, costs: Costs) -> Needs:
    """The needs of the steps that `fit` makes on this log, their validation, the choice of a ranking and a memory, and the export."""
    config = with_rules(config, prepared)
    optimiser = config.optimiser
    round_s = costs.search_s * min(QUERIES_OF_A_ROUND, len(prepared.split.validation))
    once = of_steps(
        (config.rounds - 1) * costs.start_s + export_seconds(config, prepared, costs),
        config.rounds * (costs.step_s + round_s / optimiser.validate_every),
        optimiser.steps,
    )
    least_s, full_s = (
        seconds + memory_seconds(config, prepared, costs, MEMORY_SHARE * seconds / (1 - 2 * MEMORY_SHARE))
        for seconds in (once.least_s, once.full_s)
    )
    return Needs(least_s, full_s, once.steps)


def memory_seconds(config: DeepConfig, prepared: Prepared, costs: Costs, most_s: float) -> float:
    """About the seconds of a memory: its neighbours and the choice of how it is added, each at most `most_s` and FIT_S."""
    if not has_memory(config, prepared):
        return 0.0
    queries = min(VALIDATION_QUERIES, len(prepared.split.validation))
    adding_s = (2 + 2 * ROUNDS + len(NEIGHBOUR_COUNTS)) * SLOWER_WITH_MEMORY * costs.search_s * queries
    return sum(min(seconds, most_s, FIT_S) for seconds in (costs.memory_s, adding_s))


def has_memory(config: DeepConfig, prepared: Prepared) -> bool:
    """Whether a memory is chosen after training."""
    return config.memory.weight != 0 and prepared.interactions.vectors_UF is None


def export_seconds(config: DeepConfig, prepared: Prepared, costs: Costs) -> float:
    """About the seconds after training, without the memory: searches for γ, the measurement of test users, and the files."""
    queries, slower = min(VALIDATION_QUERIES, len(prepared.split.validation)), SLOWER_WITH_MEMORY if has_memory(config, prepared) else 1
    return EXPORT_S + costs.search_s * (len(GAMMAS) * queries + slower * (2 * len(prepared.split.test) + HELD_OUT_QUERIES))


def shortened(config: DeepConfig, prepared: Prepared, costs: Costs, seconds: float) -> DeepConfig:
    """The configuration with the number of steps that training makes in `seconds`, at least one and at most those configured.

    The schedule is shortened, too: the learning rate falls to 0 at the last step, and validation users are measured as often as time
    allows. With several rounds of learning a tree, each gets an equal share.
    """
    configured = config.optimiser
    for_steps_s = max(0.0, (seconds - (config.rounds - 1) * costs.start_s) / config.rounds)
    round_s = costs.search_s * min(QUERIES_OF_A_ROUND, len(prepared.split.validation))
    rounds = max(1, min(configured.steps // configured.validate_every, int(ROUNDS_SHARE * for_steps_s / max(round_s, 1e-6))))
    steps = min(configured.steps, max(1, int((for_steps_s - rounds * round_s) / (SLOWER * costs.step_s))))
    log.info("%d of %d steps are planned", steps, configured.steps)
    if steps == configured.steps:
        return config
    optimiser = configured.model_copy(update={"steps": steps, "validate_every": max(1, steps // rounds)})
    return config.model_copy(update={"optimiser": optimiser})
