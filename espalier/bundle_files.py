"""How the files of a bundle are read and told apart: safetensors as maps, Parquet of bounded size, SHA-256."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from espalier.errors import BundleCorrupt

MAX_HEADER_BYTES = 16 << 20
"""Largest header of a safetensors file."""
MAX_QUERY_ROWS, MAX_QUERY_BYTES = 1 << 20, 1 << 30
"""Most golden or held-out queries, and their largest size once unpacked: a small Parquet file can unpack to any size."""


def map_safetensors(file: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file as read-only maps. (The library's own NumPy loader copies.)"""
    dtypes = {"I64": "<i8", "I32": "<i4", "U64": "<u8", "U16": "<u2", "U8": "|u1", "F32": "<f4", "F16": "<f2"}
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if length > min(size, MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes, expected at most {MAX_HEADER_BYTES} in a file of {size}")
            header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        arrays: dict[str, NDArray[Any]] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                dtype, shape = np.dtype(dtypes[entry["dtype"]]), tuple(entry["shape"])
                if end - begin != dtype.itemsize * math.prod(shape):
                    raise ValueError(f"{name}: {end - begin} bytes for {dtype}{list(shape)}")
                where = 8 + length + begin
                if begin < 0 or 8 + length + end > size:
                    raise ValueError(f"{name}: bytes {begin} to {end} are not in the file")
                arrays[name] = (
                    np.memmap(file, dtype, "r", where, shape) if end > begin else np.empty(shape, dtype)
                )  # nothing cannot be mapped
        return arrays
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, OSError) as error:
        raise BundleCorrupt(f"{file}: not a readable safetensors file ({error})") from error


def read_parquet(file: Path) -> pa.Table:
    try:
        with pq.ParquetFile(file) as parquet:
            found = parquet.metadata
            unpacked = sum(found.row_group(i).total_byte_size for i in range(found.num_row_groups))
            if found.num_rows > MAX_QUERY_ROWS or unpacked > MAX_QUERY_BYTES:
                expected = f"at most {MAX_QUERY_ROWS} rows of {MAX_QUERY_BYTES} bytes"
                raise BundleCorrupt(f"{file}: {found.num_rows} rows of {unpacked} bytes, expected {expected}")
            return parquet.read()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BundleCorrupt(f"{file}: not a readable Parquet file ({error})") from error


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
