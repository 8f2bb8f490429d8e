"""A log with planted clusters: 300 users, each with most of the 16 items of one of 8 clusters, in random order.

Whoever has seen half of a user's list knows the rest; popularity knows nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

CLUSTERS, SIZE, USERS = 8, 16, 300


def planted_log(folder: Path) -> Path:
    rng = np.random.default_rng(42)
    lines = ["user,item"]
    for user in range(USERS):
        cluster = user % CLUSTERS
        items = rng.permutation(SIZE)[:14] * CLUSTERS + cluster  # numbered across clusters: neighbours are strangers
        items[rng.integers(14)] = rng.integers(CLUSTERS * SIZE)  # one by accident
        lines += [f"user-{user},item-{item}" for item in items]
    file = folder / "log.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


def settings(log: Path, kind: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A small network and a few hundred steps; `sections` changes single keys."""
    plain: dict[str, Any] = {
        "kind": kind,
        "name": "planted",
        "data": {"log": str(log)},
        "instances": {"windows": [8, 4, 2], "targets": 20},
        "scorer": {"kind": "mlp", "node_dim": 8, "hidden": [32, 16]},
        "objective": {} if kind == "plt" else {"negatives": 40} if kind == "tdm" else {"beam_size": 10, "negatives": 40},
        "optimiser": {"steps": 150, "batch": 60, "learning_rate": 0.01, "average": 1},
        "search": {"beam_size": 20, "m": 10, "max_beam_size": 32, "max_m": 64},
        "memory": {"weight": 0, "repeat": "none"},
    }
    return plain | {name: plain[name] | section for name, section in sections.items()}
