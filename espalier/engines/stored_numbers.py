"""Numbers as bundles store them, read by compiled code: float32, or float16 as int16 with its bits, since numba has no float16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

Array = NDArray[Any]


def stored(array: Array) -> Array:
    """The array as compiled code takes it."""
    return array.view(np.int16) if array.dtype == np.float16 else array


def number(stored: Any) -> Any:
    """A stored number as float32; an int16 holds the bits of a finite float16."""
    raise NotImplementedError("compiled code alone calls it")


@overload(number, inline="always")
def _number(stored: Any) -> Callable[[Any], Any]:
    def as_it_is(stored: Any) -> Any:
        return stored

    def widened(stored: Any) -> Any:
        """Exact: exponent and fraction in float32's places, times 2^112 for the difference of the two exponents' offsets."""
        return np.int32((np.int32(stored) << 13) & np.int32(-0x70002000)).view(np.float32) * np.float32(2.0**112)

    return widened if stored == types.int16 else as_it_is
