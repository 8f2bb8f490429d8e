"""Reads and writes the files of a bundle: safetensors mapped or in blocks, Arrow mapped, Parquet of bounded size, SHA-256 digests."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from espalier.arrays import Array, Int64
from espalier.errors import BundleCorrupt

MAX_HEADER_BYTES = 16 << 20
"""Largest header of a safetensors file."""
DTYPES = {"U64": "<u8", "I64": "<i8", "F32": "<f4", "I32": "<i4", "F16": "<f2", "U16": "<u2", "I8": "|i1", "U8": "|u1"}
"""The types that bundles have, by their names in safetensors, in the order in which a file has its arrays: widest first."""
BLOCK_BYTES = 8 << 20
"""Bytes of an array that are written at a time, so that an array need not fit into memory."""
COPIED_BYTES = 64 << 20
"""Tables below this size are copied when they are opened."""
MAX_QUERY_ROWS, MAX_QUERY_BYTES = 1 << 20, 1 << 30
"""Most golden or held-out queries, and their largest size once unpacked: a small Parquet file can unpack to any size."""
ARROW_MAGIC = b"ARROW1\0\0"
VERSION, HEADER, DATA, COMPRESSION = 0, 2, 1, 3
"""Numbers of fields in the tables Message (the first two), DictionaryBatch and RecordBatch (Arrow's Message.fbs)."""
V5 = 4
"""The format's version since 2020. Older versions mark compression in another way."""


def map_safetensors(file: Path) -> dict[str, Array]:
    """The arrays of a safetensors file as read-only maps. (The library's own NumPy loader copies.)"""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if length > min(size, MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes, expected at most {MAX_HEADER_BYTES} in a file of {size}")
            header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        arrays: dict[str, Array] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                dtype, shape = np.dtype(DTYPES[entry["dtype"]]), tuple(entry["shape"])
                if end - begin != dtype.itemsize * math.prod(shape):
                    raise ValueError(f"{name}: {end - begin} bytes for {dtype}{list(shape)}")
                file_offset = 8 + length + begin
                if begin < 0 or 8 + length + end > size:
                    raise ValueError(f"{name}: bytes {begin} to {end} are not in the file")
                arrays[name] = (
                    np.memmap(file, dtype, "r", file_offset, shape) if end > begin else np.empty(shape, dtype)
                )  # an empty array cannot be mapped
        return arrays
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, OSError) as error:
        raise BundleCorrupt(f"{file}: not a readable safetensors file ({error})") from error


def read_safetensors(file: Path) -> dict[str, Array]:
    """The arrays of a safetensors file: copies in memory of those below COPIED_BYTES, maps of larger ones.

    For tables that compiled code follows without checking again: a copy stays as it was checked, whatever happens to the file.
    """
    arrays = map_safetensors(file)
    for name, array in arrays.items():
        if array.nbytes < COPIED_BYTES:
            arrays[name] = np.array(array)
            arrays[name].flags.writeable = False
    return arrays


@dataclass(frozen=True, eq=False)
class Gathered:
    """An array whose rows lie in other arrays, which may be mapped. `write_safetensors` never holds all of it in memory.

    sources   arrays of one dtype and width
    source_R  the source of each row, by its index in `sources`; None if there is only one
    row_R     int64: the row's position in its source
    """

    sources: Sequence[Array]
    source_R: Array | None
    row_R: Int64

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.sources[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.row_R), *self.sources[0].shape[1:]

    def __len__(self) -> int:
        return len(self.row_R)

    def __getitem__(self, rows_slice: slice) -> Array:
        """Some of the rows."""
        row_r = self.row_R[rows_slice]
        if self.source_R is None:
            return np.asarray(self.sources[0][row_r])
        rows, source_r = np.empty((len(row_r), *self.shape[1:]), self.dtype), self.source_R[rows_slice]
        for source in np.unique(source_r).tolist():
            of_source = source_r == source
            rows[of_source] = self.sources[source][row_r[of_source]]
        return rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:], dtype)


def write_safetensors(file: Path, arrays: Mapping[str, Array | Gathered]) -> None:
    """Write arrays as `map_safetensors` reads them, block by block. The library writes the same bytes, but copies whole arrays."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    dtype_order = {name: position for position, name in enumerate(DTYPES)}
    ordered = sorted(arrays.items(), key=lambda entry: (dtype_order[names[entry[1].dtype]], entry[0]))
    header, end = {}, 0
    for name, array in ordered:
        size = array.dtype.itemsize * math.prod(array.shape)
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for _, array in ordered:
            for block in _blocks(array):
                stream.write(np.ascontiguousarray(block).data.cast("B") if block.size else b"")


def _blocks(array: Array | Gathered) -> Iterator[Array]:
    if not array.shape:
        yield np.asarray(array)
        return
    step = max(1, BLOCK_BYTES // max(1, array.dtype.itemsize * math.prod(array.shape[1:])))
    for begin in range(0, array.shape[0], step):
        yield array[begin : begin + step]


def map_table(file: Path) -> pa.Table:
    """The table of an Arrow IPC file. Raises pyarrow.ArrowException or OSError if it is no Arrow file, or is compressed.

    Compressed buffers unpack to any size. The bytes between a file's magic and its footer are a stream of messages. The file is read as a
    stream, so that Arrow reads exactly the messages that are checked here; a footer could name others.
    """
    content = pa.memory_map(str(file)).read_buffer()
    if content.slice(0, len(ARROW_MAGIC)).to_pybytes() != ARROW_MAGIC:
        raise pa.ArrowInvalid("it does not begin as one")
    stream = content.slice(len(ARROW_MAGIC))
    for message in pa.ipc.MessageReader.open_stream(stream):
        try:
            plain = _is_plain(message)
        except struct.error as error:
            raise pa.ArrowInvalid(f"a message that ends too soon ({error})") from error
        if not plain:
            raise pa.ArrowInvalid("its buffers may be compressed, expected plain ones, which can be mapped")
    return pa.ipc.open_stream(stream).read_all()


def _is_plain(message: pa.Message) -> bool:
    """Whether a message's buffers are not compressed. Raises struct.error.

    PyArrow does not tell, so its flatbuffer is read here: Message.header is a RecordBatch, or a DictionaryBatch whose `data` is one.
    RecordBatch.compression is set if it is compressed.
    """
    if message.type not in ("record batch", "dictionary"):
        return True
    metadata = message.metadata.to_pybytes()
    root = _follow(metadata, 0)
    version = _field(metadata, root, VERSION)
    if not version or struct.unpack_from("<h", metadata, version)[0] < V5:
        return False
    batch = _follow(metadata, _field(metadata, root, HEADER))
    if message.type == "dictionary":
        batch = _follow(metadata, _field(metadata, batch, DATA))
    return _field(metadata, batch, COMPRESSION) == 0


def _follow(metadata: bytes, position: int) -> int:
    """The position that the offset at a position points to."""
    return position + int(struct.unpack_from("<I", metadata, position)[0])


def _field(metadata: bytes, table: int, number: int) -> int:
    """The position of a table's field; 0 if the table lacks it."""
    fields = table - int(struct.unpack_from("<i", metadata, table)[0])
    if 4 + 2 * number >= struct.unpack_from("<H", metadata, fields)[0]:
        return 0
    offset = int(struct.unpack_from("<H", metadata, fields + 4 + 2 * number)[0])
    return table + offset if offset else 0


def read_parquet(file: Path) -> pa.Table:
    try:
        with pq.ParquetFile(file) as parquet:
            metadata = parquet.metadata
            unpacked = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
            if metadata.num_rows > MAX_QUERY_ROWS or unpacked > MAX_QUERY_BYTES:
                expected = f"at most {MAX_QUERY_ROWS} rows of {MAX_QUERY_BYTES} bytes"
                raise BundleCorrupt(f"{file}: {metadata.num_rows} rows of {unpacked} bytes, expected {expected}")
            return parquet.read()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BundleCorrupt(f"{file}: not a readable Parquet file ({error})") from error


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
