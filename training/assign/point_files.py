"""Reads points of a file in blocks, as queries of the model: XMC files, SciPy matrices, tables of texts.

XMC files and tables are streamed. A SciPy matrix is read whole, since its format allows nothing else.

Legend: B points of a block.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from scipy.sparse import csr_array

from espalier.bundle import Bundle
from espalier.errors import InvalidConfig, InvalidData, InvalidQuery
from espalier.logs.log_values import BadRows, RowSource
from espalier.logs.parquet_logs import is_parquet, parquet_batches
from espalier.logs.text_files import first_record, text_batches
from espalier.queries import FeaturesKind, TextKind
from espalier.text.sparse_rows import SparseRows

from ..data.csr import as_rows, read_by_rows
from ..data.xmc import begins_with_weights, in_blocks, parse_points, reading
from ..specification.log_format import TextTable

TABLES, COLUMN = (".csv", ".tsv", ".parquet"), "--column"
"""Endings of files of texts, and the option that names their column."""
ROWS = 1 << 16
"""Texts of a Parquet file read at a time."""


@dataclass(frozen=True)
class PointFile:
    """A file of points for a model. `column`: the text column of a table.

    Raises InvalidConfig if the model cannot read such files, InvalidData if the file's content does not fit its name.
    """

    bundle: Bundle
    file: Path
    column: str = "query"

    def count(self) -> int:
        if isinstance(self.bundle.manifest.query, TextKind):
            return sum(len(texts) for texts in self._columns())
        if self.file.suffix == ".npz":
            return read_by_rows(self.file).shape[0]
        with reading(self.file) as (header, _):
            return header.points

    def blocks(self, size: int, skip: int = 0) -> Iterator[SparseRows]:
        """All points from position `skip` on, `size` at a time."""
        kind = self.bundle.manifest.query
        if isinstance(kind, TextKind):
            yield from self._texts(size, skip)
            return
        if not isinstance(kind, FeaturesKind):
            raise InvalidConfig("--model", f"{kind.kind} queries", "a model of texts or of sparse features")
        for block in self._matrix(size, skip) if self.file.suffix == ".npz" else self._xmc(size, skip):
            if block.width != kind.width:
                raise InvalidData(str(self.file), f"{block.width} features", f"{kind.width}, those of the model")
            try:
                block.check()
            except InvalidQuery as error:
                raise InvalidData(str(self.file), error.value, error.expected) from error
            yield block.normalised() if kind.unit else block

    def _texts(self, size: int, skip: int) -> Iterator[SparseRows]:
        texts: list[str] = []
        first = 0
        for column in self._columns():
            texts += column.slice(min(len(column), max(0, skip - first))).to_pylist()
            first += len(column)
            while len(texts) >= size:
                yield self.bundle.vectoriser.transform(texts[:size])
                texts = texts[size:]
        if texts:
            yield self.bundle.vectoriser.transform(texts)

    def _columns(self) -> Iterator[pa.Array]:
        """The texts of a table, block by block."""
        if not self.file.is_file() or Path(self.file.name.removesuffix(".gz")).suffix not in TABLES:
            raise InvalidConfig("--data", str(self.file), "a .csv, .tsv or .parquet file of texts")
        try:
            for source, batch in self._batches():
                texts = source.strings(COLUMN, batch.column(0))
                if texts.null_count:
                    raise source.problem(COLUMN, texts.is_null().index(True).as_py(), None, "a text")
                yield texts
        except InvalidData as error:  # no configuration has keys for this table
            error.expected = re.split(rf"[;,] (?:or )?{re.escape(TextTable.SECTION)}", error.expected)[0]
            raise

    def _batches(self) -> Iterator[tuple[RowSource, pa.RecordBatch]]:
        columns = {COLUMN: self.column}
        if is_parquet(self.file):
            with tempfile.TemporaryDirectory() as scratch:
                yield from parquet_batches(self.file, columns, Path(scratch), ROWS)
            return
        table = TextTable().file(self.file)
        if not first_record(table):
            raise InvalidData(str(self.file), "an empty file", "a line that names the columns, and texts")
        yield from text_batches(table, columns, BadRows("refuse", TextTable.SECTION))

    def _matrix(self, size: int, skip: int) -> Iterator[SparseRows]:
        matrix = read_by_rows(self.file)
        for begin in range(skip, matrix.shape[0], size):
            yield as_rows(csr_array(matrix[begin : begin + size]))

    def _xmc(self, size: int, skip: int) -> Iterator[SparseRows]:
        weighted = self._has_label_weights()
        with reading(self.file) as (header, lines):
            for first, body in in_blocks(lines, size, skip):
                yield as_rows(parse_points(self.file, body, header, first, weighted).points)

    def _has_label_weights(self) -> bool:
        """Whether labels are written as label:weight: the model's configuration says so, or the file shows it."""
        config = self.bundle.manifest.training.get("data", {})
        if config.get("format") == "xmc" and config.get("label_weights") is not None:
            return bool(config["label_weights"])
        return begins_with_weights(self.file)
