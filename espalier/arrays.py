"""Types of arrays, by the type of their numbers, and read-only views, as compiled code takes them. Names of arrays say their shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bool = NDArray[np.bool_]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


def read_only(*arrays: Array) -> tuple[Array, ...]:
    """Contiguous read-only views. Mapped arrays are read-only, and numba would compile again for writable ones.

    Raises ValueError for a mapped array that is not contiguous: a copy of it could need more memory than there is.
    """
    views = []
    for array in arrays:
        if type(array) is np.ndarray and array.flags.c_contiguous and not array.flags.writeable:
            views.append(array)
            continue
        if isinstance(array, np.memmap) and not array.flags.c_contiguous:
            raise ValueError(f"a mapped array of {array.shape} with strides {array.strides}: expected a contiguous one")
        view = np.ascontiguousarray(array).view(np.ndarray)
        view.flags.writeable = False
        views.append(view)
    return tuple(views)
