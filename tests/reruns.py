"""`pytest --rerun-history FILE` counts over the runs of CI which tests were run again, and fails where one needs that often.

That is in three of the last ten runs of a tier. The file is JSON: by tier, which is what `-m` asks for, the tests that were run again in
each of its last runs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

RUNS, MOST = 10, 3


class RerunHistory:
    """Of one run of a tier. often: the tests that were run again too often."""

    def __init__(self, file: Path, tier: str) -> None:
        self._file, self._tier = file, tier
        self._rerun: set[str] = set()
        self.often: Sequence[str] = ()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if str(report.outcome) == "rerun":  # an outcome of pytest-rerunfailures
            self._rerun.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        history = json.loads(self._file.read_text()) if self._file.exists() else {}
        runs = [*history.get(self._tier, []), sorted(self._rerun)][-RUNS:]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(history | {self._tier: runs}, indent=1))
        self.often = sorted(test for test, count in Counter(test for run in runs for test in run).items() if count >= MOST)
        if self.often and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in self.often:
            terminalreporter.line(f"RERUN TOO OFTEN {test}: in {MOST} or more of the last {RUNS} runs; mend it", red=True)


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--rerun-history", type=Path, help="a JSON file that keeps which tests were run again; see tests/reruns.py")


def configure(config: pytest.Config) -> None:
    """Count, where the option asks for it: in the process that starts the tests, not in those that run them."""
    file: Path | None = config.getoption("--rerun-history")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(RerunHistory(file, config.getoption("-m")))
