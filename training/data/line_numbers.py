"""On which line of a text file a record stands: what an editor shows, with the header, empty lines and line ends inside of quotes counted.

Reads the file from its beginning, so only errors ask.
"""

from __future__ import annotations

import gzip
from pathlib import Path


def line_of(file: Path, record: int, quoted: bool = True, empty: bool = False) -> int:
    """The line, from 1, on which a record begins; the header is record 0, or the first event where there is none.

    quoted  whether fields may be in quotes, with line ends in them
    empty   whether an empty line after the header is a record, as polars has it
    """
    inside, records = False, 0
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
        for line, text in enumerate(lines, 1):
            if not inside and (text.strip(b"\r\n") or (empty and records)):
                if records == record:
                    return line
                records += 1
            inside ^= quoted and text.count(b'"') % 2 == 1
    return record + 1
