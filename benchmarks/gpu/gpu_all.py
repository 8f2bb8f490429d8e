"""All measurements of a GPU by one command: whether the engines are right on this card, how fast they are, and what limits them.

    python -m benchmarks.gpu_all --out DIR [--quick] [--minutes N] [--only STAGE,STAGE] [--again] [--keep]
    python -m benchmarks.gpu_all --out DIR --summary

Stages (benchmarks/gpu/stages.py), each in a process of its own with a time limit: the card and its versions; correctness of `triton`,
`sparse-cuda` and `onnx-cuda` beside the reference; search beside torch, ONNX Runtime and brute force; linear scorers at 2^20 labels; a
profile; the service; training; sizes of tiles. All of them take at most 17 minutes, with --quick 5.

DIR/gpu_all.jsonl gets each result at once as a line, DIR/gpu_all.log the output of the stages. At the end, also after a signal, the report
is written: DIR/gpu_all_<card>_<date>.json; the number of correct checks of each engine is printed. To continue, run it again with the same
DIR: stages with complete lines of this card, code and versions are skipped; stages that never ended run before those that failed. If a
stage crashes, hangs or runs out of memory, a line says so, and the other stages run.

--minutes  end within this time, and begin no stage with less than half of its time limit; then run it again
--only     run only these stages, and `card`
--again    also run stages whose lines are complete
--keep     lines of other code and versions count as complete
--summary  only write the report of the lines in DIR

Exit status: 0 all is done and right; 1 a check or a stage failed; 2 there is no NVIDIA GPU: only correctness was checked, on tiny trees in
Triton's interpreter; 3 stages are left for the next run. Needs this repository and the packages of `benchmarks/gpu/wheels.txt`, but neither
network nor test suite.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from benchmarks.gpu.lines import BEGIN, COMPLETE, END, Attempt, Row, append, latest, read
from benchmarks.gpu.stage import STATUS
from benchmarks.gpu.stages import CARD, STAGES, Mode, Stage, groups

ROOT = Path(__file__).parents[2]
CODE = ("espalier", "training", "service", "loadtest", "benchmarks")
WRONG, NO_GPU, MORE = 1, 2, 3
SPARE = 0.12
"""Share of a stage's time, at its end, in which the stage begins no further case."""
LEAST_S = 10.0
"""A stage needs at least this to begin."""
INTERRUPTED, CUT_EARLY = "interrupted", "cut early"
"""A signal or --minutes ended the stage. It runs again like a stage that never ran."""


@dataclass
class Run:
    """One run of the command.

    end     time.monotonic() after which nothing may run; None: no limit
    key     card, mode, code and versions; lines with another key do not count
    """

    out: Path
    mode: Mode
    card: str | None
    key: str
    end: float | None
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def lines(self) -> Path:
        return self.out / "gpu_all.jsonl"

    def left_s(self) -> float:
        return float("inf") if self.end is None else self.end - time.monotonic()

    def stage(self, stage: Stage) -> str:
        """Run one stage, at most for its time; its status."""
        sizes = stage.of(self.mode)
        if sizes is None:
            raise ValueError(f"stage {stage.name} has no sizes for {self.mode}")
        if self.ended.is_set():
            return INTERRUPTED
        arguments, limit_s = sizes[0], min(sizes[1], self.left_s())
        module, function = stage.function.split(":")
        seconds = str(limit_s * (1 - SPARE))
        command_arguments = [str(self.lines), stage.name, module, function, json.dumps(arguments), seconds, self.card or ""]
        common: Row = {"stage": stage.name, "card": self.card}
        append(self.lines, common | {"case": BEGIN, "key": self.key, "date": datetime.now(UTC).isoformat(timespec="seconds")})
        print(f"{stage.name}: at most {limit_s:.0f} s", flush=True)
        begin = time.monotonic()
        with (self.out / "gpu_all.log").open("ab") as log:
            log.write(f"\n== {stage.name} ==\n".encode())
            log.flush()
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.stage", *command_arguments],
                cwd=ROOT, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.running.add(process)
        if self.ended.is_set():
            end_group(process)
        try:
            status, note = STATUS.get(process.wait(timeout=limit_s), "killed"), None
            if status == "killed":
                note = f"ended with {process.returncode}" + ("; perhaps out of memory" if process.returncode == -signal.SIGKILL else "")
        except subprocess.TimeoutExpired:
            status, note = "hung", f"not ended after {limit_s:.0f} s, killed"
        finally:
            end_group(process)
            self.running.discard(process)
        if self.ended.is_set():
            return INTERRUPTED
        if status == "cut" and limit_s < sizes[1]:
            status = CUT_EARLY
        row = common | {
            "case": END,
            "ok": status in (*COMPLETE, CUT_EARLY),
            "status": status,
            "ms": round((time.monotonic() - begin) * 1e3),
        }
        append(self.lines, row | ({"note": note} if note else {}))
        print(f"{stage.name}: {status}, {time.monotonic() - begin:.0f} s" + (f": {note}" if note else ""), flush=True)
        return status

    def _environment(self) -> dict[str, str]:
        environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
        return environment | ({"TRITON_INTERPRET": "1"} if self.mode == "without-gpu" else {}) | {"PYTHONUNBUFFERED": "1"}

    def stop(self) -> None:
        self.ended.set()
        for process in list(self.running):
            end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a stage and its child processes, which are one session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def digest(versions: object) -> str:
    """A hash of the measured code, of the benchmarks, and of the packages' versions."""
    code_hash = hashlib.sha256(json.dumps(versions, sort_keys=True).encode())
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            code_hash.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return code_hash.hexdigest()[:12]


def choose_stages(stages: Sequence[Stage], run: Run, again: bool, keep: bool) -> list[Stage]:
    """The stages to run: those that never ended, then those that failed."""
    attempts = {} if again else latest(read(run.lines))
    new: list[Stage] = []
    failed: list[Stage] = []
    for stage in stages:
        attempt = attempts.get(stage.name)
        if attempt is None or attempt.status in (None, CUT_EARLY):
            new.append(stage)
        elif attempt.complete(None if keep else run.key):
            print(f"{stage.name}: complete, {len(attempt.rows)} lines", flush=True)
        else:
            (failed if attempt.begin.get("key") == run.key else new).append(stage)
    return new + failed


def run_all(run: Run, stages: Sequence[Stage], at_once: int) -> list[str]:
    """Run stages, at most `at_once` of a group in parallel. Returns the names of the stages without enough time."""
    unfinished: list[str] = []
    for group in groups(tuple(stages)):
        limit_s = max(sizes[1] for stage in group if (sizes := stage.of(run.mode)) is not None)
        if run.left_s() < max(LEAST_S, limit_s / 2):
            unfinished += [stage.name for stage in group]
            continue
        with ThreadPoolExecutor(at_once) as pool:
            try:
                ends = list(pool.map(run.stage, group))
            except BaseException:
                run.stop()  # before the pool waits for its threads
                raise
        unfinished += [stage.name for stage, end in zip(group, ends, strict=True) if end in (INTERRUPTED, CUT_EARLY)]
    return unfinished


def conclude(run: Run, requested: Sequence[Stage], unfinished: Sequence[str], command: str) -> int:
    """Write the report, print errors and unfinished stages; the exit status."""
    attempts = latest(read(run.lines))
    rows = [row for attempt in attempts.values() for row in (*attempt.rows, *([attempt.end] if attempt.end is not None else []))]
    device: Row = next((row for row in rows if row["stage"] == CARD and row["case"] == "device"), {})
    report = write_run_report(run.out, command, attempts, rows, device)
    checked = [row for row in rows if row.get("check") and row["ok"] is not None]
    counts = Counter((row["engine"], row["form"], row["precision"], row["check"]) for row in checked)
    correct_counts = Counter((row["engine"], row["form"], row["precision"], row["check"]) for row in checked if row["ok"])
    for checks, count in counts.items():
        print(f"{correct_counts[checks]} of {count} right: {', '.join(checks)}", flush=True)
    wrong = [row for row in rows if row["ok"] is False]
    for row in wrong:
        print(f"WRONG  {row['stage']}  {row['case']}  {row.get('note') or row.get('status') or ''}", flush=True)
    print(f"{len(rows)} rows in {report.name}", flush=True)
    if unfinished:
        print(f"left for the next run: {', '.join(unfinished)}", flush=True)
    gpu = device.get("gpu")
    if not gpu:
        needing = [stage.name for stage in requested if stage.without_gpu is None]
        print(f"no NVIDIA GPU, not run: {', '.join(needing) or 'nothing'}", file=sys.stderr, flush=True)
    return WRONG if wrong else MORE if unfinished else 0 if gpu else NO_GPU


def write_run_report(folder: Path, command: str, attempts: dict[str, Attempt], rows: Sequence[Row], device: Row) -> Path:
    """Write the rows and ends of the last attempts to gpu_all_<card>_<date>.json in the folder."""
    date = max(str(attempt.begin["date"]) for attempt in attempts.values())[:10]
    name = re.sub(r"[^a-z0-9]+", "-", (device.get("card") or "no gpu").lower()).strip("-")
    header = {"card": device.get("card"), "date": date, "command": command, "versions": device.get("versions"), "host": device.get("host")}
    keys = sorted({str(attempt.begin.get("key")) for attempt in attempts.values()})
    file = folder / f"gpu_all_{name}_{date}.json"
    file.write_text(json.dumps(header | {"keys": keys, "rows": rows}, indent=1) + "\n")
    return file


def main(arguments: Sequence[str] | None = None, stages: Sequence[Stage] = STAGES) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in stages]
    parser.add_argument("--out", type=Path, required=True, help="folder of lines, log and report")
    parser.add_argument("--quick", action="store_true", help="small sizes, at most 5 minutes")
    parser.add_argument("--minutes", type=float, help="end within this time; run again to continue")
    parser.add_argument("--only", help=f"stages, comma-separated: {', '.join(names)}")
    parser.add_argument("--again", action="store_true", help="run stages whose lines are complete, too")
    parser.add_argument("--keep", action="store_true", help="lines of other code and versions count as complete")
    parser.add_argument("--summary", action="store_true", help="write the report of the lines in DIR, run nothing")
    options = parser.parse_args(arguments)
    wanted_names = options.only.split(",") if options.only else names
    unknown = [name for name in wanted_names if name not in names]
    if unknown:
        parser.error(f"--only: got {', '.join(unknown)}, expected some of {', '.join(names)}")
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    run = Run(options.out, "quick" if options.quick else "full", None, CARD, end)
    if options.summary and not read(run.lines):
        parser.error(f"--summary: {run.lines} holds no lines")
    options.out.mkdir(parents=True, exist_ok=True)
    command = "python -m benchmarks.gpu_all --out DIR" + " --quick" * options.quick
    requested = [stage for stage in stages if stage.name in wanted_names and stage.name != CARD]
    if options.summary:
        return conclude(run, requested, [], command)
    former_handler = signal.signal(signal.SIGTERM, _interrupted)
    try:
        unfinished = _run(run, stages, requested, options)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        unfinished = [stage.name for stage in choose_stages(_runnable(run, requested), run, False, options.keep)]
    finally:
        run.stop()
        signal.signal(signal.SIGTERM, former_handler)
    return conclude(run, requested, unfinished, command)


def _run(run: Run, stages: Sequence[Stage], requested: Sequence[Stage], options: argparse.Namespace) -> list[str]:
    """Run the stage of the card, then the requested stages. Returns the names of unfinished stages."""
    if run.stage(next(stage for stage in stages if stage.name == CARD)) not in COMPLETE:
        print(f"{CARD}: failed, see {run.out / 'gpu_all.log'}", file=sys.stderr, flush=True)
    device: Row = next((row for row in latest(read(run.lines))[CARD].rows if row["case"] == "device"), {})
    if not device.get("gpu"):
        run.mode = "without-gpu"
        print("no NVIDIA GPU: correctness alone is checked, on tiny trees in Triton's interpreter", flush=True)
    run.card, run.key = device.get("card"), f"{device.get('card')}, {run.mode}, {digest(device.get('versions'))}"
    at_once = max(1, len(os.sched_getaffinity(0)) * 3 // 4)
    return run_all(run, choose_stages(_runnable(run, requested), run, options.again, options.keep), at_once)


def _runnable(run: Run, stages: Sequence[Stage]) -> list[Stage]:
    return [stage for stage in stages if stage.of(run.mode) is not None]


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
