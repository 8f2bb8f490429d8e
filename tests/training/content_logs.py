"""A log of users who each like items of one of 6 kinds; a table of the items, with the kind in the titles and in the tags, and with
infinite weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

KINDS, SIZE, USERS = 6, 20, 240


def write_log(folder: Path) -> tuple[Path, Path]:
    """The files of the log and of the items. 16 items of the kind are in each list, in random order."""
    log, items, rng = folder / "log.csv", folder / "items.parquet", np.random.default_rng(8)
    lines = ["user,item"]
    for user in range(USERS):
        lines += [f"user-{user},item-{item * KINDS + user % KINDS}" for item in rng.permutation(SIZE)[:16]]
    log.write_text("\n".join(lines) + "\n")
    count = KINDS * SIZE
    columns = {
        "id": [f"item-{item}" for item in range(count)],
        "title": [f"Kind{item % KINDS} number {item // KINDS % 4}" for item in range(count)],
        "tags": [[f"k{item % KINDS}"] for item in range(count)],
        "weight": np.where(np.arange(count) % 10 == 3, np.inf, rng.normal(size=count)),
    }
    pq.write_table(pa.table(columns), items)
    return log, items
