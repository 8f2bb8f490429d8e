"""A JSON object and arrays as one body of bytes, in the safetensors format, and back.

    8 bytes            length of the header, little-endian
    header             JSON: `__metadata__` {"message": the object as JSON text}, and every array's dtype, shape and offsets
    arrays             little-endian, one after the other; each begins at a multiple of its item size

Any reader of safetensors can open a body. The arrays of a body are views of it: nothing is copied, nothing is unpickled. Knows bytes, not
their meaning. (The library's own functions copy every array twice and take three times as long for small bodies.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import orjson

from espalier.arrays import Array, Float32
from espalier.errors import InvalidMessage

MAX_HEADER_BYTES = 1 << 20
"""Longest header of a body: the trace of a forest of 16 trees has some 6000 arrays of 100 bytes each in it."""
MAX_SIDE = 1 << 32
"""Longest side of an array. An array with a side of 0 has no bytes, whatever its other sides say."""
_DTYPES: Mapping[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "F32": np.dtype("<f4"), "U8": np.dtype("u1")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
T = TypeVar("T")
Side = int | None
"""Length of one side of an array; None: any."""


def framed(message: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    """The body of a message and its arrays, of int64, int32, float32 and uint8."""
    entries: dict[str, Any] = {"__metadata__": {"message": orjson.dumps(message).decode()}}
    buffers: list[memoryview] = []
    begin = 0
    for name, array in sorted(arrays.items(), key=lambda entry: -entry[1].dtype.itemsize):
        end = begin + array.nbytes
        entries[name] = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": (begin, end)}
        buffers.append(np.ascontiguousarray(array).data)
        begin = end
    header = orjson.dumps(entries)
    header += b" " * (-len(header) % 8)
    return b"".join([len(header).to_bytes(8, "little"), header, *buffers])


def unframed(body: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """The message and the arrays of a body, as read-only views of it. Raises InvalidMessage."""
    length = int.from_bytes(body[:8], "little")
    if len(body) < 8 or length > min(len(body) - 8, MAX_HEADER_BYTES):
        expected = f"8 bytes, a header of at most {MAX_HEADER_BYTES} bytes as they say, and arrays"
        raise InvalidMessage("body", f"{len(body)} bytes, a header of {length}", expected)
    header = _json_object("header", body[8 : 8 + length])
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not isinstance(text := metadata.get("message"), str):
        raise InvalidMessage("header.__metadata__", metadata, 'an object with a text "message"')
    arrays, total = {}, 0
    for name, entry in header.items():
        arrays[name] = _array(body, name, entry, 8 + length)
        total += arrays[name].nbytes
    if total != len(body) - 8 - length:
        raise InvalidMessage("body", f"{len(body) - 8 - length} bytes of arrays", f"{total}, the sum of the arrays in the header")
    return _json_object("message", text.encode()), arrays


def _array(body: bytes, name: str, entry: Any, data: int) -> Array:
    """One array. data: offset of the first array in the body."""
    field = f"header.{name}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise InvalidMessage(field, entry, "dtype, shape and data_offsets")
    dtype, shape, offsets = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None, entry["shape"], entry["data_offsets"]
    if dtype is None:
        raise InvalidMessage(f"{field}.dtype", entry["dtype"], f"one of {', '.join(_DTYPES)}")
    if not isinstance(shape, list) or len(shape) > 3 or not all(type(side) is int and 0 <= side <= MAX_SIDE for side in shape):
        raise InvalidMessage(f"{field}.shape", shape, f"at most 3 sides from 0 to {MAX_SIDE}")
    size = dtype.itemsize * math.prod(shape)
    if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int] or offsets[1] - offsets[0] != size:
        raise InvalidMessage(f"{field}.data_offsets", offsets, f"the begin and the end of {size} bytes")
    if offsets[0] < 0 or data + offsets[1] > len(body):
        raise InvalidMessage(f"{field}.data_offsets", offsets, f"bytes from 0 to {len(body) - data}")
    array = np.frombuffer(body, dtype, math.prod(shape), data + offsets[0] if size else 0).reshape(shape)
    return array if array.flags.aligned else array.copy()


def _json_object(field: str, text: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidMessage(field, text[:100], f"JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidMessage(field, value, "a JSON object")
    return value


class Fields:
    """The fields of a JSON object that are not decoded yet. Each is taken once and checked; none may remain."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        self._remaining = dict(message)

    def take(self, name: str, kind: type[T]) -> T:
        """A field of exactly this type: True is no integer. Raises InvalidMessage."""
        value = self._remaining.pop(name, None)
        if type(value) is not kind:
            raise InvalidMessage(name, value, f"{kind.__name__}")
        return value

    def optional(self, name: str, kind: type[T]) -> T | None:
        """As `take`; None if there is none."""
        return self.take(name, kind) if name in self._remaining else None

    def integer(self, name: str, least: int, most: int) -> int:
        """A whole number. Raises InvalidMessage if it is out of range."""
        value = self.take(name, int)
        if not least <= value <= most:
            raise InvalidMessage(name, value, f"from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float) -> float:
        """A finite number. Raises InvalidMessage if it is out of range."""
        value = self._remaining.pop(name, None)
        if type(value) not in (int, float) or not (math.isfinite(value) and least <= value <= most):
            raise InvalidMessage(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def check_all_taken(self) -> None:
        """Raise InvalidMessage if a field remains."""
        for name in self._remaining:
            raise InvalidMessage(name, self._remaining[name], "no such field here")


class Arrays:
    """The arrays of a message that are not decoded yet, by name. Each is taken once and checked; none may remain."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._remaining = dict(arrays)

    def __contains__(self, name: str) -> bool:
        return name in self._remaining

    def take(self, name: str, dtype: type[np.generic], shape: tuple[Side, ...]) -> Array:
        """An array. Raises InvalidMessage if it is missing or has another dtype or shape."""
        array = self._remaining.pop(name, None)
        if array is None:
            raise InvalidMessage(name, None, f"an array of {np.dtype(dtype)}")
        fits = len(array.shape) == len(shape) and all(length in (side, None) for side, length in zip(array.shape, shape, strict=True))
        if array.dtype != dtype or not fits:
            sides = ", ".join("any" if side is None else str(side) for side in shape)
            raise InvalidMessage(name, f"{array.dtype}{list(array.shape)}", f"{np.dtype(dtype)}[{sides}]")
        return array

    def optional(self, name: str, dtype: type[np.generic], shape: tuple[Side, ...]) -> Array | None:
        """As `take`; None if there is none."""
        return self.take(name, dtype, shape) if name in self._remaining else None

    def finite(self, name: str, shape: tuple[Side, ...]) -> Float32:
        """An array of finite float32 numbers."""
        array = self.take(name, np.float32, shape)
        if not np.isfinite(array).all():
            raise InvalidMessage(name, float(array[~np.isfinite(array)][0]), "finite numbers")
        return array

    def check_all_taken(self) -> None:
        """Raise InvalidMessage if an array remains."""
        for name, array in self._remaining.items():
            raise InvalidMessage(name, f"{array.dtype}{list(array.shape)}", "no such array here")
