"""A service in a process of its own that is made to be attacked: its memory and descriptors as the kernel counts them, a limit on its
descriptors, and an end when it takes too much.

Knows processes. Does not know what is done to them.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.service.serving import free_port, request
from tests import ROOT

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Attacked:
    """A running service; `log` is what it wrote."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def alive(self) -> bool:
        return self.process.poll() is None

    def processes(self) -> list[int]:
        """The service and what it started."""
        found = [self.process.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += [int(child) for child in (task / "children").read_text().split()]
        return found

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

    def kill(self) -> None:
        """End it at once, with what it started."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


@contextmanager
def attacked(
    models: Path,
    log: Path,
    environment: Mapping[str, str],
    workers: int = 1,
    descriptors: int | None = None,
    inside: Sequence[str] = (),
    timeout_s: float = 120,
) -> Iterator[Attacked]:
    """A service that is ready, on a free port of this machine, and ended afterwards.

    descriptors  most that each of its processes may have
    inside       a command that becomes the service's, which follows as its arguments
    Raises RuntimeError where it does not become ready.
    """
    port = free_port()
    with log.open("wb") as written:
        process = subprocess.Popen(
            [*inside, sys.executable, "-m", "service", "--port", str(port), "--workers", str(workers)],
            cwd=ROOT,
            env={**os.environ, "ESPALIER_MODELS": str(models), "ESPALIER_DEVICE": "cpu", "ESPALIER_LOG_LEVEL": "WARNING", **environment},
            stdout=written,
            stderr=written,
        )
    service = Attacked(process, port, log)
    try:
        if descriptors is not None:  # before it has started a worker, which inherits it
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
        Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")  # where memory ends all the same, this process goes first
        give_up = time.monotonic() + timeout_s
        while request(port, "GET", "/readyz", timeout_s=10)[0] != 200:
            if not service.alive() or time.monotonic() > give_up:
                raise RuntimeError(f"the service did not become ready: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield service
    finally:
        if service.alive():
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                service.kill()
        process.wait()
