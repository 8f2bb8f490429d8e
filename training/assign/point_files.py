"""Points of a file in blocks, as the model's queries: XMC files, SciPy matrices, tables of texts.

XMC files and tables are streamed; a SciPy matrix is read whole, as its format has it.

Legend: B points of a block.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from scipy.sparse import csr_array

from espalier.bundle import Bundle
from espalier.errors import InvalidConfig, InvalidData, InvalidQuery
from espalier.queries import FeaturesKind, TextKind
from espalier.text.sparse_rows import SparseRows

from ..data.csr import as_rows, read_by_rows
from ..data.log_values import BadRows, Place
from ..data.parquet_logs import is_parquet, parquet_batches
from ..data.text_files import TextTableFile, text_batches
from ..data.xmc import begins_with_weights, in_blocks, parse_points, reading
from ..specification.log_format import TextTable

ROWS = 1 << 16
"""Texts of a Parquet file that are read at a time."""


@dataclass(frozen=True)
class PointFile:
    """A file of points for a model. `column`: of a table, the texts.

    Raises InvalidConfig where the model cannot read such files, InvalidData where the file is not what its name says.
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
        texts: list[str] = []
        seen = 0
        for column in self._columns():
            texts += column.slice(min(len(column), max(0, skip - seen))).to_pylist()
            seen += len(column)
            while len(texts) >= size:
                yield self.bundle.vectoriser.transform(texts[:size])
                texts = texts[size:]
        if texts:
            yield self.bundle.vectoriser.transform(texts)

    def _columns(self) -> Iterator[pa.Array]:
        """The texts of a table, some at a time."""
        role, bad_rows = {"text": self.column}, BadRows("refuse", TextTable.SECTION)
        with tempfile.TemporaryDirectory() as scratch:
            if is_parquet(self.file):
                batches: Iterator[tuple[Place, pa.RecordBatch]] = parquet_batches(self.file, role, Path(scratch), ROWS)
            else:
                batches = text_batches(TextTableFile.of(self.file, TextTable()), role, bad_rows)
            for place, batch in batches:
                texts = place.strings("text", batch.column(0))
                if texts.null_count:
                    raise InvalidData(*place.wrong("text", texts.is_null().index(True).as_py(), None, "a text"))
                yield texts

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
