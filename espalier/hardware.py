"""The processor that code is compiled for: this machine's, or the baseline of images. Also how many cores this process may use.

The only module that sets environment variables of libraries, which read them when they are imported.
"""

from __future__ import annotations

import math
import os
import platform
import re
from pathlib import Path
from platform import machine
from typing import NamedTuple

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""A container's limit of processor time, microseconds in so many microseconds, or `max`; missing without control groups, version 2."""


def cores() -> int:
    """The cores that this process may use, fewer where a container's limit is lower: more threads would wait for each other."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = map(int, QUOTA.read_text().split())
    except (OSError, ValueError):
        return allowed
    return max(1, min(allowed, math.ceil(quota / period)))


def hardware() -> str:
    """The processor's name and how many cores this process may use."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {cores()} cores"


class Processor(NamedTuple):
    """A processor by LLVM's name; features such as `+avx2,-avx512f`."""

    name: str
    features: str


_V3 = "avx avx2 bmi bmi2 cx16 f16c fma fxsr lzcnt mmx movbe popcnt sahf sse sse2 sse3 sse4.1 sse4.2 ssse3 xsave"
_BASELINES = {
    "x86_64": Processor("x86-64-v3", ",".join(f"+{feature}" for feature in _V3.split())),
    "aarch64": Processor("generic", "+fp-armv8,+neon"),
}


def baseline() -> Processor | None:
    """The processor that images are compiled for, by kind of machine. x86-64-v3: Intel since Haswell (2013), AMD since Excavator (2015)."""
    return _BASELINES.get(machine())


def compile_for(processor: Processor) -> None:
    """Let numba compile for a processor. Call it before numba is imported."""
    os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = processor


def limit_threads() -> None:
    """Let torch's threads wait for each other without spinning for long, unless the environment says otherwise.

    Call it before torch is imported. By default they spin for milliseconds, so that one other busy process makes a training step several
    times as slow. The price is a step that is slower by about a tenth on an idle machine.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if cores() < len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_NUM_THREADS", str(cores()))
