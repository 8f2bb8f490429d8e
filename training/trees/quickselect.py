"""The n-th smallest of some numbers, compiled by numba."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from espalier.compiled_code import compiled

Array = NDArray[Any]


@compiled()
def nth_smallest(values: Array, n: int) -> Any:
    """The n-th smallest number, from 0, by quickselect (Hoare 1961). Reorders `values`.

    Written here, because numba needs five seconds to compile `np.partition`.
    """
    low, high = 0, len(values) - 1
    while low < high:
        pivot = values[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while values[i] < pivot:
                i += 1
            while values[j] > pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if n <= j:
            high = j
        elif n >= i:
            low = i
        else:
            break
    return values[n]
