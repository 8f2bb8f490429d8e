"""Memory accesses of the engines' kernels, under compute-sanitizer where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from benchmarks.gpu.lines import Row, read


def sanitized(
    seconds: float, functions: Sequence[str] = ("triton", "sparse_cuda"), device: Literal["cuda", "cpu"] = "cuda"
) -> Iterator[Row]:
    """The memory accesses of our engines on few cases, under compute-sanitizer where it is installed. functions: of `correctness.py`."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        yield {"case": "compute-sanitizer", "ok": None, "note": "not installed"}
        return
    each = seconds / len(functions)
    for function in functions:
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows.jsonl"
            child = _stage_command(function, rows, each / 2, device)
            # torch's own store of memory would hide what is accessed beyond an array's end.
            environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            begin = time.monotonic()
            try:
                done = subprocess.run(
                    [tool, "--error-exitcode", "3", *child],
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=seconds / 2,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                yield {"case": f"compute-sanitizer, {function}", "ok": None, "note": f"left out: {each:.0f} s were over"}
                continue
            print(done.stdout[-4000:], done.stderr[-4000:], flush=True)
            found = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line or "Invalid" in line]
            row: Row = {"case": f"compute-sanitizer, {function}", "ms": round((time.monotonic() - begin) * 1e3)}
            checked = sum(line["ok"] is True for line in read(rows))
            yield row | {"ok": done.returncode != 3 and checked > 0, "cases": checked, "note": "; ".join(found[:3])[:500]}


def _stage_command(function: str, rows: Path, seconds: float, device: str) -> list[str]:
    """A process that runs few cases of one function of `correctness.py` and writes its rows to a file."""
    given = f'{{"precision": "float32", "cases": 2, "large": false, "cuda_graphs": false, "device": "{device}"}}'
    arguments = [str(rows), function, "benchmarks.gpu.correctness", function, given, str(seconds), ""]
    return [sys.executable, "-m", "benchmarks.gpu.stage", *arguments]
