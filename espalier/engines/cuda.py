"""Whether there is an NVIDIA GPU. Asks the driver itself, so that a machine without one loads no library of gigabytes to find out."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def gpu_present() -> bool:
    """Whether NVIDIA's driver is here and shows this process a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
