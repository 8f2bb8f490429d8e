"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """What the kernel can give without swapping, or what the limit of a container (control group v2) leaves; 4 GiB if neither is known."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        found = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        found = []
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" without one
        found.append(max(0, limit - int((cgroup / "memory.current").read_text())))
    except (OSError, ValueError):
        pass
    return min(found, default=4 << 30)
