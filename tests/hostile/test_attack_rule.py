"""The benchmark of attacks: its rule, what it reads from connections, and what it says of services that are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.service import hostile
from benchmarks.service.hostile import main
from tests.hostile.attacks import Attack, Seen, Target
from tests.hostile.attacks.target import judged
from tests.hostile.measuring import Row, judge

QUIET: Row = {
    "attack": "nothing",
    "livez_ms_max": 99.0,
    "rss_mb_before": 100.0,
    "rss_mb_peak": 149.0,
    "rss_mb_after": 109.0,
    "ok": True,
    "rss_mb_bound": 150.0,
    "livez_ms_p99": 1.0,
    "livez_asked": 100,
    "livez_failed": 0,
    "livez_refused": 0,
    "descriptors_before": 20,
    "descriptors_after": 28,
    "log_kb": 0.0,
    "seconds": 1.0,
    "died": False,
    "stopped": "",
    "failed": [],
    "told": "nothing",
}


def nothing(target: Target) -> Seen:
    return Seen(True, "nothing")


PLAIN = Attack(nothing)


FILLS, BOUNDED = Attack(nothing, fills=True), Attack(nothing, bound_mb=50)


@pytest.mark.parametrize(
    ("attack", "changed", "failed"),
    [
        (PLAIN, {}, []),
        (PLAIN, {"died": True}, ["died"]),
        (PLAIN, {"stopped": "3000 MB"}, ["expected"]),
        (PLAIN, {"rss_mb_peak": 150.0}, []),
        (PLAIN, {"rss_mb_peak": 151.0}, ["peak"]),
        (PLAIN, {"rss_mb_after": 111.0}, ["after"]),
        (PLAIN, {"descriptors_after": 29}, ["descriptors"]),
        (PLAIN, {"livez_ms_max": 101.0}, ["livez"]),
        (PLAIN, {"livez_failed": 1}, ["livez unanswered"]),
        (PLAIN, {"livez_refused": 1}, ["livez unanswered"]),
        (FILLS, {"livez_refused": 5}, []),
        (FILLS, {"livez_failed": 5}, ["livez unanswered"]),
        (BOUNDED, {"rss_mb_after": 149.0}, []),
        (BOUNDED, {"rss_mb_after": 151.0}, ["after"]),
    ],
)
def test_each_part_of_the_rule_counts(attack: Attack, changed: dict[str, Any], failed: list[str]) -> None:
    """An attack on connections may have new ones refused, and what an attack may take the service may keep."""
    row: Row = QUIET | changed  # type: ignore[assignment]  # rows of a parametrised test
    assert judge(row, True, attack) == failed
    assert set(judge(row, False, attack)) == {"expected", *failed}


# -- the command ----------------------------------------------------------------------------------------------------------


def test_an_unknown_attack_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--attacks", "nothing,sabotage"])
    assert "--attacks: got sabotage, expected some of nothing, endless-header" in capsys.readouterr().err


@pytest.mark.parametrize(("failed", "code"), [([], 0), (["peak"], 1)])
def test_the_exit_code_says_whether_every_row_is_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def made_up(attack: Attack, models: Path, log: Path) -> Row:
        asked.append(attack.name)
        own = failed if attack.name == "churned" else []
        return QUIET | {"attack": attack.name, "failed": own, "ok": not own}

    monkeypatch.setattr(hostile, "attack_sample", made_up)
    written = tmp_path / "rows.json"
    assert main(["--models", str(tmp_path), "--attacks", "churned,endless-header", "--json", str(written)]) == code
    rows = json.loads(written.read_text())["rows"]
    assert [row["attack"] for row in rows] == asked == ["churned", "endless-header"]
    assert {"attack", "livez_ms_max", "rss_mb_before", "rss_mb_peak", "rss_mb_after", "ok"} <= set(rows[0])
    assert ("NOT OK (peak)" in capsys.readouterr().out) == bool(failed)


def test_outcomes_are_counted_and_judged() -> None:
    outcomes = ["408", "closed", "408"]
    told = "2 × 408, 1 × closed, expected 408 or closed"
    assert judged(outcomes, {"closed", "408"}) == (True, told)
    assert judged(outcomes, {"closed", "408"}, "so: ", held=False) == (False, f"so: {told}")
    assert not judged(outcomes, {"408"}).ok
    assert judged([], {"408"}) == (False, "nothing, expected 408")
