"""benchmarks.store measures what it says, on a small version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.service.store import measure


@pytest.mark.slow
def test_every_step_has_a_rate_and_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "")  # the benchmark sets them; they are taken back after it
    found: Any = measure(20_000_000, 1, tmp_path)
    steps = {"file publish", "file fetch", "s3 publish", "s3 fetch"}
    assert found["mb_per_s"].keys() == steps | {"cp", "sha256sum", "cp + sha256sum"}
    assert all(rate > 0 for rate in found["mb_per_s"].values())
    assert found["memory_mb"].keys() == steps
    assert all(memory < 150 for memory in found["memory_mb"].values())
