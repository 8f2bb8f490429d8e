"""A whole training run of a tree model, in one process or several: log, tree, scorer, bundle; resumable."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from espalier.bundle import Bundle
from training.deep.checkpoint import kept_tree
from training.deep.earlier import as_earlier
from training.deep.export import export
from training.deep.first_model import by_popularity
from training.deep.fit import fit
from training.deep.memory import FIT_S
from training.deep.parallel import joined, process, shared_tree, wait_for_all
from training.deep.prepare import Prepared, build_tree, prepare
from training.deep.sequence.rules import with_rules
from training.retrieval.task import NO_DEADLINE, Deadline
from training.specification.deep import DeepConfig, NeighboursConfig
from training.versions import clear, only_run, work_folder

log = logging.getLogger(__name__)


def fit_and_export(
    config: DeepConfig, data: Path | None, out: Path, device: torch.device, resume: bool, journal: Path | None = None
) -> Bundle | None:
    """Train what a configuration says and write models/NAME/VERSION; None in all processes but the first.

    data    a log to read instead of the configured one
    journal  the model whose live items are taken along; None: the earlier model's
    resume  go on from the last checkpoint of a run that was killed
    """
    work = work_folder(out)
    with joined(device), only_run(work) if process() == 0 else _silence():
        if process() == 0:
            clear(work, resume)
        wait_for_all()
        prepared = prepare(config, data, work / f"process-{process()}" if process() else work, work, journal)  # it writes files there
        found = prepared.interactions
        log.info("%d users, %d items, %d events", found.user_count, found.item_count, found.event_count)
        bundle = train_and_export(config, prepared, out, device, work, resume)
        if bundle is not None:
            shutil.rmtree(work)
        return bundle


def train_and_export(
    config: DeepConfig,
    prepared: Prepared,
    out: Path,
    device: torch.device,
    work: Path,
    resume: bool,
    memory_s: float = FIT_S,
    deadline: Deadline = NO_DEADLINE,
) -> Bundle | None:
    """Train what a configuration says on a log that has been read, and write models/NAME/VERSION; None in all processes but the first.

    work      an empty folder, or with `resume` that of a run that was killed; checkpoints and curves stay there
    memory_s  most seconds for the neighbours of a memory
    deadline  the end of training in one process, whatever steps are left
    """
    data = config.data.model_copy(update={"split": prepared.split.config})  # with its dates: a log that has grown is cut at the same ones
    config = with_rules(config.model_copy(update={"data": data}), prepared)
    for number in range(1, config.rounds + 1):
        folder = work if number == 1 else work / f"round-{number}"
        folder.mkdir(exist_ok=True)
        build = partial(build_tree, config, prepared, device)
        tree = shared_tree(partial(kept_tree, folder / "tree.npz", config, prepared, build, resume), device)
        if isinstance(config, NeighboursConfig):
            model = by_popularity(config, prepared, tree)
        else:
            model = fit(config, prepared, tree, device, folder, resume, deadline)
        prepared = replace(prepared, earlier=as_earlier(config, tree, model), begun=None)
    return export(config, prepared, tree, model, out, memory_s) if process() == 0 else None


@contextmanager
def _silence() -> Iterator[None]:
    """Processes but the first log warnings alone."""
    logging.getLogger("training").setLevel(logging.WARNING)
    yield
