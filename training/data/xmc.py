"""Reads the text format of the Extreme Classification Repository: points of sparse features with their labels.

    POINTS FEATURES LABELS
    3,17 0:0.12 5:0.4 …          labels, then feature:value, both counted from 0; a point may lack either
    3:0.5,17:2 0:0.12 5:0.4 …    the same with weights of labels

Knows the files, gzipped or not. Does not know what is learned from them. Written by hand: scikit-learn's load_svmlight_file neither checks
the first line nor names a wrong one.

Legend: B points, F features, L labels.
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np
from scipy.sparse import csr_array, vstack

from espalier.arrays import Bool, Float32, Float64, Int64
from espalier.errors import InvalidData, InvalidQuery
from espalier.text.sparse_rows import SparseRows

from ..data.csr import Csr, as_rows
from ..data.relevance import WEIGHTS, is_weight

READ_ERRORS = (OSError, EOFError, zlib.error)
"""Errors of an unreadable file."""
LONGEST_LINE = 1 << 25
"""Most bytes of a line: a compressed file of a few kilobytes may hold one of any length."""
READ_BYTES = 1 << 20
"""Bytes read at a time after the last point."""
LONGEST_NUMBER = 18
"""Most digits of a number in a file's first line."""
BLOCK, BLOCK_BYTES = 1 << 14, 1 << 24
"""Most points parsed together, and most bytes of them: parsing takes some twenty times as much memory."""


class Header(NamedTuple):
    """The numbers of a file's points, features and labels."""

    points: int
    features: int
    labels: int


@dataclass(frozen=True, eq=False)
class LabelledPoints:
    """B points with their labels.

    points  float32[B, F]: features
    labels  float32[B, L]: the weight of each label of a point, above 0; 1 if the data have no weights
    seen_B  bool[B]: whether a point is a text of an item; None: none is. Such points choose nothing: a tree that did not learn from one has
            seen it in another form
    own_B   bool[B]: whether a point is such a text and no user's query; None: none is
    """

    points: Csr
    labels: Csr
    seen_B: Bool | None = None
    own_B: Bool | None = None

    def __len__(self) -> int:
        return self.points.shape[0]

    def take(self, rows: Int64) -> LabelledPoints:
        marks = (None if mark_B is None else mark_B[rows] for mark_B in (self.seen_B, self.own_B))
        return LabelledPoints(self.points[rows], self.labels[rows], *marks)

    @property
    def unseen(self) -> Int64:
        """The positions of the points that may be held out."""
        return np.arange(len(self)) if self.seen_B is None else np.flatnonzero(~self.seen_B)

    @property
    def asked(self) -> Int64:
        """The positions of the points that are users' queries."""
        return np.arange(len(self)) if self.own_B is None else np.flatnonzero(~self.own_B)

    def weights_of(self, b: int) -> Float32:
        return self.labels.data[self.labels.indptr[b] : self.labels.indptr[b + 1]].astype(np.float32)

    def labels_of(self, b: int) -> Int64:
        return self.labels.indices[self.labels.indptr[b] : self.labels.indptr[b + 1]].astype(np.int64)


def read_xmc(path: Path, label_weights: bool | None = None) -> LabelledPoints:
    """Read a file.

    label_weights  whether labels are written as label:weight, so that a point without labels begins with a space. None: yes if some line
                   begins with several such pairs, separated by commas. A single pair could be a point's first feature
    A label without a weight has the weight 1; labels of weight 0 and features of value 0 are left out. Raises InvalidData, which names the
    line, if a file is not in the format.
    """
    weighted = begins_with_weights(path) if label_weights is None else label_weights
    with reading(path) as (header, lines):
        blocks = [parse_points(path, body, header, first, weighted) for first, body in in_blocks(lines, BLOCK)]
    if not blocks:
        blocks = [parse_points(path, [], header, 2, weighted)]
    return LabelledPoints(_stacked([block.points for block in blocks]), _stacked([block.labels for block in blocks]))


def _stacked(blocks: list[Csr]) -> Csr:
    return blocks[0] if len(blocks) == 1 else csr_array(vstack(blocks, format="csr"))


def begins_with_weights(path: Path) -> bool:
    """Whether some line of a file begins with several label:weight pairs. Raises InvalidData."""
    with reading(path) as (_, lines):
        first = (line.split(b" ", 1)[0] for line in lines)
        return any(b":" in labels and b"," in labels for labels in first)


@contextmanager
def reading(path: Path) -> Iterator[tuple[Header, Iterator[bytes]]]:
    """The header of a file, and an iterator over the lines of its points, without line ends.

    Both raise InvalidData: for a line that is too long, and for more or fewer lines than the header says.
    """
    try:
        with cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb") as stream:
            header = read_header(path, _next_line(path, stream, 1) or b"")
            yield header, _lines(path, stream, header)
    except READ_ERRORS as error:
        raise InvalidData(str(path), str(error), "a readable file in the XMC repository's text format") from error


def in_blocks(lines: Iterator[bytes], size: int, skip: int = 0) -> Iterator[tuple[int, list[bytes]]]:
    """Blocks of lines from the point at `skip` on, of `size` lines or about BLOCK_BYTES, each with its first line's number in the file."""
    body: list[bytes] = []
    first, size_bytes = skip + 2, 0
    for line in itertools.islice(lines, skip, None):
        body.append(line)
        size_bytes += len(line)
        if len(body) == size or size_bytes >= BLOCK_BYTES:
            yield first, body
            first, body, size_bytes = first + len(body), [], 0
    if body:
        yield first, body


def read_header(path: Path, line: bytes) -> Header:
    fields = line.split()
    if len(fields) != 3 or not all(field.isdigit() and len(field) <= LONGEST_NUMBER for field in fields):
        raise InvalidData(f"{path}, line 1", line[:80].decode(errors="replace"), "three numbers: points, features, labels")
    header = Header(*map(int, fields))
    if max(header.features, header.labels) > np.iinfo(np.int32).max:
        raise InvalidData(f"{path}, line 1", max(header.features, header.labels), f"at most {np.iinfo(np.int32).max} features and labels")
    return header


def parse_points(path: Path, body: Sequence[bytes], header: Header, first: int, weighted: bool) -> LabelledPoints:
    """The points of some lines of a file, without their ends.

    first     the first line's number in the file, for errors
    weighted  whether labels are written as label:weight
    Raises InvalidData.
    """
    labels: list[int] = []
    weights: list[float] = []
    labels_from, feature_texts, entries = [0], [], [0]
    for number, line in enumerate(body, start=first):
        begins_with_features = not weighted and b":" in line.split(b" ", 1)[0]
        label_text, _, feature_text = (b"", b"", line) if begins_with_features else line.partition(b" ")
        point_labels = _labels(f"{path}, line {number}", label_text, header.labels)
        labels += point_labels.keys()
        weights += point_labels.values()
        labels_from.append(len(labels))
        feature_texts.append(feature_text)
        entries.append(entries[-1] + feature_text.count(b":"))
    indptr = np.array(entries, np.int64)
    numbers = _numbers(path, feature_texts, first)
    outside = np.flatnonzero((numbers[0::2] < 0) | (numbers[0::2] >= header.features))
    if len(outside):
        bad_line, bad = first + int(np.searchsorted(indptr, outside[0], "right")) - 1, float(numbers[2 * outside[0]])
        raise InvalidData(f"{path}, line {bad_line}", bad if np.isinf(bad) else int(bad), f"features from 0 to {header.features - 1}")
    shape = (len(body), header.features)
    with np.errstate(over="ignore"):  # infinite ones are refused below
        values = numbers[1::2].astype(np.float32)
    points = csr_array((values, numbers[0::2].astype(np.int32), indptr), shape=shape)
    rows = as_rows(points)
    try:
        rows.check()
    except InvalidQuery:
        _check_each(path, rows, first)
        raise
    points.eliminate_zeros()
    arrays = np.array(weights, np.float32), np.array(labels, np.int32), labels_from
    return LabelledPoints(points, csr_array(arrays, shape=(len(body), header.labels)))


def _check_each(path: Path, rows: SparseRows, first: int) -> None:
    """Raise InvalidData for the first row, of the line `first` on, with a feature twice or an infinite value."""
    for row in range(len(rows)):
        try:
            rows.between(row, row + 1).check()
        except InvalidQuery as error:
            raise InvalidData(f"{path}, line {first + row}", error.value, "features each once in a point, with finite values") from error


def _lines(path: Path, stream: BinaryIO, header: Header) -> Iterator[bytes]:
    """The lines of the points. Only blank lines may follow them."""
    for point in range(header.points):
        line = _next_line(path, stream, point + 2)
        if line is None:
            raise InvalidData(str(path), f"{point} points", f"{header.points}, as its first line says")
        yield line
    while trailing := stream.read(READ_BYTES):
        if trailing.strip():
            raise InvalidData(str(path), f"more than {header.points} points", f"{header.points}, as its first line says")


def _next_line(path: Path, stream: BinaryIO, number: int) -> bytes | None:
    """The next line without its end; None at the end of the file."""
    line = stream.readline(LONGEST_LINE + 1)
    if len(line) > LONGEST_LINE:
        raise InvalidData(f"{path}, line {number}", f"more than {LONGEST_LINE} bytes", "a shorter line")
    return line.removesuffix(b"\n") if line else None


def _labels(location: str, text: bytes, label_count: int) -> dict[int, float]:
    """The labels of a point, ascending and distinct, with their weights."""
    weight_of: dict[int, float] = {}
    for pair in text.split(b","):
        name, colon, written = pair.partition(b":")
        try:
            if b"_" in pair:  # Python's numbers may have it
                raise ValueError
            weight = float(written) if colon else 1.0
            label = int(name) if name.strip() or colon else None
        except ValueError:
            expected = "labels with commas between them, or label:weight pairs"
            raise InvalidData(location, text[:80].decode(errors="replace"), expected) from None
        if label is None:
            continue
        if not is_weight(weight):
            raise InvalidData(f"{location}, label {label}", weight, WEIGHTS)
        if weight_of.get(label, weight) != weight:
            raise InvalidData(f"{location}, label {label}", weight, f"one weight, and {weight_of[label]:g} came before")
        weight_of[label] = weight
    labels = sorted(weight_of)
    if labels and (labels[0] < 0 or labels[-1] >= label_count):
        raise InvalidData(location, labels[-1] if labels[-1] >= label_count else labels[0], f"labels from 0 to {label_count - 1}")
    return {label: weight_of[label] for label in labels if weight_of[label] > 0}


def _numbers(path: Path, feature_texts: list[bytes], first: int) -> Float64:
    """Feature, value, feature, value … of all points."""
    numbers = _parsed(b" ".join(feature_texts))
    if numbers is None:
        line, text = next((line, text) for line, text in enumerate(feature_texts, start=first) if _parsed(text) is None)
        raise InvalidData(f"{path}, line {line}", text[:80].decode(errors="replace"), "feature:value pairs with spaces between them")
    return numbers


def _parsed(text: bytes) -> Float64 | None:
    """The numbers of feature:value pairs with blanks between them; None for other text, and for features that are not whole."""
    character = np.frombuffer(b" " + text + b" ", np.uint8)
    is_blank, is_colon = character <= ord(" "), character == ord(":")
    begins = np.flatnonzero(is_blank[:-1] & ~is_blank[1:]) + 1
    colons = np.add.reduceat(is_colon, begins, dtype=np.int64) if len(begins) else begins
    is_at_an_end = is_colon[1:-1] & (is_blank[:-2] | is_blank[2:])
    if np.any(colons != 1) or is_at_an_end.any() or b"_" in text:
        return None
    try:
        numbers = np.array(text.replace(b":", b" ").split(), dtype=np.float64)
    except ValueError:
        return None
    return numbers if np.all(numbers[0::2] == np.floor(numbers[0::2])) else None
