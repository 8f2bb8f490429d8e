"""Every attack of `python -m benchmarks.hostile`, on a service with short time-outs: its memory is bounded, and as before afterwards.

How fast /livez was is measured there; here it must have been answered.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hostile.attacked import Attacked, attacked
from tests.hostile.attacks import ATTACKS, Attack
from tests.hostile.attacks.connections import DESCRIPTORS
from tests.hostile.conftest import LIMITS, books
from tests.hostile.measuring import line, measure

pytestmark = [pytest.mark.slow, pytest.mark.hostile]
SMALL_MB = 40
"""What an allocator keeps of a burst is a tenth of so small a service; the benchmark judges by a real model."""
CLOCK = {"livez", "livez unanswered"}
"""What a busy machine may break."""


class Fleet:
    """One service for all attacks; another one after an attack that it did not survive unharmed."""

    def __init__(self, models: Path, logs: Path) -> None:
        self.models, self.logs = models, logs
        self.stack, self.started = ExitStack(), 0
        self.service: Attacked | None = None

    def running(self) -> Attacked:
        if self.service is None:
            self.started += 1
            log = self.logs / f"{self.started}.log"
            environment = LIMITS.environment(writes=True)
            self.service = self.stack.enter_context(attacked(self.models, log, environment, descriptors=DESCRIPTORS))
        return self.service

    def harmed(self) -> None:
        self.stack.close()
        self.service = None


@pytest.fixture(scope="module")
def fleet(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Over models of its own, whose live catalogue the last attacks write to."""
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(large, models, dirs_exist_ok=True)
    fleet = Fleet(models, tmp_path_factory.mktemp("logs"))
    yield fleet
    fleet.harmed()


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_the_service_holds_is_bounded_and_recovers(fleet: Fleet, attack: Attack) -> None:
    service = fleet.running()
    row = measure(attack, service, books(service.port))
    if row["failed"]:
        fleet.harmed()
    small = {"after"} if row["rss_mb_after"] - row["rss_mb_before"] <= SMALL_MB else set()
    assert set(row["failed"]) <= CLOCK | small, line(row)
