"""Small interaction logs, tasks for baselines, and their time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from espalier.items import ItemTable
from training.data.interactions import Interactions
from training.data.splits import Split, halves
from training.retrieval.task import Metric, Task
from training.specification.deep import InstanceConfig
from training.specification.log_format import Order
from training.specification.splits import UserSplit


def log_of(lists: list[list[int]], order: Order = "file", items: int | None = None) -> Interactions:
    """One user per list of item rows; `items` where the catalogue is larger than what the lists name."""
    offset = np.concatenate([[0], np.cumsum([len(rows) for rows in lists])]).astype(np.int64)
    count = items if items is not None else max(row for rows in lists for row in rows) + 1
    return Interactions(
        user_ids=pa.array([f"u{user}" for user in range(len(lists))]),
        item_ids=pa.array([f"i{row}" for row in range(count)]),
        offset_U1=offset,
        item_of_event_E=np.array([row for rows in lists for row in rows], np.int32),
        category_of_item_I=None,
        category_names=(),
        fingerprint="",
        order=order,
    )


def split_of(log: Interactions, train: int, validation: int, test: int, seed: int = 1) -> Split:
    """OTM's protocol with these users: the first so many train, the next so many choose, the last so many are measured on."""
    ends = np.cumsum([train, validation, test])
    parts = [halves(log, np.arange(end - count, end), seed=seed) for count, end in zip((validation, test), ends[1:], strict=True)]
    return Split(log, np.arange(train), validation=parts[0], test=parts[1], config=UserSplit())


def task_of(
    log: Interactions, train: list[int], validation: list[int], *, m: int = 1, exclude_seen: bool = True, seconds: float | None = None
) -> Task:
    """Training and validation users by row; the second half of a validation user's list is relevant."""
    pairs = halves(log, np.array(validation, np.int64), seed=1)
    split = Split(log, np.array(train, np.int64), validation=pairs, test=(), config=UserSplit())
    return Task(split, ItemTable.build(pa.table({"id": log.item_ids})), Metric("recall", m), exclude_seen, InstanceConfig(), 1, seconds)


def written_log(file: Path) -> Path:
    """Events of 120 users, 30 each, of 60 items of which few are often used."""
    rng = np.random.default_rng(2)
    lines = [f"u{u},i{i},{t}" for u in range(120) for t, i in enumerate(rng.zipf(1.6, 30) % 60)]
    file.write_text("\n".join(["user,item,time", *lines]) + "\n")
    return file


class Clock:
    """A time that passes when it is told to."""

    now_s = 50.0

    def monotonic(self) -> float:
        return self.now_s

    __call__ = perf_counter = monotonic
