"""SASRec (Kang & McAuley 2018, arXiv 1808.09781) with a softmax over the whole catalogue, or over thousands of shared negatives.

Knows which configurations are tried on a log. Does not know how a step is made. SASRec's published results suffered mostly from its binary
loss with one negative (Klenitskiy & Vasilev 2023, arXiv 2309.07602). One table holds items as inputs and as targets. It starts from vectors
of which item follows which, which saves most epochs. Search is exact.

    P(i | history) = softmax_i ⟨h, v_i⟩,   h = the encoder's state at the last item

A fit is a function of task, configuration and seed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from espalier.errors import InvalidConfig, InvalidData

from ..baselines.sasrec_model import ROUNDS, VALIDATION_QUERIES, SasRec, SasRecConfig, Training, start_table, steps_of
from ..deep.fit import computes_in_bfloat16
from ..deep.sequence.rules import history_length, places_of_a_batch
from ..retrieval.needs import Needs, of_steps, seconds_each
from ..retrieval.task import Fitted, Task, Trial

log = logging.getLogger(__name__)

Loss = Literal["full", "sampled"]
WHOLE_ITEMS = 10_000
"""Most items for which the whole softmax is the default: it then costs about as much as the encoder."""
MAX_BYTES = 8 << 30
"""Most bytes of item tables in training."""
TIMED_QUERIES = 50
FEW_EVENTS = 50
"""With fewer events an item, the stronger dropout is tried first."""


def fit_sasrec(task: Task, candidates: Sequence[SasRecConfig]) -> Fitted:
    """The best of some configurations by the task's metric, each with the weights of its best round.

    One after another trains until its figure has stopped rising, and then while its learning rate falls. None is given up early: with
    dropout, a model that ends higher often starts lower. A deadline ends the current one, whose rate falls before it. The first trains on
    at least one batch.
    """
    begin, deadline = time.monotonic(), task.deadline()
    tables: dict[tuple[int, str, float], Tensor] = {}
    trials: list[Trial] = []
    best: SasRec | None = None
    ended: str | None = None
    share = 0.0
    for config in candidates:
        if trials and deadline.is_over():
            ended = ended or f"the deadline left no time for {len(candidates) - len(trials)} of {len(candidates)} configurations"
            break
        log.info("sasrec %s", config)
        key = (config.width, config.init, config.init_std)
        if key not in tables:
            tables[key] = start_table(task, config)
        training = Training(task, config, tables[key])
        while not training.is_over and not (training.curve and deadline.is_over()):
            training.round(deadline)
        steps = steps_of(task, config)
        if not training.is_over:
            ended = f"{training.step:,} of {max(steps, training.step):,} steps of configuration {len(trials) + 1} of {len(candidates)}"
        share = max(share, 1.0 if training.is_over else min(1.0, training.step / steps))
        if best is None or training.best > max(trial.figure for trial in trials):
            best = training.best_model
        trials.append(Trial(asdict(config), training.best))
        del training  # frees its gradients and moments before the next one allocates its own
    if best is None:
        raise InvalidConfig("candidates", candidates, "at least one")
    return Fitted(
        rank=best.rank,
        options=max(trials, key=lambda trial: trial.figure).options,
        trials=trials,
        bytes=best.bytes,
        seconds=time.monotonic() - begin,
        ended=ended,
        share=share,
    )


def needs(task: Task, loss: Loss | None = None) -> Needs:
    """The needs of the first configuration's steps and measurements; full_s is for all configurations. loss: as in `sasrec`."""
    configs = grid(task, loss)
    config = replace(configs[0], init="random")  # a random table takes no time to make
    training, steps = Training(task, config, start_table(task, config)), steps_of(task, config)
    batch, _ = next(training.batches)
    step_s = seconds_each(lambda: float(training.update(batch)), task.clock)
    pairs, timed_pairs = task.validation_pairs(VALIDATION_QUERIES), task.validation_pairs(TIMED_QUERIES)
    query_s = seconds_each(lambda: task.measured(training.copied().rank, timed_pairs), task.clock) / len(timed_pairs)
    first_needs = of_steps(0.0, step_s + ROUNDS * query_s * len(pairs) / steps, steps)
    return replace(first_needs, full_s=len(configs) * first_needs.full_s)


def sasrec(task: Task, loss: Loss | None = None) -> Fitted:
    """SASRec with the softmax over the catalogue, or over sampled negatives. None: sampled above WHOLE_ITEMS items."""
    return fit_sasrec(task, grid(task, loss))


def grid(task: Task, loss: Loss | None = None) -> list[SasRecConfig]:
    """Configurations with dropout 0.5 and 0.2. The one that suits the log's events an item comes first: there may be no time for the other.

    Rules set the other options: histories as long as 99 of 100 lists, from 50 to 200 places; some 400 steps an epoch in batches of 1,024 to
    4,096 places; the width is halved, down to 32, until training fits in MAX_BYTES. Raises InvalidData if it does not fit.
    """
    lists, users = task.split.lists, task.split.train
    loss = loss or ("full" if lists.item_count <= WHOLE_ITEMS else "sampled")
    length_U = np.diff(lists.offset_U1)[users]
    width = next((width for width in (128, 64, 32) if _training_bytes(lists.item_count, width) <= MAX_BYTES), None)
    if width is None:
        needed = f"{lists.item_count} items, whose training takes {_training_bytes(lists.item_count, 32)} bytes at width 32"
        raise InvalidData("log", needed, f"at most {MAX_BYTES} bytes")
    sparse = length_U.sum() < FEW_EVENTS * lists.item_count
    common = SasRecConfig(
        width=width,
        length=history_length(lists, users),
        loss=loss,
        places=places_of_a_batch(lists, users),
        bfloat16=computes_in_bfloat16(torch.device("cpu")),
    )
    return [replace(common, dropout=dropout) for dropout in ((0.5, 0.2) if sparse else (0.2, 0.5))]


def _training_bytes(items: int, width: int) -> int:
    """Bytes of tables in training: the trained one, two gradients, two moments, the start, the average, its copy, the best of two fits."""
    return 10 * 4 * items * width
