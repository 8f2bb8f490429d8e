"""Made logs of text, read with some options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.data.interactions import Interactions, read_interactions
from training.specification.log_format import LOG_FORMAT

MOMENT = 1_700_000_000
ROWS = [(f"u{user}", f"i{(user + place) % 7}", MOMENT + 100 * place + user) for place in range(6) for user in range(20)]
"""User, item, seconds since 1970: 120 events of 20 users, oldest first."""


def read(file: Path, block_bytes: int = 1 << 24, **form: Any) -> Interactions:
    return read_interactions(file, LOG_FORMAT.checked({"min_user_events": 1, **form}), file.parent / "work", block_bytes=block_bytes)


def lists(log: Interactions) -> dict[str, list[str]]:
    items = log.item_ids.to_pylist()
    return {name: [items[row] for row in log.of(user)] for user, name in enumerate(log.user_ids.to_pylist())}


EXPECTED = {f"u{user}": [item for name, item, _ in ROWS if name == f"u{user}"] for user in range(20)}


def text(header: str, row: Callable[[str, str, int], str], end: str = "\n") -> str:
    return end.join([header, *(row(*event) for event in ROWS)]) + end
