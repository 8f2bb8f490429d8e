"""What is measured of a service under attack, where the service dies, grows, or the attack does not end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile import measuring
from tests.hostile.attacked import Attacked, attacked
from tests.hostile.attacks import Attack, Seen, Target
from tests.hostile.conftest import LIMITS, books
from tests.hostile.measuring import measure

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
