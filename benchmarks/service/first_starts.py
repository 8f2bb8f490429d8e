"""Starts without compiled code: several at once, after kills, after damage. Every one must answer right; and what a start costs.

    python -m benchmarks.first_starts --json first_starts.json

`--rounds` starts of `--processes` processes at once in an empty folder; as many kills while a process compiles; then each page of the file
of compiled code as zeros, neighbouring sections swapped, and cuts. The package has three functions, since it is compiled hundreds of times;
a process makes its code ready as a service does, calls all functions, and compiles nothing else.

`--services` starts the service with the sample, cold and warm, `--service-rounds` times. Knows processes; does not know what is in a file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.service.serving import serving
from espalier.code_files import FOLDER, CodeFile

ROOT = Path(__file__).parents[2]
PAGE = 4096
HEAD = "import numpy as np\nfrom espalier.compiled_code import compiled\n\n\n@compiled()\n"
SOURCES = {
    "__init__.py": "",
    "double.py": f"{HEAD}def double(x):\n    return 2 * x\n",
    "orders.py": f"{HEAD}def order(x):\n    return np.argsort(x)\n",
    "sorts.py": f"{HEAD}def ascending(x):\n    y = x.copy()\n    y.sort()\n    return y\n",
    "signatures.txt": "stall.double:double int64\nstall.orders:order int64[:]r\nstall.sorts:ascending int64[:]r\n",
}
START = """
import logging
import numpy as np

logging.basicConfig(level="INFO", format="%(message)s")
from espalier.compile import make_ready

make_ready("stall")
from stall.double import double
from stall.orders import order
from stall.sorts import ascending

x = np.array([50, 10, 40, 20, 30] * 4)
print("right" if double(21) == 42 and list(x[order(x)]) == list(ascending(x)) == sorted(x) else "wrong")
"""
QUERY = {"queries": [{"history": ["libc6", "python3"]}], "m": 20}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_starts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50, help="simultaneous starts, and kills")
    parser.add_argument("--processes", type=int, default=3, help="that start at once")
    parser.add_argument("--services", action="store_true", help="time starts of the service, too, cold and warm")
    parser.add_argument("--service-rounds", type=int, default=1, help="starts of the service without code, and with")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose service is timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        stall = Stall(Path(folder))
        if options.rounds:
            rows += [stall.at_once(options.rounds, options.processes), stall.killed(options.rounds, options.seed), stall.damaged()]
        if options.services:
            rows.append(_services(options.root, Path(folder), options.service_rounds))
    for row in rows:
        print(json.dumps(row))
    if options.json is not None:
        report = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0], "seed": options.seed, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


class Stall:
    """A small package, and the folder of its code."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._kept = folder, folder / "kept" / FOLDER
        (folder / "stall").mkdir()
        for name, text in SOURCES.items():
            (folder / "stall" / name).write_text(text)

    def start(self) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{self._folder}", "NUMBA_CACHE_DIR": str(self._folder / "kept")}
        return subprocess.Popen([sys.executable, "-c", START], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def answer(self, *processes: subprocess.Popen[str]) -> tuple[int, int]:
        """How many of some processes answered wrong or not at all, and how many compiled."""
        said = [process.communicate()[0] for process in processes]
        wrong = sum(process.returncode != 0 or "right" not in text.split() for process, text in zip(processes, said, strict=True))
        return wrong, sum(len(re.findall(r"stall: compiled in", text)) for text in said)

    def empty(self) -> None:
        for path in self._kept.glob("*"):
            path.unlink()

    def at_once(self, rounds: int, processes: int) -> dict[str, Any]:
        wrong, compiled = [], []
        for number in range(rounds):
            self.empty()
            found = self.answer(*[self.start() for _ in range(processes)])
            wrong.append(found[0])
            compiled.append(found[1])
            print(f"{number + 1} of {rounds} simultaneous starts: {sum(wrong)} wrong", flush=True)
        return {"what": "at once", "rounds": rounds, "processes": processes, "wrong": sum(wrong), "most_that_compiled": max(compiled)}

    def killed(self, rounds: int, seed: int) -> dict[str, Any]:
        """A process is killed after a part of the time that one takes, then another starts."""
        self.empty()
        began = time.monotonic()
        wrong, _ = self.answer(self.start())
        whole_s, moments = time.monotonic() - began, random.Random(seed)
        early = 0
        for number in range(rounds):
            self.empty()
            process = self.start()
            try:
                process.wait(moments.uniform(0, whole_s))
            except subprocess.TimeoutExpired:
                early += 1
            process.kill()
            process.communicate()
            wrong += self.answer(self.start())[0]
            print(f"{number + 1} of {rounds} kills, {early} while compiling: {wrong} wrong", flush=True)
        return {"what": "killed", "rounds": rounds, "killed_before_the_end": early, "wrong": wrong, "whole_s": round(whole_s, 2)}

    def damaged(self) -> dict[str, Any]:
        """Every start after a damage must notice it, and compile."""
        self.empty()
        self.answer(self.start())
        (file,) = self._kept.glob("stall-*")
        whole, wrong, unnoticed, rounds = file.read_bytes(), 0, 0, 0
        for content in _damages(whole, file):
            file.write_bytes(content)
            found = self.answer(self.start())
            wrong, unnoticed, rounds = wrong + found[0], unnoticed + (found[1] != 1), rounds + 1
            print(f"{rounds} damages: {wrong} wrong, {unnoticed} unnoticed", flush=True)
        return {"what": "damaged", "rounds": rounds, "wrong": wrong, "unnoticed": unnoticed}


def _damages(whole: bytes, file: Path) -> Iterator[bytes]:
    """Cuts, each page as zeros, and each section in the place of the one before it."""
    for size in (0, 1, 39, PAGE, len(whole) // 2, len(whole) - 1):
        yield whole[:size]
    for begin in range(0, len(whole), PAGE):
        page = whole[begin : begin + PAGE]
        if any(page):
            yield whole[:begin] + bytes(len(page)) + whole[begin + PAGE :]
    file.write_bytes(whole)
    opened = CodeFile(file)
    parts = [content for key in opened.keys if (content := opened.read(key)) is not None]
    begin = len(whole) - sum(map(len, parts))
    for first, second in pairwise(parts):
        end = begin + len(first) + len(second)
        yield whole[:begin] + second + first + whole[end:]
        begin += len(first)


def _services(root: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds from start to ready with the sample, without code and with it, and whether all answers are the same."""
    cold_s: list[float] = []
    warm_s: list[float] = []
    answers = set()
    os.chdir(root)  # where Python looks for `service` first
    for number in range(rounds):
        environment = {"PYTHONPATH": str(root), "NUMBA_CACHE_DIR": str(folder / f"service-{number}"), "OMP_NUM_THREADS": "1"}
        environment |= {"ESPALIER_MODELS": str(root / "models")}
        for taken in (cold_s, warm_s):
            began = time.monotonic()
            with serving(["service"], environment, timeout_s=1800) as port:
                taken.append(round(time.monotonic() - began, 2))
                print(f"ready after {taken[-1]:.1f} s, {'cold' if taken is cold_s else 'warm'}", flush=True)
                request = urllib.request.Request(f"http://127.0.0.1:{port}/retrieve", json.dumps(QUERY).encode())
                request.add_header("Content-Type", "application/json")
                with urllib.request.urlopen(request) as answer:
                    results = json.load(answer)["results"]
                answers.add(json.dumps([[item["id"] for item in result["items"]] for result in results]))
    return {"what": "service", "rounds": rounds, "cold_s": cold_s, "warm_s": warm_s, "wrong": len(answers) - 1}


if __name__ == "__main__":
    main()
