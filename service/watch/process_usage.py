"""Memory, descriptors and processor time of this process, its memory limit, and the memory of GPUs.

They are read from /proc and the control groups of Linux, and from NVIDIA's management library; without these they are unknown. Knows
numbers. Does not know metrics.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Usage:
    """resident_bytes: memory in RAM, with mapped files, which other processes may share. anonymous_bytes: memory without files; the system
    kills the process if it has no room for it."""

    resident_bytes: int
    anonymous_bytes: int
    descriptors: int
    max_descriptors: int
    cpu_s: float


def open_descriptors(proc: Path = PROC) -> int | None:
    """Open descriptors of this process. If none is free to count them with, its limit. None if the system does not say."""
    try:
        return len(os.listdir(proc / "self" / "fd")) - 1  # without the one of the listing
    except OSError as error:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if error.errno == errno.EMFILE else None


def usage(proc: Path = PROC) -> Usage | None:
    """The usage of this process now; None if the system does not say."""
    if sys.platform != "linux":
        return None
    times = resource.getrusage(resource.RUSAGE_SELF)
    max_descriptors, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0], open_descriptors(proc)
    if descriptors is None:
        return None
    try:
        status = _fields(proc / "self" / "status")
    except OSError:  # no descriptor is free: memory is unknown
        status = {}
    anonymous = status.get("RssAnon", 0) + status.get("RssShmem", 0)
    return Usage(status.get("VmRSS", 0), anonymous, descriptors, max_descriptors, times.ru_utime + times.ru_stime)


def memory_limit(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Bytes that the processes of this service may take: the smallest limit of their control groups, or the machine's memory."""
    try:
        limits = [_fields(proc / "meminfo")["MemTotal"], *_group_limits(proc, cgroup)]
    except (OSError, KeyError):
        return None
    return min(limits)


def _group_limits(proc: Path, cgroup: Path) -> Iterator[int]:
    """The limits of this process's control group and its parents, of version 1 or 2. A container sees its own group as the root."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root, name = (cgroup, "memory.max") if not controllers else (cgroup / "memory", "memory.limit_in_bytes")
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(root) and (folder / name).is_file():
                    text = (folder / name).read_text().strip()
                    if text.isdecimal():  # otherwise `max`: no limit
                        yield int(text)


def _fields(file: Path) -> dict[str, int]:
    """The lines `name: number kB` of a file of /proc, in bytes."""
    fields = {}
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            fields[name] = int(words[0]) << 10
    return fields


def gpu_memory() -> Mapping[str, tuple[int, int]]:
    """GPU index → (bytes in use by all processes, total bytes). Empty if the driver does not answer; the log says why."""
    nvml = _nvml()
    if nvml is None:
        return {}
    memory_by_gpu = {}
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(index))
            memory_by_gpu[str(index)] = int(memory.used), int(memory.total)
    except nvml.NVMLError as error:
        log.warning("the driver does not report the GPU memory: %s", error)
    return memory_by_gpu


@cache
def _nvml() -> ModuleType | None:
    try:
        import pynvml
    except ImportError:
        log.warning("no metrics of GPU memory: nvidia-ml-py is not installed (it comes with the extra `gpu`)")
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.warning("no metrics of GPU memory: %s", error)
        return None
    library: ModuleType = pynvml
    return library
