"""`python -m benchmarks.gpu_all`: its stages run by themselves, nothing that is known is lost, and it goes on where it ended."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from benchmarks.gpu import gpu_report
from benchmarks.gpu.gpu_all import MORE, NO_GPU, ROOT, WRONG, main
from benchmarks.gpu.lines import COLUMNS, append, latest, read
from benchmarks.gpu.stages import STAGES, Stage, groups
from tests.waiting import until

pytestmark = pytest.mark.slow

Arguments = dict[str, Any]


def stage(name: str, function: str, given: Arguments | None = None, limit_s: float = 60, **more: Any) -> Stage:
    sizes = (given or {}, limit_s)
    return Stage(name, f"tests.benchmarks.gpu_stages:{function}", sizes, quick=sizes, **more)


def card(name: str | None = "NVIDIA Test 1") -> Stage:
    sizes = ({"name": name}, 60.0)
    return Stage("card", "tests.benchmarks.gpu_stages:card", sizes, sizes, sizes)


def rows_of(out: Path, stage_: str) -> list[tuple[str, bool | None]]:
    """Cases and whether they are right, of the last attempt."""
    return [(row["case"], row["ok"]) for row in latest(read(out / "gpu_all.jsonl"))[stage_].rows]


def status_of(out: Path, stage_: str) -> str | None:
    return latest(read(out / "gpu_all.jsonl"))[stage_].status


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has buried yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_run_leaves_lines_a_log_and_a_report_with_the_same_columns(tmp_path: Path) -> None:
    stages = [card(), stage("two", "two", {"ran": str(tmp_path / "ran")})]
    assert main(["--out", str(tmp_path / "out")], stages) == 0
    rows = read(tmp_path / "out" / "gpu_all.jsonl")
    assert all(set(COLUMNS) <= set(row) for row in rows)
    assert [(row["stage"], row["case"]) for row in rows] == [
        ("card", "begin"), ("card", "device"), ("card", "end"), ("two", "begin"), ("two", "first"), ("two", "second"), ("two", "end")
    ]  # fmt: skip
    assert {row["card"] for row in rows if row["stage"] == "two"} == {"NVIDIA Test 1"}
    written = sorted(path.name for path in (tmp_path / "out").glob("gpu_all_*"))
    date = rows[0]["date"][:10]
    assert written == [f"gpu_all_nvidia-test-1_{date}.json", f"gpu_all_nvidia-test-1_{date}.md"]
    saved = json.loads((tmp_path / "out" / written[0]).read_text())
    assert [row for row in saved["rows"] if row["case"] == "first"] == [
        {"stage": "two", "case": "first", "ok": True, "ms": 1.5, "queries_per_s": 667, "card": "NVIDIA Test 1"}
    ]
    assert "| first | yes | 1.5 | 667 |" in (tmp_path / "out" / written[1]).read_text()
    assert "case first" in (tmp_path / "out" / "gpu_all.log").read_text()


def test_a_complete_stage_is_not_run_again_and_a_failed_one_is(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    stages = [card(), stage("crash", "crash"), stage("two", "two", {"ran": str(ran)})]
    for _ in range(2):
        assert main(["--out", str(tmp_path / "out")], stages) == WRONG
    begun = [row["stage"] for row in read(tmp_path / "out" / "gpu_all.jsonl") if row["case"] == "begin"]
    assert begun == ["card", "crash", "two", "card", "crash"]
    assert ran.read_text() == "ran\n"
    assert main(["--out", str(tmp_path / "out"), "--again", "--only", "two"], stages) == WRONG  # what failed before is still in the report
    assert ran.read_text() == "ran\nran\n"


def test_what_never_ended_is_run_before_what_failed(tmp_path: Path) -> None:
    out, ran = tmp_path / "out", str(tmp_path / "ran")
    assert main(["--out", str(out), "--only", "crash"], [card(), stage("crash", "crash")]) == WRONG
    lines = read(out / "gpu_all.jsonl")
    key = next(row["key"] for row in lines if row["stage"] == "crash" and row["case"] == "begin")
    append(out / "gpu_all.jsonl", {"stage": "two", "case": "begin", "key": key, "date": "2026-01-01"})  # and then the machine went
    main(["--out", str(out)], [card(), stage("crash", "crash"), stage("two", "two", {"ran": ran})])
    begun = [row["stage"] for row in read(out / "gpu_all.jsonl")[len(lines) + 1 :] if row["case"] == "begin"]
    assert begun == ["card", "two", "crash"]


def test_lines_of_another_card_size_or_code_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, ran = ["--out", str(tmp_path / "out")], tmp_path / "ran"

    def runs(arguments: list[str], name: str) -> int:
        main([*out, *arguments], [card(name), stage("two", "two", {"ran": str(ran)})])
        return len(ran.read_text().splitlines())

    assert [runs([], "one"), runs([], "one"), runs([], "other"), runs(["--quick"], "other"), runs(["--quick"], "other")] == [1, 1, 2, 3, 3]
    monkeypatch.setattr("benchmarks.gpu.gpu_all.digest", lambda versions: "changed")
    assert runs(["--quick", "--keep"], "other") == 3
    assert runs(["--quick"], "other") == 4


@pytest.mark.parametrize(
    ("function", "given", "status", "case"),
    [
        ("crash", {}, "crashed", "crashed"),
        ("no_memory", {"kind": "host"}, "out of memory", "out of memory"),
        ("no_memory", {"kind": "card"}, "out of memory", "out of memory"),
        ("killed", {}, "killed", None),
    ],
)
def test_a_stage_that_fails_leaves_its_lines_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, given: Arguments, status: str, case: str | None
) -> None:
    out = tmp_path / "out"
    assert main(["--out", str(out)], [card(), stage("bad", function, given), stage("two", "two", {"ran": str(tmp_path / "ran")})]) == WRONG
    assert rows_of(out, "bad") == [("before", True)] + ([(case, False)] if case else [])
    assert status_of(out, "bad") == status
    assert status_of(out, "two") == "done"
    assert "WRONG  bad" in capsys.readouterr().out
    if case is None:
        assert "perhaps out of memory" in next(out.glob("*.jsonl")).read_text()


def test_a_stage_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    out, started = tmp_path / "out", tmp_path / "started"
    stages = [card(), stage("hang", "hang", {"started": str(started)}, limit_s=3), stage("two", "two", {"ran": str(tmp_path / "ran")})]
    assert main(["--out", str(out)], stages) == WRONG
    assert rows_of(out, "hang") == [("before", True)]
    assert status_of(out, "hang") == "hung"
    assert status_of(out, "two") == "done"
    assert not any(alive(int(pid)) for pid in started.read_text().split())


def test_a_stage_begins_no_case_when_its_time_is_over(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["--out", str(out)], [card(), stage("endless", "endless", limit_s=2)]) == 0
    *cases, last = latest(read(out / "gpu_all.jsonl"))["endless"].rows
    assert [row["case"] for row in cases] == [f"case {number}" for number in range(len(cases))]
    assert (last["case"], last["ok"]) == ("the rest", None)
    assert "left out" in last["note"]
    assert status_of(out, "endless") == "cut"
    assert main(["--out", str(out)], [card(), stage("endless", "endless", limit_s=2)]) == 0
    assert len([row for row in read(out / "gpu_all.jsonl") if row["case"] == "begin" and row["stage"] == "endless"]) == 1


def test_a_run_ends_in_its_minutes_and_the_next_one_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    stages = [card(), stage("endless", "endless", limit_s=24), stage("two", "two", {"ran": str(tmp_path / "ran")}, limit_s=60)]
    assert main([*out, "--minutes", "0.25"], stages) == MORE
    assert status_of(tmp_path / "out", "endless") == "cut early"
    assert "left for the next run: endless, two" in capsys.readouterr().out
    stages[1] = stage("endless", "endless", limit_s=2)
    assert main(out, stages) == 0
    assert status_of(tmp_path / "out", "endless") == "cut"


def test_something_wrong_is_said_and_is_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path)], [card(), stage("wrong", "wrong")]) == WRONG
    assert status_of(tmp_path, "wrong") == "done"
    assert "WRONG  wrong  it  differs" in capsys.readouterr().out
    assert "| wrong | it | differs |" in next(tmp_path.glob("*.md")).read_text()


def test_without_a_gpu_it_says_so_and_runs_what_needs_none_in_the_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, to = tmp_path / "out", tmp_path / "mode"
    sizes = ({"to": str(to)}, 60.0)
    stages = [card(None), stage("mode", "mode", {"to": str(to)}, without_gpu=sizes), stage("two", "two", {"ran": str(tmp_path / "ran")})]
    assert main(["--out", str(out), "--quick"], stages) == NO_GPU
    assert to.read_text() == "1"
    assert "no NVIDIA GPU, not run: two" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert next(out.glob("*.json")).name.startswith("gpu_all_no-gpu_")
    assert main(["--out", str(out), "--quick"], [card(), *stages[1:]]) == 0
    assert to.read_text() == "compiled"


def test_the_report_can_be_written_again_from_the_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [card(), stage("wrong", "wrong")]
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--summary"], stages)
    assert "holds no lines" in capsys.readouterr().err
    assert main(["--out", str(tmp_path)], stages) == WRONG
    written = {path: path.read_text() for path in tmp_path.glob("gpu_all_*")}
    for path in written:
        path.unlink()
    assert main(["--out", str(tmp_path), "--summary"], stages) == WRONG
    assert {path: path.read_text() for path in tmp_path.glob("gpu_all_*")} == written
    assert len(written) == 2


def test_unknown_stages_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--only", "two,three"], [card(), stage("two", "two")])
    assert "--only: got three, expected some of card, two" in capsys.readouterr().err


COMMAND = """
import sys
from benchmarks.gpu.stages import Stage
from benchmarks.gpu.gpu_all import main
card = Stage("card", "tests.benchmarks.gpu_stages:card", ({"name": "one"}, 60))
hang = Stage("hang", "tests.benchmarks.gpu_stages:hang", ({"started": sys.argv[2]}, 300))
sys.exit(main(["--out", sys.argv[1]], [card, hang]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_the_lines_and_no_process(tmp_path: Path, number: signal.Signals) -> None:
    out, started = tmp_path / "out", tmp_path / "started"
    run = subprocess.Popen([sys.executable, "-c", COMMAND, str(out), str(started)], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        until(lambda: any(row["case"] == "before" for row in read(out / "gpu_all.jsonl")), "the stage began", within_s=60)
        run.send_signal(number)
        assert run.wait(60) == (MORE if number == signal.SIGTERM else -signal.SIGKILL)
    finally:
        run.kill()
        run.wait()
    until(lambda: not any(alive(int(pid)) for pid in started.read_text().split()), "the stage and its child ended", within_s=60)
    assert rows_of(out, "hang") == [("before", True)]
    assert status_of(out, "hang") is None
    assert bool(list(out.glob("gpu_all_*.md"))) == (number == signal.SIGTERM)


def test_a_torn_line_is_no_row_and_does_not_tear_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append(path, {"stage": "s", "case": "one"})
    with path.open("a") as file:
        file.write('{"stage": "s", "ca')
    append(path, {"stage": "s", "case": "two", "ok": True})
    append(path, {"stage": "s", "case": "three"})
    assert [row["case"] for row in read(path)] == ["one", "two", "three"]
    assert read(tmp_path / "none.jsonl") == []


# -- the stages that there are --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "minutes"), [("full", 30), ("quick", 5)])
def test_all_stages_together_end_in_time(mode: Any, minutes: int) -> None:
    """On a machine with 16 cores, which runs 8 of a group at once."""
    limits_s = []
    for group in groups(tuple(stage for stage in STAGES if stage.of(mode) is not None)):
        assert len(group) <= 8
        limits_s.append(max(sizes[1] for stage in group if (sizes := stage.of(mode)) is not None))
    assert sum(limits_s) <= 60 * minutes


def test_stages_have_names_of_their_own_and_only_what_measures_no_time_shares_the_machine() -> None:
    assert len({stage.name for stage in STAGES}) == len(STAGES)
    sharing = {stage.function.split(":")[0].split(".")[-1] for stage in STAGES if stage.group}
    assert sharing == {"correctness", "catalogue_checks", "memory_accesses"}


def test_a_run_on_another_set_of_cores_has_the_same_stages() -> None:
    assert [stage.name for group in groups(STAGES) for stage in group] == [stage.name for stage in STAGES]


WHEELS = ROOT / "benchmarks" / "gpu" / "wheels.txt"
IMPORTS = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*{n.split('.')[0] for n in sys.modules})"


def wheels() -> tuple[dict[NormalizedName, str], set[NormalizedName]]:
    """The wheels that are carried, with their versions, and what a machine has of its own."""
    lines = WHEELS.read_text().splitlines()
    carried = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in carried.items()}, {
        canonicalize_name(name) for line in lines if line.startswith("# base:") for name in line.split()[2:]
    }


def needs(name: NormalizedName) -> set[NormalizedName]:
    """What a package that is installed here needs."""
    try:
        wanted = map(Requirement, metadata.requires(name) or ())
    except metadata.PackageNotFoundError:
        return set()
    return {canonicalize_name(need.name) for need in wanted if need.marker is None or need.marker.evaluate({"extra": ""})}


def closed(names: set[NormalizedName]) -> set[NormalizedName]:
    """Packages and all that they need."""
    found, new = set(names), set(names)
    while new:
        new = {need for name in new for need in needs(name)} - found
        found |= new
    return found


def test_carried_wheels_are_of_the_tested_versions_and_need_nothing_that_is_missing() -> None:
    carried, base = wheels()
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line[0] != "#")}
    assert {name: version for name, version in pinned.items() if name in carried} == carried
    missing = {need for name in carried for need in needs(name)} - set(carried) - base
    assert missing == set()


def test_the_stages_import_nothing_but_what_a_machine_has_or_is_carried() -> None:
    carried, base = wheels()
    modules = {stage.function.split(":")[0] for stage in STAGES}
    if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
        pytest.skip("triton is not installed")
    from benchmarks.gpu.gpu_service import NEEDED  # it imports triton

    command = [sys.executable, "-c", IMPORTS, *sorted(modules), "service.__main__", "benchmarks.gpu.gpu_all", *NEEDED]
    imported = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    allowed, sources = closed(set(carried) | base) | {canonicalize_name("espalier")}, metadata.packages_distributions()
    assert {"torch", "triton", "fastapi", "pydantic"} <= set(imported)
    named = {module: {canonicalize_name(name) for name in sources[module]} for module in imported if module in sources}
    without = {"yaml", "charset_normalizer", "watchfiles"}  # others import them where they are there, and do without
    assert {module: names for module, names in named.items() if not names & allowed and module not in without} == {}


# -- the report -----------------------------------------------------------------------------------------------------------


def test_the_report_counts_what_is_right_and_says_which_targets_are_reached(tmp_path: Path) -> None:
    lines = tmp_path / "gpu_all.jsonl"

    def attempt(name: str, *rows: Arguments) -> None:
        common: Arguments = {"stage": name, "card": "H200"}
        append(lines, common | {"case": "begin", "key": "k", "date": "2026-12-01T10:00:00+00:00"})
        for row in rows:
            append(lines, common | row)
        append(lines, common | {"case": "end", "ok": True, "status": "done", "ms": 1500})

    attempt("card", {"case": "device", "gpu": True, "card": "NVIDIA H200", "versions": {"torch": "2.11", "triton": None}, "host": "h"})
    labels = {"engine": "triton", "form": "mlp", "precision": "float16"}
    attempt(
        "correctness-triton-float16",
        {"case": "a", "ok": True, "check": "integer"} | labels,
        {"case": "b | c", "ok": False, "check": "integer", "note": "differs"} | labels,
        {"case": "d", "ok": True, "check": "replay"} | labels,
    )
    searched = {"engine": "triton", "items": 1 << 20, "masked": False, "ok": True, "batch": 1}
    attempt(
        "search-2^20",
        searched | {"case": "e", "beam_size": 50, "ms": 0.05, "queries_per_s": 20000},
        searched | {"case": "f", "beam_size": 200, "ms": 0.08, "queries_per_s": 12500},
        searched | {"case": "g", "beam_size": 400, "batch": 512, "ms": 0.4, "queries_per_s": 1280000},
    )
    as_json, as_text = gpu_report.write(lines, tmp_path, "the command")
    text = as_text.read_text()
    assert as_json.name == "gpu_all_nvidia-h200_2026-12-01.json"
    assert "torch 2.11, triton –" in text
    assert "| triton | mlp | float16 | 1 of 2 | 1 of 1 |" in text
    assert "| correctness-triton-float16 | b \\| c | differs |" in text
    assert "| one query, 2^20 items, 128–64–24, beam 50 | ≤ 0.06 ms | 0.05 ms | yes |" in text
    assert "| one query, 2^20 items, 128–64–24, beam 200 | ≤ 0.07 ms | 0.08 ms | no |" in text
    assert "| 512 queries, 2^20 items, 128–64–24, beam 400 | ≥ 1,200,000 queries/s | 1,280,000 queries/s | yes |" in text
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        *("## Stages", "## What is wrong", "## Correctness", "## Targets", "## card", "## search-2^20")
    ]
