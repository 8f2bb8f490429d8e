"""`python -m benchmarks.gpu_all`: its stages run by themselves, nothing that is known is lost, and it goes on where it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.gpu_all import ROOT, WRONG, main
from benchmarks.gpu.lines import COLUMNS, latest, read
from benchmarks.gpu.stages import STAGES, Stage, groups

pytestmark = pytest.mark.release

Arguments = dict[str, Any]


def stage(name: str, function: str, given: Arguments | None = None, limit_s: float = 60, **more: Any) -> Stage:
    sizes = (given or {}, limit_s)
    return Stage(name, f"tests.benchmarks.gpu_stages:{function}", sizes, quick=sizes, **more)


def card() -> Stage:
    sizes = ({"name": "NVIDIA Test 1"}, 60.0)
    return Stage("card", "tests.benchmarks.gpu_stages:card", sizes, sizes, sizes)


def begun(out: Path) -> list[str]:
    """Which stages were begun, in their order."""
    return [row["stage"] for row in read(out / "gpu_all.jsonl") if row["case"] == "begin"]


def ends(out: Path) -> dict[str, str | None]:
    return {name: attempt.status for name, attempt in latest(read(out / "gpu_all.jsonl")).items()}


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has buried yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_run_leaves_lines_a_log_and_a_report_with_the_same_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report can be written again from the lines alone."""
    out, stages = tmp_path / "out", [card(), stage("two", "two", {"ran": str(tmp_path / "ran")})]
    with pytest.raises(SystemExit):
        main(["--out", str(out), "--summary"], stages)
    assert "holds no lines" in capsys.readouterr().err
    assert main(["--out", str(out)], stages) == 0
    rows = read(out / "gpu_all.jsonl")
    assert all(set(COLUMNS) <= set(row) for row in rows)
    assert [(row["stage"], row["case"]) for row in rows] == [
        ("card", "begin"), ("card", "device"), ("card", "end"), ("two", "begin"), ("two", "first"), ("two", "second"), ("two", "end")
    ]  # fmt: skip
    assert {row["card"] for row in rows if row["stage"] == "two"} == {"NVIDIA Test 1"}
    assert "case first" in (out / "gpu_all.log").read_text()
    assert "1 of 1 right: triton, mlp, float32, alone" in capsys.readouterr().out
    (file,) = out.glob("gpu_all_*")
    assert file.name == f"gpu_all_nvidia-test-1_{rows[0]['date'][:10]}.json"
    report = file.read_text()
    assert [row for row in json.loads(report)["rows"] if row["case"] == "first"] == [
        {"stage": "two", "case": "first", "ok": True, "ms": 1.5, "queries_per_s": 667, "card": "NVIDIA Test 1"}
    ]
    file.unlink()
    assert main(["--out", str(out), "--summary"], stages) == 0
    assert file.read_text() == report
    with pytest.raises(SystemExit):
        main(["--out", str(out), "--only", "two,three"], stages)
    assert "--only: got three, expected some of card, two" in capsys.readouterr().err


def test_a_stage_that_fails_leaves_its_lines_the_others_go_on_and_it_alone_is_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, ran, started = tmp_path / "out", tmp_path / "ran", tmp_path / "started"
    failing = [
        stage("crash", "crash"),
        stage("host", "no_memory", {"kind": "host"}),
        stage("memory", "no_memory", {"kind": "card"}),
        stage("killed", "killed"),
        stage("hang", "hang", {"started": str(started)}, limit_s=6),
        stage("wrong", "wrong"),
    ]
    stages = [card(), *failing, stage("two", "two", {"ran": str(ran)})]
    assert main(["--out", str(out)], stages) == WRONG
    memory = "out of memory"
    assert ends(out) == {
        **{"card": "done", "crash": "crashed", "host": memory, "memory": memory, "killed": "killed", "hang": "hung", "wrong": "done"},
        "two": "done",
    }
    rows = {name: [(row["case"], row["ok"]) for row in attempt.rows] for name, attempt in latest(read(out / "gpu_all.jsonl")).items()}
    assert rows["crash"] == [("before", True), ("crashed", False)]
    assert rows["host"] == rows["memory"] == [("before", True), (memory, False)]
    assert rows["killed"] == rows["hang"] == [("before", True)]
    assert not any(alive(int(pid)) for pid in started.read_text().split()), "all that a stage started ends with it"
    said = capsys.readouterr().out
    assert "WRONG  wrong  it  differs" in said
    assert "perhaps out of memory" in said
    first = begun(out)
    assert main(["--out", str(out), "--only", "crash,two"], stages) == WRONG
    assert begun(out) == [*first, "card", "crash"]
    assert main(["--out", str(out), "--again", "--only", "two"], stages) == WRONG  # what failed before is still in the report
    assert ran.read_text() == "ran\nran\n"


# -- the stages that there are --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "minutes"), [("full", 30), ("quick", 5)])
def test_all_stages_together_end_in_time(mode: Any, minutes: int) -> None:
    """On a machine with 16 cores, which runs 12 of a group at once; only what measures no time shares the machine."""
    limits_s = []
    for group in groups(tuple(stage for stage in STAGES if stage.of(mode) is not None)):
        assert len(group) <= 12
        limits_s.append(max(sizes[1] for stage in group if (sizes := stage.of(mode)) is not None))
    assert sum(limits_s) <= 60 * minutes
    assert len({stage.name for stage in STAGES}) == len(STAGES)
    sharing = {stage.function.split(":")[0].split(".")[-1] for stage in STAGES if stage.group}
    assert sharing == {"correctness", "catalogue_checks"}


def test_carried_wheels_are_of_the_tested_versions() -> None:
    lines = (ROOT / "benchmarks" / "gpu" / "wheels.txt").read_text().splitlines()
    carried = {line.lower() for line in lines if line and not line.startswith("#")}
    assert carried <= {line.lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
