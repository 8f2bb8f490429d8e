"""The protocol of unseen items: each set's own kind and settings, with content and items that nothing is learned from."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.quality.unseen import protocol

from training.specification.models import deep_config


@pytest.mark.parametrize(("order", "kind"), [("file", "otm-sequence"), ("none", "otm-robust")])
def test_a_set_keeps_its_kind_and_settings(order: str, kind: str) -> None:
    raw: dict[str, Any] = {"name": "books", "data": {"log": "log.csv", "format": {"order": order}}, "optimiser": {"learning_rate": 0.01}}
    before = deep_config(raw)
    config = protocol(before, 0.1, "auto", 30, None)
    assert (config.kind, config.content.columns, config.optimiser.steps) == (kind, "auto", 30)
    assert config.data.split.unseen_items == 0.1
    changed = {"content", "optimiser", "data"}
    assert config.model_dump(exclude=changed) == before.model_dump(exclude=changed)
    assert config.optimiser.learning_rate == 0.01
    assert protocol(before, 0.1, "auto", 10**6, None).optimiser.steps == before.optimiser.steps
