"""The text format of the Extreme Classification Repository: points of sparse features with their labels.

    POINTS FEATURES LABELS
    3,17 0:0.12 5:0.4 …          labels, then feature:value, both counted from 0; a point may lack either
    3:0.5,17:2 0:0.12 5:0.4 …    the same with weights of labels

Knows the files, gzipped or not. Does not know what is learned from them. By hand: scikit-learn's
load_svmlight_file neither checks the first line nor names a wrong one.

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
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from espalier.errors import InvalidData, InvalidQuery

from ..data.csr import Csr, as_rows
from ..data.relevance import WEIGHTS, is_weight

READ_ERRORS = (OSError, EOFError, zlib.error)
"""What a file that cannot be read raises."""
LONGEST_LINE = 1 << 25
"""Bytes of a line: a compressed file of a few kilobytes may hold one of any length."""
READ_BYTES = 1 << 20
"""Read at a time after the last point."""
LONGEST_NUMBER = 18
"""Digits of a number in a file's first line."""
BLOCK, BLOCK_BYTES = 1 << 14, 1 << 24
"""Points that are parsed together, and bytes of them: parsing takes some twenty times as many."""


class Header(NamedTuple):
    """How many points, features and labels a file has."""

    points: int
    features: int
    labels: int


@dataclass(frozen=True, eq=False)
class LabelledPoints:
    """B points with their labels.

    points  float32[B, F]: features
    labels  float32[B, L]: the weight of each label that a point has, above 0; 1 where the data have no weights
    seen_B  bool[B]: the points that are texts of items: a tree that did not learn from one has seen it in another form, so that nothing is
            chosen by it; None: none is
    own_B   bool[B]: those of them that nobody asked for; None: none is
    """

    points: Csr
    labels: Csr
    seen_B: NDArray[np.bool_] | None = None
    own_B: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return self.points.shape[0]

    def take(self, rows: NDArray[np.int64]) -> LabelledPoints:
        marks = (None if mark_B is None else mark_B[rows] for mark_B in (self.seen_B, self.own_B))
        return LabelledPoints(self.points[rows], self.labels[rows], *marks)

    @property
    def unseen(self) -> NDArray[np.int64]:
        """The positions of the points that may be held out."""
        return np.arange(len(self)) if self.seen_B is None else np.flatnonzero(~self.seen_B)

    @property
    def asked(self) -> NDArray[np.int64]:
        """The positions of the points that somebody asked for."""
        return np.arange(len(self)) if self.own_B is None else np.flatnonzero(~self.own_B)

    def weights_of(self, b: int) -> NDArray[np.float32]:
        return self.labels.data[self.labels.indptr[b] : self.labels.indptr[b + 1]].astype(np.float32)

    def labels_of(self, b: int) -> NDArray[np.int64]:
        return self.labels.indices[self.labels.indptr[b] : self.labels.indptr[b + 1]].astype(np.int64)


def read_xmc(path: Path, label_weights: bool | None = None) -> LabelledPoints:
    """Read a file.

    label_weights  whether labels are written as label:weight, so that a point without labels begins with a space. None: where some line
                   begins with several such pairs, with commas between them. One pair alone could be a point's first feature
    A label without a weight has the weight 1; one of weight 0 is left out. Raises InvalidData, which names the line, where a file is not in
    the format.
    """
    weighted = begins_with_weights(path) if label_weights is None else label_weights
    with reading(path) as (header, lines):
        parts = [parse_points(path, body, header, first, weighted) for first, body in in_blocks(lines, BLOCK)]
    if not parts:
        parts = [parse_points(path, [], header, 2, weighted)]
    return LabelledPoints(_stacked([part.points for part in parts]), _stacked([part.labels for part in parts]))


def _stacked(parts: list[Csr]) -> Csr:
    return parts[0] if len(parts) == 1 else csr_array(vstack(parts, format="csr"))


def begins_with_weights(path: Path) -> bool:
    """Whether some line of a file begins with several label:weight pairs. Raises InvalidData."""
    with reading(path) as (_, lines):
        first = (line.split(b" ", 1)[0] for line in lines)
        return any(b":" in labels and b"," in labels for labels in first)


@contextmanager
def reading(path: Path) -> Iterator[tuple[Header, Iterator[bytes]]]:
    """What the first line of a file says, and the lines of its points, without their ends, as they are read.

    Raises InvalidData, the lines too: where one is too long, or where there are more or fewer than the first line says.
    """
    try:
        with cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb") as stream:
            header = read_header(path, _next_line(path, stream, 1) or b"")
            yield header, _lines(path, stream, header)
    except READ_ERRORS as error:
        raise InvalidData(str(path), str(error), "a readable file in the XMC repository's text format") from error


def in_blocks(lines: Iterator[bytes], size: int, skip: int = 0) -> Iterator[tuple[int, list[bytes]]]:
    """The lines from the point at `skip` on, so many at a time, or BLOCK_BYTES; and the number of the first of them in its file."""
    body: list[bytes] = []
    first, held = skip + 2, 0
    for line in itertools.islice(lines, skip, None):
        body.append(line)
        held += len(line)
        if len(body) == size or held >= BLOCK_BYTES:
            yield first, body
            first, body, held = first + len(body), [], 0
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

    first     the number of the first of them in the file, for errors
    weighted  whether labels are written as label:weight
    Raises InvalidData.
    """
    labels: list[int] = []
    weights: list[float] = []
    labels_from, parts, entries = [0], [], [0]
    for number, line in enumerate(body, start=first):
        begins_with_features = not weighted and b":" in line.split(b" ", 1)[0]
        own, _, rest = (b"", b"", line) if begins_with_features else line.partition(b" ")
        of_point = _labels(f"{path}, line {number}", own, header.labels)
        labels += of_point.keys()
        weights += of_point.values()
        labels_from.append(len(labels))
        parts.append(rest)
        entries.append(entries[-1] + rest.count(b":"))
    indptr = np.array(entries, np.int64)
    numbers = _numbers(path, parts, int(indptr[-1]), first)
    if len(numbers) and not (numbers[0::2].min() >= 0 and numbers[0::2].max() < header.features):
        bad = float(numbers[0::2].max() if numbers[0::2].max() >= header.features else numbers[0::2].min())
        raise InvalidData(str(path), int(bad) if abs(bad) < 1e18 else bad, f"features from 0 to {header.features - 1}")
    shape = (len(body), header.features)
    with np.errstate(over="ignore"):  # infinite ones are refused below
        values = numbers[1::2].astype(np.float32)
    points = csr_array((values, numbers[0::2].astype(np.int32), indptr), shape=shape)
    try:
        as_rows(points).check()
    except InvalidQuery as error:
        raise InvalidData(str(path), error.value, "features each once in a point, with finite values") from error
    arrays = np.array(weights, np.float32), np.array(labels, np.int32), labels_from
    return LabelledPoints(points, csr_array(arrays, shape=(len(body), header.labels)))


def _lines(path: Path, stream: BinaryIO, header: Header) -> Iterator[bytes]:
    """The lines of the points; more than the first line says may follow if they are blank."""
    for point in range(header.points):
        line = _next_line(path, stream, point + 2)
        if line is None:
            raise InvalidData(str(path), f"{point} points", f"{header.points}, as its first line says")
        yield line
    while rest := stream.read(READ_BYTES):
        if rest.strip():
            raise InvalidData(str(path), f"more than {header.points} points", f"{header.points}, as its first line says")


def _next_line(path: Path, stream: BinaryIO, number: int) -> bytes | None:
    """Without its end; None at the end of the file."""
    line = stream.readline(LONGEST_LINE + 1)
    if len(line) > LONGEST_LINE:
        raise InvalidData(f"{path}, line {number}", f"more than {LONGEST_LINE} bytes", "a shorter line")
    return line.removesuffix(b"\n") if line else None


def _labels(where: str, text: bytes, label_count: int) -> dict[int, float]:
    """The labels of a point, ascending, none twice, with their weights."""
    found: dict[int, float] = {}
    for pair in text.split(b","):
        name, colon, written = pair.partition(b":")
        try:
            weight = float(written) if colon else 1.0
            label = int(name) if name.strip() or colon else None
        except ValueError:
            raise InvalidData(where, text[:80].decode(errors="replace"), "labels with commas between them, or label:weight pairs") from None
        if label is None:
            continue
        if not is_weight(weight):
            raise InvalidData(f"{where}, label {label}", weight, WEIGHTS)
        if found.get(label, weight) != weight:
            raise InvalidData(f"{where}, label {label}", weight, f"one weight, and {found[label]:g} came before")
        found[label] = weight
    labels = sorted(found)
    if labels and (labels[0] < 0 or labels[-1] >= label_count):
        raise InvalidData(where, labels[-1] if labels[-1] >= label_count else labels[0], f"labels from 0 to {label_count - 1}")
    return {label: found[label] for label in labels if found[label] > 0}


def _numbers(path: Path, parts: list[bytes], entries: int, first: int) -> NDArray[np.float64]:
    """Feature, value, feature, value … of all points."""
    numbers = _parsed(b" ".join(parts))
    if numbers is not None and len(numbers) == 2 * entries and np.all(numbers[0::2] == np.floor(numbers[0::2])):
        return numbers
    for line, part in enumerate(parts, start=first):
        own = _parsed(part)
        if (
            own is None
            or len(own) != 2 * part.count(b":")
            or len(part.split()) != part.count(b":")
            or np.any(own[0::2] != np.floor(own[0::2]))
        ):
            raise InvalidData(f"{path}, line {line}", part[:80].decode(errors="replace"), "feature:value pairs with spaces between them")
    raise InvalidData(str(path), f"{entries} features", "feature:value pairs with spaces between them")


def _parsed(text: bytes) -> NDArray[np.float64] | None:
    try:
        return np.array(text.replace(b":", b" ").split(), dtype=np.float64)
    except ValueError:
        return None
