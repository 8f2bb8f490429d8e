"""Points of a file in blocks, as the model's queries: XMC files, SciPy matrices, tables of texts.

XMC files and tables are streamed; a SciPy matrix is read whole, as its format has it.

Legend: B points of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.dataset as ds
from scipy.sparse import csr_array

from espalier.bundle import Bundle
from espalier.errors import InvalidConfig, InvalidData, InvalidQuery
from espalier.queries import FeaturesKind, TextKind
from espalier.text.sparse_rows import SparseRows

from ..data.csr import as_rows, read_by_rows
from ..data.xmc import begins_with_weights, in_blocks, parse_points, reading


@dataclass(frozen=True)
class PointFile:
    """A file of points for a model. `column`: of a table, the texts.

    Raises InvalidConfig where the model cannot read such files, InvalidData where the file is not what its name says.
    """

    bundle: Bundle
    file: Path
    column: str = "query"

    def count(self) -> int:
        """How many points the file has."""
        if isinstance(self.bundle.manifest.query, TextKind):
            with self._arrow_errors():
                return int(self._table().count_rows())
        if self.file.suffix == ".npz":
            return read_by_rows(self.file).shape[0]
        with reading(self.file) as (header, _):
            return header.points

    def blocks(self, size: int, skip: int = 0) -> Iterator[SparseRows]:
        """All points from the one at `skip` on, so many at a time."""
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
        table = self._table()
        if self.column not in table.schema.names:
            raise InvalidData(f"{self.file}, columns", table.schema.names, f"a column {self.column!r}; --column names the texts'")
        texts: list[str] = []
        seen = 0
        for column in self._column(table, min(size, 1 << 16)):
            if column.null_count:
                raise InvalidData(f"{self.file}, row {seen + column.is_null().index(True).as_py() + 1}, {self.column}", None, "a text")
            texts += column.slice(min(len(column), max(0, skip - seen))).to_pylist()
            seen += len(column)
            while len(texts) >= size:
                yield self.bundle.vectoriser.transform(texts[:size])
                texts = texts[size:]
        if texts:
            yield self.bundle.vectoriser.transform(texts)

    def _column(self, table: ds.Dataset, size: int) -> Iterator[pa.Array]:
        """The texts, at most so many at a time."""
        with self._arrow_errors():
            for batch in table.to_batches(columns=[self.column], batch_size=size, use_threads=False):
                yield batch.column(0).cast(pa.string())

    @contextmanager
    def _arrow_errors(self) -> Iterator[None]:
        try:
            yield
        except pa.ArrowException as error:
            raise InvalidData(f"{self.file}, {self.column}", str(error).splitlines()[0], "a column of texts") from error

    def _table(self) -> ds.Dataset:
        as_text = pacsv.ConvertOptions(column_types={self.column: pa.string()})  # otherwise 007 would be the number 7
        csv, tsv = (ds.CsvFileFormat(pacsv.ParseOptions(delimiter=mark), convert_options=as_text) for mark in (",", "\t"))
        formats = {".csv": csv, ".tsv": tsv, ".parquet": "parquet"}
        suffix = Path(self.file.name.removesuffix(".gz")).suffix
        if suffix not in formats:
            raise InvalidConfig("--data", str(self.file), "a .csv, .tsv or .parquet file of texts")
        try:
            return ds.dataset(self.file, format=formats[suffix])
        except (OSError, pa.ArrowInvalid) as error:
            raise InvalidData(str(self.file), str(error).splitlines()[0], "a readable .csv, .tsv or Parquet file") from error

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
        """Whether labels are written as label:weight, as `read_xmc` tells it."""
        config = self.bundle.manifest.training.get("data", {})
        if config.get("format") == "xmc" and config.get("label_weights") is not None:
            return bool(config["label_weights"])
        return begins_with_weights(self.file)
