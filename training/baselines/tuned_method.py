"""A method whose options validation queries choose: what baselines without training by gradient steps share."""

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
    """The method with the options that at most so many validation queries choose.

    begin_s     when it began to fit, by `time.perf_counter`
    fitted      with some options; what it took is not counted there
    remembered  what `fitted` keeps from trial to trial, where it keeps something
    limits      those of `search`
    """
    pairs = task.validation_pairs(queries)
    log.info("options: %s", "; ".join(map(str, grid)))

    def figure(options: Options) -> float:
        return task.measured(fitted(options).rank, pairs)

    found = search(figure if remembered is None else remembered.watched(figure), [start], grid, deadline, **limits)
    best = fitted(found.best.options)
    return replace(best, seconds=time.perf_counter() - begin_s, trials=found.trials, ended=found.ended)


def bytes_of(*arrays: Any) -> int:
    """Of arrays and of compressed sparse matrices."""
    return sum(array.nbytes if isinstance(array, np.ndarray) else bytes_of(array.data, array.indices, array.indptr) for array in arrays)
