"""Ranking sets on disk: LETOR's text, SVMlight's text with a file of query sizes.

    2 qid:10 1:0.5 2:NULL 3:7 #docid = GX000-24-12369390 …        LETOR: grade, query, feature:value; the rest of the line is a comment

Features are counted from 1, and NULL and NaN are missing values. What a line does not mention is missing in LETOR files too (they write
all), unless `absent` says that it is 0, as in sparse files. Text is read line by line, gzipped or not. Errors name the line. By hand:
scikit-learn's load_svmlight_file knows neither NULL nor document ids, and its errors name no line.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import numpy as np

from espalier.errors import InvalidData

from ..data.ranking_set import RankingSet

MAX_FEATURES = 1_000_000
DOCID = re.compile(r"docid\s*=\s*(\S+)")


def read_letor(path: Path, *, features: int | None = None, absent: float = math.nan) -> RankingSet:
    """A file in LETOR's format.

    features  how many there are; None: the highest number in the file
    absent    value of the features that a line does not mention

    Item ids are those of `#docid = ID`, if every line has one. Raises InvalidData with the line where it is not in the format, among them
    a query whose lines are not together.
    """
    lines = _Lines(path, features)
    query_ids: list[str] = []
    starts: list[int] = []
    items: list[str] = []
    for number, fields, comment in lines.each():
        if not fields[:1] or not fields[0].startswith("qid:") or len(fields[0]) == 4:
            raise InvalidData(f"{path}, line {number}", " ".join(fields)[:80], "a query, qid:ID, after the grade")
        query = fields[0].removeprefix("qid:")
        if not query_ids or query_ids[-1] != query:
            query_ids.append(query)
            starts.append(lines.rows)
        lines.add(number, fields[1:])
        if (docid := DOCID.search(comment)) is not None:
            items.append(docid[1])
    if len(set(query_ids)) != len(query_ids):
        repeated = next(query for place, query in enumerate(query_ids) if query in query_ids[:place])
        raise InvalidData(str(path), f"qid:{repeated} in two places", "the lines of a query together")
    offset = np.array([*starts, lines.rows], np.int64)
    return lines.ranking_set(offset, absent, tuple(query_ids), tuple(items) if len(items) == lines.rows else None)


def read_svmlight(path: Path, sizes: Path, *, features: int | None = None, absent: float = 0.0) -> RankingSet:
    """A file of `grade feature:value …` lines, and one with the number of lines of each query, as LightGBM has them.

    Arguments and errors as `read_letor`.
    """
    lines = _Lines(path, features)
    for number, fields, _ in lines.each():
        lines.add(number, fields)
    counts = array("q")
    with _opened(sizes) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                if not line.strip().isdecimal() or int(line) == 0:
                    raise InvalidData(f"{sizes}, line {number}", line.strip()[:80], "a query's number of lines, at least 1")
                counts.append(int(line))
    offset = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(counts, np.int64))])
    if offset[-1] != lines.rows:
        raise InvalidData(str(sizes), f"{offset[-1]} lines in all", f"{lines.rows}, as {path} has")
    return lines.ranking_set(offset, absent, None, None)


class _Lines:
    """The lines of a text file, one after the other, and the features of those that were added."""

    def __init__(self, path: Path, features: int | None) -> None:
        self.path, self.width = path, features
        self.rows = 0
        self._grade, self._row, self._column, self._value = array("f"), array("q"), array("q"), array("f")
        self._last_grade = 0.0

    def each(self) -> Iterator[tuple[int, list[str], str]]:
        """(number, fields after the grade, comment) of each line that is not empty."""
        with _opened(self.path) as file:
            for number, line in enumerate(file, start=1):
                body, _, comment = line.partition("#")
                fields = body.split()
                if not fields:
                    continue
                try:
                    self._last_grade = float(fields[0])
                except ValueError:
                    self._last_grade = math.nan
                if not 0 <= self._last_grade < math.inf:
                    raise InvalidData(f"{self.path}, line {number}", fields[0][:80], "a grade of at least 0")
                yield number, fields[1:], comment

    def add(self, number: int, fields: list[str]) -> None:
        """Take in a line's `feature:value` fields."""
        seen = set()
        for field in fields:
            name, _, text = field.partition(":")
            try:
                value = math.nan if text.upper() in ("NULL", "NAN") else float(text)
            except ValueError:
                value = math.inf
            if not name.isdecimal() or math.isinf(value):
                raise InvalidData(f"{self.path}, line {number}", field[:80], "feature:value, a number counted from 1 and a number or NULL")
            column = int(name)
            limit = MAX_FEATURES if self.width is None else self.width
            if not 1 <= column <= limit or column in seen:
                raise InvalidData(f"{self.path}, line {number}", field[:80], f"features from 1 to {limit}, each once")
            seen.add(column)
            self._row.append(self.rows)
            self._column.append(column - 1)
            self._value.append(value)
        self._grade.append(self._last_grade)
        self.rows += 1

    def ranking_set(
        self, offset: np.ndarray, absent: float, query_ids: tuple[str, ...] | None, item_ids: tuple[str, ...] | None
    ) -> RankingSet:
        """All lines, as queries that begin at `offset`."""
        if self.rows == 0:
            raise InvalidData(str(self.path), "no lines", "at least one query")
        column = np.frombuffer(self._column, np.int64) if self._column else np.zeros(0, np.int64)
        width = self.width or int(column.max(initial=-1)) + 1
        values_RF = np.full((self.rows, width), absent, np.float32)
        if len(column):
            values_RF[np.frombuffer(self._row, np.int64), column] = np.frombuffer(self._value, np.float32)
        grades = np.frombuffer(self._grade, np.float32).copy()
        return RankingSet(values_RF, grades, offset, tuple(str(name) for name in range(1, width + 1)), query_ids, item_ids)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            yield file
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidData(str(path), str(error), "a readable text file") from error
