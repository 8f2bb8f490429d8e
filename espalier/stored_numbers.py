"""Compiled code reads numbers as bundles store them: float32; float16 as int16 with the same bits, since numba has no float16; or rows of
int8 with an exponent behind each row (espalier.node_rows).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from espalier.arrays import Array


def stored(array: Array) -> Array:
    """The array as compiled code takes it."""
    return array.view(np.int16) if array.dtype == np.float16 else array


def number(stored: Any) -> Any:
    """A stored number as float32; an int16 has the bits of a finite float16, an int8 is multiplied by `scale` later."""
    raise NotImplementedError("only compiled code calls it")


@overload(number, inline="always")
def _number(stored: Any) -> Callable[[Any], Any]:
    def unchanged(stored: Any) -> Any:
        return stored

    def widened(stored: Any) -> Any:
        """Exact: exponent and fraction in float32's places, times 2^112 for the difference of the two exponents' offsets."""
        return np.int32((np.int32(stored) << 13) & np.int32(-0x70002000)).view(np.float32) * np.float32(2.0**112)

    def converted(stored: Any) -> Any:
        return np.float32(stored)

    return widened if stored == types.int16 else converted if stored == types.int8 else unchanged


def scale(rows: Any, row: Any) -> Any:
    """float32: the factor of a row's stored numbers."""
    raise NotImplementedError("only compiled code calls it")


@overload(scale, inline="always")
def _scale(rows: Any, row: Any) -> Callable[[Any, Any], Any]:
    def unit(rows: Any, row: Any) -> Any:
        return np.float32(1)

    def of_exponent(rows: Any, row: Any) -> Any:
        """2^exponent by float32's bits."""
        return np.int32((np.int32(rows[row, rows.shape[1] - 1]) + np.int32(127)) << 23).view(np.float32)

    return of_exponent if rows.dtype == types.int8 else unit
