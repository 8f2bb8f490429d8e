"""`espalier journal` in processes of their own, which are killed before their n-th change of a folder. Knows no test."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from service.journal import main

CHANGES = ("os.rename", "os.remove", "os.link", "os.mkdir", "os.chmod", "shutil.copyfile")
_FORKS = multiprocessing.get_context("forkserver")  # its processes have imported all, and have no thread of the test's
_FORKS.set_forkserver_preload([__name__])


def journal(arguments: Sequence[str], folder: Path | None = None, step: int = 0) -> int | None:
    """The command's exit code; −9 where it was killed before its change of `folder` number `step`."""
    process = _FORKS.Process(target=_run, args=(list(arguments), str(folder), step))
    process.start()
    process.join(60)
    return process.exitcode


def _run(arguments: list[str], folder: str, step: int) -> None:
    changes, lock = 0, threading.Lock()

    def hook(event: str, given: tuple[object, ...]) -> None:
        nonlocal changes
        is_write = event == "open" and len(given) > 2 and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)
        if (event in CHANGES or is_write) and str(given[0]).startswith(folder):
            with lock:
                changes += 1
                is_last = changes == step
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)

    if step:
        sys.addaudithook(hook)
    sys.exit(main(arguments))
