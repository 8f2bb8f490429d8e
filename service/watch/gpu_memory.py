"""GPU memory, as the driver counts it. Knows NVIDIA's management library; does not know who uses the memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from types import ModuleType

log = logging.getLogger(__name__)


def gpu_memory() -> Mapping[str, tuple[int, int]]:
    """GPU index → (bytes in use by all processes, bytes there are). Empty where the driver does not answer; the log says why."""
    nvml = _library()
    if nvml is None:
        return {}
    found = {}
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(index))
            found[str(index)] = int(memory.used), int(memory.total)
    except nvml.NVMLError as error:
        log.warning("the driver does not report the GPU memory: %s", error)
    return found


@cache
def _library() -> ModuleType | None:
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
