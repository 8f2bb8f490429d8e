"""Arrays as compiled code takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def read_only(*arrays: Array) -> tuple[Array, ...]:
    """Contiguous read-only views. Mapped arrays are read-only, and numba would compile again for arrays that are not."""
    views = []
    for array in arrays:
        if type(array) is np.ndarray and array.flags.c_contiguous and not array.flags.writeable:
            views.append(array)
            continue
        view = np.ascontiguousarray(array).view(np.ndarray)
        view.flags.writeable = False
        views.append(view)
    return tuple(views)
