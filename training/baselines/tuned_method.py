"""Chooses a method's options on validation queries, for baselines without training by gradient steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..retrieval.task import Deadline, Fitted, Task
from ..retrieval.tuning import Option, Options, Remembered, search

log = logging.getLogger(__name__)


def tune(
    task: Task,
    begin_s: float,
    deadline: Deadline,
    fitted: Callable[[Options], Fitted],
    start: Options,
    grid: Sequence[Option],
    queries: int,
    remembered: Remembered[Any] | None = None,
    **limits: Any,
) -> Fitted:
    """The method with the options that at most `queries` validation queries choose.

    begin_s     start of the fit, by `time.perf_counter`
    fitted      options → the method with these options; its `seconds` are ignored
    remembered  intermediate results that `fitted` keeps from trial to trial, if any
    limits      keyword arguments of `search`
    """
    pairs = task.validation_pairs(queries)
    log.info("options: %s", "; ".join(map(str, grid)))

    def figure(options: Options) -> float:
        return task.measured(fitted(options).rank, pairs)

    tuning = search(figure if remembered is None else remembered.watched(figure), [start], grid, deadline, **limits)
    best = fitted(tuning.best.options)
    return replace(best, seconds=time.perf_counter() - begin_s, trials=tuning.trials, ended=tuning.ended)


def bytes_of(*arrays: Any) -> int:
    """The bytes of arrays and of compressed sparse matrices."""
    return sum(array.nbytes if isinstance(array, np.ndarray) else bytes_of(array.data, array.indices, array.indptr) for array in arrays)
