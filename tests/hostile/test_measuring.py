"""What is measured of a service under attack, where the service dies, grows, or the attack does not end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.hostile import measuring
from tests.hostile.attacked import Attacked, attacked
from tests.hostile.attacks import Attack, Seen, Target
from tests.hostile.conftest import LIMITS, books
from tests.hostile.livez import watched
from tests.hostile.measuring import measure
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.hostile]


def test_a_service_that_dies_makes_a_row_that_says_so(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SETTLE_S", 0.5)
    with attacked(large, tmp_path / "log", LIMITS.environment()) as service:

        def murder(target: Target) -> Seen:
            service.kill()
            service.process.wait()
            return Seen(True, "killed")

        row = measure(Attack(murder), service, books(service.port))
    assert {"died", "livez", "livez unanswered"} <= set(row["failed"])
    assert not row["ok"]
    assert row["told"].endswith("the service died")
    assert row["died"]
    assert (row["livez_ms_max"], row["attack"]) == (5000.0, "murder")


@pytest.mark.parametrize("limit", ["ATTACK_S", "GUARD_MB"])
def test_an_attack_that_lasts_or_takes_too_much_is_stopped(service: Attacked, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    def endless(target: Target) -> Seen:
        target.stop.wait(60)
        return Seen(True, "stopped" if target.stop.is_set() else "went on")

    monkeypatch.setattr(measuring, limit, 0.2 if limit == "ATTACK_S" else 0.75 * service.rss_mb())
    row = measure(Attack(endless), service, books(service.port))
    assert row["told"] == f"stopped; stopped: {row['stopped']}"
    assert row["stopped"].endswith(" s" if limit == "ATTACK_S" else " MB")
    assert "expected" in row["failed"]


def test_memory_and_descriptors_are_those_of_all_processes(large: Path, tmp_path: Path) -> None:
    patient = replace(LIMITS, head_timeout_s=60)  # else a slow machine closes the first connection before it accepts the last one
    with attacked(large, tmp_path / "log", patient.environment(), workers=2) as service:
        pids = service.processes()
        assert pids[0] == service.process.pid
        assert len(pids) >= 3
        service.forget_peak()
        assert 0.9 * service.rss_mb() <= service.peak_mb() <= 1.5 * service.rss_mb()
        before = service.descriptors()
        target = books(service.port)
        try:
            target.connect_many(10)
            until(lambda: service.descriptors() == before + 10, "all are accepted")
        finally:
            target.close()
        service.kill()
        service.process.wait()
        assert not service.alive()


def test_livez_is_asked_on_new_and_on_kept_connections(service: Attacked) -> None:
    with watched(service.port) as found:
        assert found == []
    assert found[0].failed == 0
    assert found[0].requests >= 2
    assert 0 < found[0].p99_ms <= found[0].max_ms < 5000
