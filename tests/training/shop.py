"""A shop of coloured things: a table of its items, a log of what was searched for and bought, and the configuration of a model of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from tests.training.commands import written_toml

COLOURS = ["red", "green", "blue", "yellow", "black", "white"]
THINGS = ["teapot", "kettle", "lamp", "chair", "table", "spoon", "ladder", "bucket"]
IDS = [f"{colour}-{thing}" for colour in COLOURS for thing in THINGS]
PATTERNS = ("{}", "{} for my kitchen", "buy a {}", "cheap {}s")


def item_frame(ids: Sequence[str]) -> pl.DataFrame:
    rows = [(item, item.replace("-", " ").title(), item.split("-")[0], ["goods", item.split("-")[1]], len(item)) for item in ids]
    return pl.DataFrame(rows, schema=["id", "title", "colour", "tags", "price"], orient="row")


def write_shop(folder: Path, **sections: dict[str, Any]) -> Path:
    """shop.toml, with items.parquet and log.csv beside it; `sections` adds keys to it. A pair of the log was seen 1 to 4 times."""
    item_frame(IDS).write_parquet(folder / "items.parquet")
    log = [(pattern.format(item.replace("-", " ")), item, 1 + (7 * i) % 4) for item in IDS for i, pattern in enumerate(PATTERNS)]
    pl.DataFrame(log, schema=["query", "item", "times"], orient="row").write_csv(folder / "log.csv")
    raw: dict[str, Any] = {
        "kind": "xr-linear",
        "name": "shop",
        "data": {
            "format": "log",
            "train": str(folder / "log.csv"),
            "items": str(folder / "items.parquet"),
            "own_texts": ["title"],
        },
        "tree": {"branching": 4, "max_leaf": 8},
    }
    raw |= {name: raw.get(name, {}) | section for name, section in sections.items()}
    return written_toml(folder / "shop.toml", raw)
