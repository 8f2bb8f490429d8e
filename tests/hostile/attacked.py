"""A service in a process of its own that is made to be attacked: its memory and descriptors as the kernel counts them, a limit on its
descriptors, and an end when it takes too much.

Knows processes. Does not know what is done to them.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.service.serving import Process, settings
from tests.process_trees import descendants, workers_of

PAGE = os.sysconf("SC_PAGE_SIZE")
READY_S, END_S = 120, 5


class Attacked(Process):
    """A service that is made to be attacked; `log` is what it wrote."""

    def __init__(self, models: Path, log: Path, environment: Mapping[str, str], workers: int) -> None:
        super().__init__(["service", "--workers", str(workers)], settings(models) | dict(environment), log)
        self.log = log

    def processes(self) -> list[int]:
        """The service and what it started."""
        return [self.pid, *descendants(self.pid)]

    def workers(self) -> list[int]:
        return workers_of(self.pid)  # the others too while one ends

    def exit_code(self, within_s: float) -> int:
        """Wait until it has ended."""
        assert self._process is not None
        return self._process.wait(within_s)

    def rss_mb(self) -> float:
        """Resident megabytes of all its processes; what they share counts for each."""
        pages = 0
        for pid in self.processes():
            with contextlib.suppress(OSError, IndexError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * PAGE / 1e6

    def peak_mb(self) -> float:
        """The most that each of its processes had since `forget_peak`, together."""
        kilobytes = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        return kilobytes * 1024 / 1e6

    def forget_peak(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def descriptors(self) -> int:
        """Open descriptors of all its processes."""
        count = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                count += len(os.listdir(f"/proc/{pid}/fd"))
        return count

    def log_kb(self) -> float:
        return self.log.stat().st_size / 1e3


@contextmanager
def attacked(
    models: Path, log: Path, environment: Mapping[str, str], workers: int = 1, descriptors: int | None = None
) -> Iterator[Attacked]:
    """A service that is ready, on a free port of this machine, and ended afterwards.

    descriptors  most that each of its processes may have
    Raises RuntimeError where it does not become ready.
    """
    service = Attacked(models, log, environment, workers)
    service.start()
    try:
        if descriptors is not None:  # before it has started a worker, which inherits it
            resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
        Path(f"/proc/{service.pid}/oom_score_adj").write_text("1000")  # where memory ends all the same, this process goes first
        service.wait_until_ready(READY_S)
        yield service
    finally:
        service.end(END_S)
