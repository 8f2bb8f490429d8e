"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def hardware() -> str:
    """The processor's name and how many cores this process may use."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores"
