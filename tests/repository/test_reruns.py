"""What becomes of a test that CI must run again: at once, and over the runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import ROOT
from tests.reruns import RerunHistory

CONFTEST = """
from tests import reruns

def pytest_addoption(parser):
    reruns.add_option(parser)

def pytest_configure(config):
    reruns.configure(config)
"""
LATE = """
from pathlib import Path
from tests.waiting import until

def test_late():
    came = Path("came").exists()
    Path("came").touch()
    until(lambda: came, within_s=0)

def test_right():
    pass
"""
WRONG = """
from pathlib import Path

def test_wrong():
    came = Path("came").exists()
    Path("came").touch()
    assert came, "an answer that is wrong now and then"
"""


def run_of(file: Path, rerun: list[str], tier: str = "slow", status: int = 0) -> tuple[int, Any]:
    """The exit status of a run in which some tests were run again, and which ones were it too often."""
    history = RerunHistory(file, tier)
    session: Any = SimpleNamespace(exitstatus=status)
    for test in [*rerun, *rerun]:
        history.pytest_runtest_logreport(report("rerun", test))
    history.pytest_runtest_logreport(report("passed", "fine"))
    history.pytest_sessionfinish(session)
    return session.exitstatus, history.often


def report(outcome: str, test: str) -> Any:
    """What the history reads of a report."""
    return SimpleNamespace(outcome=outcome, nodeid=test)


def test_the_third_rerun_in_ten_runs_fails_the_build(tmp_path: Path) -> None:
    file = tmp_path / "kept" / "reruns.json"
    for rerun in (["a"], [], ["a", "b"], *[[]] * 6):
        assert run_of(file, rerun) == (0, [])
    assert run_of(file, ["a", "b"]) == (1, ["a"])
    assert run_of(file, []) == (0, [])  # the first one is eleven runs ago
    assert run_of(file, ["b"]) == (1, ["b"])


def test_tiers_are_counted_apart_and_a_failure_stays_one(tmp_path: Path) -> None:
    file = tmp_path / "reruns.json"
    for _ in range(2):
        assert run_of(file, ["a"], "slow") == run_of(file, ["a"], "console") == (0, [])
    assert run_of(file, ["a"], "slow", status=2) == (2, ["a"])
    assert {tier: len(runs) for tier, runs in json.loads(file.read_text()).items()} == {"slow": 3, "console": 2}


def options_of_ci() -> list[str]:
    """What .ci/run asks of pytest beyond the fast tier."""
    (options,) = re.findall(r'^export PYTEST_ADDOPTS="(.*) \$\{PYTEST_ADDOPTS-\}"$', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    return shlex.split(options.replace("$reruns", "reruns.json"))


def pytest_in(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    """A run of CI's over one file of tests."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(test)
    (folder / "came").unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder), "-c", os.devnull, "-p", "no:cacheprovider", *options_of_ci()]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_ci_runs_what_came_too_late_again_and_counts_it_and_no_wrong_answer(tmp_path: Path) -> None:
    for run in range(3):
        ran = pytest_in(tmp_path, LATE)
        assert "RERUN test_it.py::test_late" in ran.stdout, ran.stdout + ran.stderr
        assert ran.returncode == (run == 2), ran.stdout
    assert "RERUN TOO OFTEN test_it.py::test_late" in ran.stdout
    assert json.loads((tmp_path / "reruns.json").read_text()) == {"": [["test_it.py::test_late"]] * 3}
    ran = pytest_in(tmp_path, WRONG)
    assert ran.returncode == 1
    assert "1 failed" in ran.stdout
    assert "rerun" not in ran.stdout.splitlines()[-1]
