"""Trains the repository's sample on a GPU, and compares its recall on GPU and CPU with the model in the repository."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from benchmarks.gpu.lines import Row
from espalier.bundle import Bundle
from espalier.engines import open_engine
from training.deep.run import fit_and_export
from training.evaluate import held_out_pairs, labelled, measure
from training.specification.deep import DeepConfig
from training.specification.models import read_config

Device = Literal["cuda", "cpu"]
CONFIG = Path("training/configs/debian-depends.toml")
SHIPPED = Path("models/debian-depends/1")
BEAM, M, BATCH = 100, 50, 64
WORSE = 0.02
"""Tolerated loss of recall against the shipped model: seeds differ by half a point, and cards sum in another order."""


def fit(steps: int | None = None, device: Device = "cuda") -> Iterator[Row]:
    """steps: of training; None: as configured, and then the recall is checked against the model in the repository."""
    config = read_config(CONFIG)
    if not isinstance(config, DeepConfig):
        raise TypeError(f"{CONFIG} is no deep model")
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
