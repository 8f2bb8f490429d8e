"""The lists of a call's queries on the device: int32 numbers with a float32 value each.

The lists are the features of queries, or the nodes with memory of their histories. Kernels read the addresses of lists, so lists may have
any length and the CUDA graph stays the same.

Legend: B queries.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

ROOM = 1 << 16
"""Initial size of a buffer, in numbers and values."""


class DeviceLists:
    """A buffer for the lists of one call: all numbers, followed by all values."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._room = device, 0
        self._make_room(ROOM)

    def _make_room(self, numbers: int) -> None:
        self._host_numbers = torch.empty(numbers, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._device_numbers, self._room = torch.empty(numbers, dtype=torch.int32, device=self._device), numbers

    def put(
        self, offset_B: NDArray[np.int64], numbers: NDArray[np.int32] | NDArray[np.int64], values: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Int64[B] and int64[B]: the addresses of each query's numbers and of their values, in the current stream.

        offset_B  int64[B + 1]: query b's are offset_B[b] … offset_B[b + 1] − 1
        """
        total = len(numbers)
        if 2 * total > self._room:
            self._make_room(1 << (2 * total - 1).bit_length())
        host = self._host_numbers.numpy()
        host[:total], host[total : 2 * total] = numbers, values.view(np.int32)
        if total:
            self._device_numbers[: 2 * total].copy_(self._host_numbers[: 2 * total], non_blocking=True)
        numbers_B = self._device_numbers.data_ptr() + 4 * offset_B[:-1]
        return numbers_B, numbers_B + 4 * total
