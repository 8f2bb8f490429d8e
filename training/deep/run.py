"""A whole training run of a tree model, in one process or several: log, tree, scorer, bundle; resumable."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from espalier.bundle import Bundle
from espalier.tree import Tree

from ..data.splits import Split
from ..deep.checkpoint import check_run
from ..deep.earlier import as_earlier
from ..deep.export import FinalModel, export
from ..deep.first_model import by_popularity
from ..deep.fit import CURVE, fit
from ..deep.memory import FIT_S
from ..deep.parallel import process, process_group, shared_tree, wait_for_all
from ..deep.prepare import Prepared, build_tree, prepare, with_dates
from ..deep.scorers.model import NodeScorer
from ..deep.sequence.rules import with_rules
from ..retrieval.needs import silence
from ..retrieval.task import NO_DEADLINE, Deadline
from ..run_files import stored_tree
from ..specification.deep import DeepConfig, NeighboursConfig, SequenceConfig
from ..versions import run_folder, work_folder

log = logging.getLogger(__name__)

AGAIN = "again"
"""Folder of the second training's checkpoints, inside the work folder."""
LEAST_MORE = 0.03
"""Train again only if lists grow by this share of events: it takes as long as the first training."""


def fit_and_export(
    config: DeepConfig,
    data: Path | None,
    out: Path,
    device: torch.device,
    resume: bool,
    journal: Path | None = None,
    deadline: Deadline = NO_DEADLINE,
) -> Bundle | None:
    """Train by a configuration and write models/NAME/VERSION; None in all processes but the first.

    data     a log to read instead of the configured one
    journal  the model whose live items are added; None: the earlier model
    resume   go on from the last checkpoint of a run that was killed
    deadline  after which no step begins; a model of steps is then not trained again with the validation queries
    """
    work = work_folder(out)
    with process_group(device), run_folder(out, resume) if process() == 0 else silence():
        wait_for_all()
        folder = work / f"process-{process()}" if process() else work  # for its own files
        prepared = prepare(config, data, folder, work, journal)
        lists = prepared.interactions
        log.info("%d users, %d items, %d events", lists.user_count, lists.item_count, lists.event_count)
        refit = deadline.at_s is None or isinstance(config, NeighboursConfig)  # which has no steps
        return train_and_export(config, prepared, out, device, work, resume, FIT_S, deadline, refit)


def train_and_export(
    config: DeepConfig,
    prepared: Prepared,
    out: Path,
    device: torch.device,
    work: Path,
    resume: bool,
    memory_s: float = FIT_S,
    deadline: Deadline = NO_DEADLINE,
    refit: bool = True,
) -> Bundle | None:
    """Train by a configuration on a prepared log and write models/NAME/VERSION; None in all processes but the first.

    work      an empty folder, or with `resume` that of a run that was killed; checkpoints and curves stay there
    memory_s  most seconds for the neighbours of a memory
    deadline  the end of training in one process, whatever steps are left
    refit     whether to follow the configuration's `refit`: train again, with the validation queries
    """
    config = with_rules(with_dates(config, prepared.split), prepared)
    check_run(config, prepared, work, resume)
    tree, model = _train(config, prepared, device, work, resume, deadline)
    final = None
    if refit and wants_refit(config, prepared.split):
        final = _train_again(config, prepared, device, work, resume)
    return export(config, prepared, tree, model, out, memory_s, final) if process() == 0 else None


def wants_refit(config: DeepConfig, split: Split) -> bool:
    """Whether to train again with the validation queries; not if they add few events."""
    if split.final is None or not isinstance(config, SequenceConfig | NeighboursConfig) or not config.refit:
        return False
    events, final_events = (int(np.diff(lists.offset_U1)[users].sum()) for lists, users in ((split.lists, split.train), split.final))
    return final_events >= (1 + LEAST_MORE) * events


def _train_again(config: DeepConfig, prepared: Prepared, device: torch.device, work: Path, resume: bool) -> FinalModel:
    """A tree and a model from all lists except those of the test, with the number of steps that validation chose."""
    split = prepared.split.whole()
    log.info("training again, with the validation queries: %d users, %d events", len(split.train), split.lists.event_count)
    wait_for_all()  # for the curve
    folder = work if config.rounds == 1 else work / f"round-{config.rounds}"
    curve = json.loads((folder / CURVE).read_text()) if isinstance(config, SequenceConfig) else {"recalls": []}
    last = curve["best_step"] if curve["recalls"] else None  # without recalls the weights of the last step were used
    (work / AGAIN).mkdir(exist_ok=True)
    tree, model = _train(config, replace(prepared, split=split), device, work / AGAIN, resume, last=last)
    return FinalModel(split, tree, model)


def _train(
    config: DeepConfig,
    prepared: Prepared,
    device: torch.device,
    work: Path,
    resume: bool,
    deadline: Deadline = NO_DEADLINE,
    last: int | None = None,
) -> tuple[Tree, NodeScorer]:
    """A tree and a model of its training users, round after round."""
    for number in range(1, config.rounds + 1):
        folder = work if number == 1 else work / f"round-{number}"
        folder.mkdir(exist_ok=True)
        build = partial(build_tree, config, prepared, device)
        tree = shared_tree(partial(stored_tree, folder / "tree.npz", build, resume), device)
        if isinstance(config, NeighboursConfig):
            return tree, by_popularity(config, prepared, tree)
        model = fit(config, prepared, tree, device, folder, resume, deadline, last)
        prepared = replace(prepared, earlier=as_earlier(config, tree, model), shared_start=None)
    return tree, model
