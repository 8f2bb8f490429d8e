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

    def __init__(self, models: Path, logs: Path, writes: bool = False) -> None:
        self.models, self.logs, self.writes = models, logs, writes
        self.stack, self.started = ExitStack(), 0
        self.service: Attacked | None = None

    def running(self) -> Attacked:
        if self.service is None:
            self.started += 1
            log = self.logs / f"{self.started}.log"
            self.service = self.stack.enter_context(attacked(self.models, log, LIMITS.environment(self.writes), descriptors=DESCRIPTORS))
        return self.service

    def harmed(self) -> None:
        self.stack.close()
        self.service = None


@pytest.fixture(scope="module")
def fleet(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(large, tmp_path_factory.mktemp("logs"))
    yield fleet
    fleet.harmed()


@pytest.fixture(scope="module")
def written(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet whose live catalogue is written to, over models of its own."""
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(large, models, dirs_exist_ok=True)
    fleet = Fleet(models, tmp_path_factory.mktemp("logs"), writes=True)
    yield fleet
    fleet.harmed()


def holds(fleet: Fleet, attack: Attack) -> None:
    service = fleet.running()
    row = measure(attack, service, books(service.port))
    if row["failed"]:
        fleet.harmed()
    small = {"after"} if row["rss_mb_after"] - row["rss_mb_before"] <= SMALL_MB else set()
    assert set(row["failed"]) <= CLOCK | small, line(row)


READING = {name: attack for name, attack in ATTACKS.items() if not attack.writes}
WRITING = {name: attack for name, attack in ATTACKS.items() if attack.writes}


@pytest.mark.parametrize("attack", READING.values(), ids=READING)
def test_the_service_holds_is_bounded_and_recovers(fleet: Fleet, attack: Attack) -> None:
    holds(fleet, attack)


@pytest.mark.parametrize("attack", WRITING.values(), ids=WRITING)
def test_the_live_catalogue_holds_is_bounded_and_recovers(written: Fleet, attack: Attack) -> None:
    holds(written, attack)
