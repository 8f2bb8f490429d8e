"""Processes that are lost while they do something: killed, or stopped."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from espalier.serving import Serving
from service.models.desired_state import DesiredState
from service.models.openings import Openings
from service.run_folder import Page
from service.settings import metrics_folder

STOPPED = 7_654_321
"""The process id of a worker that is stopped: a higher one than Linux gives."""


def killed(deed: Callable[[], None]) -> None:
    """Do it in another process, which must kill itself."""
    pid = os.fork()
    if pid == 0:
        try:
            deed()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def killed_while_opening(version: Path, run_folder: Path | None = None) -> None:
    """A process is killed while it opens the version in this folder."""

    def open_version() -> None:
        with Openings(run_folder).noted(version):
            os.kill(os.getpid(), signal.SIGKILL)

    killed(open_version)


def killed_while_changing(model: Path, before: Serving | None, after: Serving) -> None:
    """A process is killed before all workers have followed its change."""

    def change() -> None:
        disk = DesiredState(model)
        with disk.locked(Serving):
            disk.begin_change(before, after)
            os.kill(os.getpid(), signal.SIGKILL)

    killed(change)


@contextmanager
def run_folder_of(folder: Path, **progress: Any) -> Iterator[Path]:
    """The run folder of a service with one more worker, which has followed this much of `books` and now does nothing."""
    metrics_folder(folder).mkdir(parents=True)
    say(folder, **progress)
    descriptor = os.open(folder / f"{STOPPED}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        os.close(descriptor)


def say(folder: Path, **progress: Any) -> None:
    """What that worker reports of its progress."""
    found = {"serving": 0, "removed": 0, "failed": None, "serves": True, "versions": [1]} | progress
    Page(folder, STOPPED, "json").write(json.dumps({"books": found}).encode())
