"""Small tasks for baselines, made without a file."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from espalier.items import ItemTable
from training.data.interactions import Interactions
from training.data.splits import Split, halves
from training.retrieval.task import Metric, Task
from training.specification.deep import InstanceConfig
from training.specification.splits import UserSplit


def task_of(
    log: Interactions, train: list[int], validation: list[int], *, m: int = 1, exclude_seen: bool = True, seconds: float | None = None
) -> Task:
    """Training and validation users by row; the second half of a validation user's list is relevant."""
    pairs = halves(log, np.array(validation, np.int64), seed=1)
    split = Split(log, np.array(train, np.int64), validation=pairs, test=(), config=UserSplit())
    return Task(split, ItemTable.build(pa.table({"id": log.item_ids})), Metric("recall", m), exclude_seen, InstanceConfig(), 1, seconds)
