"""Small interaction logs, made without a file."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from training.data.interactions import Interactions
from training.specification.log_format import Order


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
