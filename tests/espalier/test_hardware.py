"""How many threads training has: no more than a container's limit of processor time allows, which they would spend on waiting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from espalier import hardware


@pytest.mark.parametrize(
    ("limit", "affinity", "expected"),
    [("200000 100000", 8, 2), ("150000 100000", 8, 2), ("10000 100000", 8, 1), ("800000 100000", 2, 2), ("max 100000", 4, 4), (None, 4, 4)],
)
def test_cores_are_no_more_than_a_containers_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, affinity: int, expected: int
) -> None:
    monkeypatch.setattr(hardware, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    if limit is not None:
        hardware.QUOTA.write_text(limit + "\n")
    assert hardware.cores() == expected
    monkeypatch.setattr(os, "environ", {})
    hardware.limit_threads()
    assert os.environ.get("OMP_NUM_THREADS") == (str(expected) if expected < affinity else None)


@pytest.mark.parametrize("own", [None, "77"])
def test_training_limits_how_long_threads_spin_unless_the_environment_does(monkeypatch: pytest.MonkeyPatch, own: str | None) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if own is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", own)
    program = "import os, sys, training; assert 'torch' not in sys.modules; print(os.environ['GOMP_SPINCOUNT'])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout.strip() == (own or "1000")
