"""The benchmark of the way through the code: what it trains is what the trainer reads. The command itself takes minutes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.speed import code_path
from training.specification.models import read_config


def test_its_configurations_are_what_the_trainer_reads(tmp_path: Path) -> None:
    code_path.write_data(tmp_path)
    planted, shop = (read_config(tmp_path / f"{name}.toml") for name in ("planted", "shop"))
    assert (planted.kind, shop.kind) == ("otm-robust", "xr-linear")
    assert {body["model"] for body in code_path.BODIES.values()} == {planted.name, shop.name}
