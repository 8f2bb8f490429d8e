"""Made logs, and the configurations that `espalier new` writes for them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from training.new_configuration import write_configuration
from training.specification.models import SPECIFICATION

USERS, EVENTS, ITEMS = 40, 12, 30
Rows = list[tuple[str, str, int]]


def rows(events: int = EVENTS, seed: int = 1) -> Rows:
    """Users with so many items of one of three groups each: (user, item, seconds since 1970), oldest first."""
    rng = np.random.default_rng(seed)
    return [
        (f"u{user}", f"i{item * 3 + user % 3}", 1_500_000_000 + 100 * place + user)
        for place in range(events)
        for user, item in enumerate(rng.integers(0, ITEMS // 3, USERS))
    ]


def written(log: Path, kind: str | None = None, **given: str) -> dict[str, Any]:
    """The configuration for a log, as it stands in the file."""
    roles = dict.fromkeys(("user", "item", "time", "query")) | given
    file = write_configuration(log, log.with_name("new.toml"), True, kind, roles)
    raw = tomllib.loads(file.read_text())
    SPECIFICATION.checked(raw)
    return raw


def new(log: Path) -> tuple[dict[str, Any], str]:
    """The configuration that `new` writes, and the file's text."""
    return written(log), log.with_name("new.toml").read_text()
