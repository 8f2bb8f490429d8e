"""Maps Arrow IPC files. Compressed files are refused, since compressed buffers unpack to any size.

The bytes between a file's magic and its footer are a stream of messages. The file is read as a stream, so that Arrow reads exactly the
messages that are checked here; a footer could name others. PyArrow does not tell whether a message is compressed, so its flatbuffer is read
here: Message.header is a RecordBatch, or a DictionaryBatch whose `data` is one. RecordBatch.compression is set if it is compressed.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow as pa

MAGIC = b"ARROW1\0\0"
VERSION, HEADER, DATA, COMPRESSION = 0, 2, 1, 3
"""Numbers of fields in the tables Message (the first two), DictionaryBatch and RecordBatch (Arrow's Message.fbs)."""
V5 = 4
"""The format's version since 2020. Older versions mark compression in another way."""


def map_table(file: Path) -> pa.Table:
    """The table of a file. Raises pyarrow.ArrowException or OSError if it is no Arrow file, or is compressed."""
    content = pa.memory_map(str(file)).read_buffer()
    if content.slice(0, len(MAGIC)).to_pybytes() != MAGIC:
        raise pa.ArrowInvalid("it does not begin as one")
    stream = content.slice(len(MAGIC))
    for message in pa.ipc.MessageReader.open_stream(stream):
        try:
            plain = _is_plain(message)
        except struct.error as error:
            raise pa.ArrowInvalid(f"a message that ends too soon ({error})") from error
        if not plain:
            raise pa.ArrowInvalid("its buffers may be compressed, expected plain ones, which can be mapped")
    return pa.ipc.open_stream(stream).read_all()


def _is_plain(message: pa.Message) -> bool:
    """Whether a message's buffers are not compressed. Raises struct.error."""
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
