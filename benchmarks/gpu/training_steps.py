"""Training steps on this device: the recipe, PLT, TDM and OTM over a synthetic log, and the ranker of the second stage."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch

from benchmarks.gpu.lines import Row
from benchmarks.papers.otm import training_speed
from training.data.ranking_set import RankingSet
from training.rankers.fit import Descent, Epoch, fit_ranker
from training.specification.models import deep_config
from training.specification.ranker import ChoiceModel, HighwayConfig

Device = Literal["cuda", "cpu"]
FEATURES = 20
LOSSES: tuple[ChoiceModel, ...] = ("elimination", "plackett-luce")


def training(
    items: int, users: int, batches: Sequence[int], beam: int, rounds: int, queries: int, depth: int, device: Device = "cuda"
) -> Iterator[Row]:
    """Steps of all methods of `benchmarks.training_speed` at each batch; then epochs of a ranker over `queries` × `depth` candidates.

    queries_per_s is the number of users, or queries, that are trained on in a second.
    """
    yield from rankers(queries, depth, device)
    prepared = training_speed.synthetic(items, users)
    config = deep_config({"kind": "otm-robust", "name": "synthetic", "data": {"log": "none"}})
    for batch in batches:
        options = Namespace(beam=beam, batch=batch, rounds=rounds, steps=3)
        for row in training_speed.measure(config, prepared, torch.device(device), options):
            ms = row["s_per_batch"] * 1e3
            case = f"{row['method']}, {items} items, batch {batch}, beam {beam}"
            shown: Row = {"case": case, "ok": True, "ms": round(ms, 3), "queries_per_s": row["users_per_s"]}
            yield shown | {"items": items, "batch": batch, "steps_per_s": round(1e3 / ms, 2), "ratio_to_plt": row["ratio"]}
        memory = training_speed.memory_mib(torch.device(device))
        yield {"case": f"memory, {items} items, batch {batch}", "ok": None, "mib": memory, "note": "the most, with all methods together"}


def rankers(queries: int, depth: int, device: Device) -> Iterator[Row]:
    """The second epoch of each loss: the first one allocates."""
    rng = np.random.default_rng(1)
    rows = queries * depth
    grades_R = (rng.random(rows) < 0.05).astype(np.float32)
    grades_R[::depth] = 1
    grades_R[1::depth] = 0
    features_RF = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    names = tuple(f"feature {f}" for f in range(FEATURES))
    data = RankingSet(features_RF, grades_R, np.arange(queries + 1, dtype=np.int64) * depth, names)
    for loss in LOSSES:
        ends: list[float] = []

        def note(epoch: Epoch, ends: list[float] = ends) -> None:
            ends.append(time.perf_counter())

        config = HighwayConfig(loss=loss, max_epochs=2)
        batch_queries = Descent().batch_queries
        fit_ranker(data, None, config, note, torch.device(device))
        steps = -(-queries // batch_queries)
        ms = (ends[1] - ends[0]) * 1e3 / steps
        row: Row = {"case": f"ranker, {loss}, {depth} candidates a query, batch {batch_queries}", "ok": True, "ms": round(ms, 3)}
        yield row | {"queries_per_s": round(batch_queries / ms * 1e3, 1), "steps_per_s": round(1e3 / ms, 2)}
