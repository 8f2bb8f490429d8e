"""Training on this device: steps of the recipe, PLT, TDM and OTM over a synthetic log and of a ranker; and the repository's sample."""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from benchmarks.gpu.lines import Row
from benchmarks.papers.otm import training_speed
from espalier.bundle import Bundle
from espalier.engines import open_engine
from training.data.ranking_set import RankingSet
from training.deep.run import fit_and_export
from training.evaluate import held_out_pairs, labelled, measure
from training.rankers.fit import Descent, Epoch, fit_ranker
from training.specification.models import deep_config, read_deep_config
from training.specification.ranker import ChoiceModel, HighwayConfig

Device = Literal["cuda", "cpu"]
FEATURES = 20
LOSSES: tuple[ChoiceModel, ...] = ("elimination", "plackett-luce")
CONFIG = Path("training/configs/debian-depends.toml")
SHIPPED = Path("models/debian-depends/1")
BEAM, M, BATCH = 100, 50, 64
WORSE = 0.02
"""Tolerated loss of recall against the shipped model: seeds differ by half a point, and cards sum in another order."""


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


def fit(steps: int | None = None, device: Device = "cuda") -> Iterator[Row]:
    """The sample, trained here and searched here and on the CPU.

    steps  of training; None: as configured, and then the recall is checked against the model in the repository
    """
    config = read_deep_config(CONFIG)
    if steps is not None:
        config = config.model_copy(update={"optimiser": config.optimiser.model_copy(update={"steps": steps})})
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        trained = fit_and_export(config, None, Path(folder) / "debian-depends" / "1", torch.device(device), resume=False)
        seconds = time.perf_counter() - begin
        if trained is None:
            raise RuntimeError("another process exports the model")
        shipped = Bundle.open(SHIPPED)
        recall = {name: _recall(bundle, "cpu")["recall"] for name, bundle in (("trained", trained), ("shipped", shipped))}
        row: Row = {
            "case": f"the sample, {config.optimiser.steps} steps on {device}",
            "ms": round(seconds * 1e3),
            "items": trained.tree.item_count,
        }
        yield row | {"ok": steps is not None or recall["trained"] >= recall["shipped"] - WORSE, "recall": recall}
        for search_device in dict.fromkeys(("cpu", device)):
            recall_row = _recall(trained, search_device)
            same = abs(recall_row["recall"] - recall["trained"]) <= 1e-3
            case, ms = f"the sample as trained, searched on {search_device}", recall_row["ms_per_query"]
            yield {"case": case, "ok": same, "ms": ms, "batch": BATCH} | recall_row


def _recall(bundle: Bundle, device: Device) -> Row:
    engine = open_engine(bundle, device)
    (row,) = measure(bundle, engine, labelled(bundle.manifest.query, held_out_pairs(bundle)), [BEAM], [M], BATCH)
    return {"engine": engine.name} | {name: row[name] for name in ("beam_size", "m", "recall", "ms_per_query")}
