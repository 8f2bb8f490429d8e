"""The fields of a message while it is decoded: each is taken once and checked, and none may be left over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidMessage

Array = NDArray[Any]
T = TypeVar("T")
Side = int | None
"""Length of one side of an array; None: any."""


class Fields:
    """The fields of the JSON object."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        self._left = dict(message)

    def take(self, name: str, kind: type[T]) -> T:
        """A field of a type; a whole number is no bool. Raises InvalidMessage."""
        value = self._left.pop(name, None)
        if type(value) is not kind:
            raise InvalidMessage(name, value, f"{kind.__name__}")
        return value

    def optional(self, name: str, kind: type[T]) -> T | None:
        """The same; None where it is not there."""
        return self.take(name, kind) if name in self._left else None

    def integer(self, name: str, least: int, most: int) -> int:
        """A whole number. Raises InvalidMessage where it is out of range."""
        value = self.take(name, int)
        if not least <= value <= most:
            raise InvalidMessage(name, value, f"from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float) -> float:
        """A finite number. Raises InvalidMessage where it is out of range."""
        value = self._left.pop(name, None)
        if type(value) not in (int, float) or not (math.isfinite(value) and least <= value <= most):
            raise InvalidMessage(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def check_all_taken(self) -> None:
        """Raise InvalidMessage where a field is left over."""
        for name in self._left:
            raise InvalidMessage(name, self._left[name], "no such field here")


class Arrays:
    """The arrays by name."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._left = dict(arrays)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, dtype: type[np.generic], shape: tuple[Side, ...]) -> Array:
        """An array. Raises InvalidMessage where it is not there or has another dtype or shape."""
        array = self._left.pop(name, None)
        if array is None:
            raise InvalidMessage(name, None, f"an array of {np.dtype(dtype)}")
        fits = len(array.shape) == len(shape) and all(own in (side, None) for side, own in zip(array.shape, shape, strict=True))
        if array.dtype != dtype or not fits:
            sides = ", ".join("any" if side is None else str(side) for side in shape)
            raise InvalidMessage(name, f"{array.dtype}{list(array.shape)}", f"{np.dtype(dtype)}[{sides}]")
        return array

    def optional(self, name: str, dtype: type[np.generic], shape: tuple[Side, ...]) -> Array | None:
        """The same; None where it is not there."""
        return self.take(name, dtype, shape) if name in self._left else None

    def finite(self, name: str, shape: tuple[Side, ...]) -> NDArray[np.float32]:
        """An array of finite float32 numbers."""
        array = self.take(name, np.float32, shape)
        if not np.isfinite(array).all():
            raise InvalidMessage(name, float(array[~np.isfinite(array)][0]), "finite numbers")
        return array

    def check_all_taken(self) -> None:
        """Raise InvalidMessage where an array is left over."""
        for name, array in self._left.items():
            raise InvalidMessage(name, f"{array.dtype}{list(array.shape)}", "no such array here")
