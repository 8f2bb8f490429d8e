"""Our model as a method: what `fit` trains and exports with a configuration, searched by the engine that serves it, at any beam.

Knows the training run and the engines. Does not know other methods. Nothing of the configuration is replaced but the number of steps,
where time is limited.

Legend: B queries, M results.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from espalier.bundle import WEIGHTS, Bundle
from espalier.engines import open_engine
from espalier.errors import InvalidConfig
from espalier.queries import HistoryKind, QueryBatch, pad_histories
from espalier.search import NO_ITEM, Engine, SearchParams
from espalier.tree import Tree
from training.deep.first_model import build_model
from training.deep.fit import CURVE, steps_of
from training.deep.fit import VALIDATION_QUERIES as QUERIES_OF_A_ROUND
from training.deep.memory import FIT_S
from training.deep.prepare import Prepared
from training.deep.ranking import GAMMAS, MEMORY_TRIALS, VALIDATION_QUERIES
from training.deep.run import train_and_export
from training.deep.topology import Topology
from training.deep.validation import validation_pairs, validation_recall
from training.evaluate import padded
from training.publish import HELD_OUT_QUERIES
from training.retrieval.task import Deadline, Fitted, Trial
from training.specification.deep import DeepConfig

log = logging.getLogger(__name__)

Int64 = NDArray[np.int64]

BATCH = 64
"""Queries in one engine call."""
WARM_STEPS, TIMED_STEPS = 3, 12
"""Steps that are made to see how long one takes; the first ones allocate and compile."""
HEADROOM = 0.85
"""Of the time that is left for steps: the first steps may be faster than later ones, on a machine that others use too."""
LEAST_SHARE = 0.01
"""Of the configured steps: so many are made however short the time is."""
ROUNDS_SHARE = 0.25
"""The most of the training time that may go into measuring validation users."""
MEMORY_SHARE = 0.1
"""Of the time, at most, for the neighbours of a memory."""
EXPORT_S = 5.0
"""For writing and verifying a bundle, besides what its searches take."""
TIMED_QUERIES = 100
NOT_FOR_ANSWERS = {"golden.parquet", "heldout.parquet", WEIGHTS}
"""Files of a bundle that no answer needs."""


@dataclass(frozen=True)
class Recipe:
    """A trained tree model, opened.

    engine    one thread, on the CPU
    options   what training and export chose, and the steps that were made
    trials    what was tried of γ and the memory, with the figure that it was chosen by
    seconds   of training and export together
    ended     why it was trained for fewer steps than configured, where it was
    """

    bundle: Bundle
    engine: Engine
    options: dict[str, Any]
    trials: list[Trial]
    seconds: float
    ended: str | None

    def at(self, beam_size: int) -> Fitted:
        """As a method, with a serving beam (more than all leaves is all leaves)."""
        kind, beam = self.bundle.graph_kind, min(beam_size, self.bundle.tree.leaf_count)

        def rank(queries: Sequence[NDArray[Any]], m: int, exclude_seen: bool) -> Int64:
            rows_BM = np.full((len(queries), m), NO_ITEM, np.int64)
            for start in range(0, len(queries), BATCH):
                part = queries[start : start + BATCH]
                params = SearchParams.uniform(len(part), beam, m, padded(part) if exclude_seen else None)
                batch = pad_histories(kind, part) if isinstance(kind, HistoryKind) else QueryBatch(kind, np.stack(part))
                found_BM = self.engine.search(batch, params).item_rows_BM
                rows_BM[start : start + len(part), : found_BM.shape[1]] = found_BM
            return rows_BM

        size = sum(info.size for name, info in self.bundle.manifest.files.items() if name not in NOT_FOR_ANSWERS)
        return Fitted(rank, self.options | {"beam_size": beam}, size, self.seconds, self.trials, self.ended)


def fit_recipe(config: DeepConfig, prepared: Prepared, folder: Path, device: torch.device, seconds: float | None = None) -> Recipe:
    """Train, export to a folder inside `folder`, and open.

    seconds   wall-clock time of all this: as many steps as should fit are made, never more than configured, at least a hundredth of that
    """
    deadline = Deadline(None if seconds is None else time.monotonic() + seconds)
    begin, work = time.monotonic(), folder / "work"
    made: DeepConfig | None = None
    wanted = config.optimiser.steps
    memory_s = FIT_S if seconds is None else min(FIT_S, MEMORY_SHARE * seconds)
    work.mkdir(parents=True)

    def shorten(now: DeepConfig, prepared: Prepared, tree: Tree) -> DeepConfig:
        nonlocal made, wanted
        wanted = now.optimiser.steps
        made = made or shortened(now, prepared, tree, device, deadline.left_s() - memory_s)  # later rounds have as many steps as the first
        return made

    bundle = train_and_export(
        config, prepared, folder / "recipe" / "1", device, work, False, None if seconds is None else shorten, memory_s
    )
    if bundle is None:
        raise InvalidConfig("torchrun", "several processes", "one process for a comparison")
    curve = json.loads(max(work.rglob(CURVE), key=lambda file: file.stat().st_mtime).read_text())
    shutil.rmtree(work)
    manifest = bundle.manifest
    options = {"kind": config.kind, "gamma": manifest.ranking.gamma, "best_step": curve["best_step"], "steps": curve["steps"]}
    if manifest.memory is not None:
        options |= {"memory_weight": manifest.memory.weight, "memory_entries": manifest.memory.entries}
    steps = wanted if made is None else made.optimiser.steps
    ended = None if steps == wanted else f"{steps:,} of {wanted:,} steps, as many as fit into {seconds:.0f} s"
    trials = [Trial(tried["options"], tried["figure"]) for tried in manifest.metrics.get("validation", [])]
    return Recipe(bundle, open_engine(bundle, "cpu"), options, trials, time.monotonic() - begin, ended)


def shortened(config: DeepConfig, prepared: Prepared, tree: Tree, device: torch.device, left_s: float) -> DeepConfig:
    """The configuration with as many steps as fit the time that is left, by the time that a few of them take here.

    Fewer steps are a schedule of their own: the learning rate falls to 0 at the last of them, and validation users are measured as often as
    there is time for. With several rounds of learning a tree, each gets its share.
    """
    begin = time.monotonic()
    step_s, search_s = _costs(config, prepared, tree, device)
    probe_s = time.monotonic() - begin
    configured = config.optimiser
    queries = min(VALIDATION_QUERIES, len(prepared.split.validation))
    trials = len(GAMMAS) + MEMORY_TRIALS * (config.memory.weight != 0)
    export_s = EXPORT_S + search_s * (trials * queries + 2 * len(prepared.split.test) + HELD_OUT_QUERIES)
    for_steps_s = HEADROOM * max(0.0, left_s - 2 * probe_s - export_s) / config.rounds  # building the model is paid for once more
    round_s = search_s * min(QUERIES_OF_A_ROUND, queries)
    rounds = max(1, min(configured.steps // configured.validate_every, int(ROUNDS_SHARE * for_steps_s / max(round_s, 1e-6))))
    steps = int((for_steps_s - rounds * round_s) / step_s)
    steps = min(configured.steps, max(steps, math.ceil(LEAST_SHARE * configured.steps)))
    log.info("a step takes %.0f ms, a search %.2f ms: %d of %d steps fit", 1e3 * step_s, 1e3 * search_s, steps, configured.steps)
    if steps == configured.steps:
        return config
    optimiser = configured.model_copy(update={"steps": steps, "validate_every": max(1, steps // rounds)})
    return config.model_copy(update={"optimiser": optimiser})


def _costs(config: DeepConfig, prepared: Prepared, tree: Tree, device: torch.device) -> tuple[float, float]:
    """Seconds of a training step, and of searching for one validation query in training."""
    model, topology = build_model(config, tree, prepared).to(device), Topology(tree, device)
    steps = steps_of(config, model, topology, prepared)
    last = config.optimiser.steps - 1  # the objective that most steps have, after a warm start
    times = []
    for _ in range(WARM_STEPS + TIMED_STEPS):
        begin = time.perf_counter()
        float(steps.make(last))  # waits for a GPU
        times.append(time.perf_counter() - begin)
    pairs = validation_pairs(config, prepared, TIMED_QUERIES)
    begin = time.perf_counter()
    if pairs:
        validation_recall(config, topology, model, pairs)
    return float(np.mean(times[WARM_STEPS:])), (time.perf_counter() - begin) / max(1, len(pairs))
