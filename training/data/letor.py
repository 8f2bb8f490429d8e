"""Reads ranking sets: LETOR's text, and SVMlight's text with a file of query sizes.

    2 qid:10 1:0.5 2:NULL 3:7 #docid = GX000-24-12369390 …        LETOR: grade, query, feature:value; the rest of the line is a comment

Features are counted from 1. NULL and NaN are missing values. A feature that a line does not mention is missing in LETOR's text, where lines
mention all, and 0 in SVMlight's. Text is read line by line, gzipped or not. Errors name the line. Written by hand: scikit-learn's
load_svmlight_file does not know NULL, and its errors name no line.
"""

from __future__ import annotations

import gzip
import math
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import numpy as np

from espalier.arrays import Float32
from espalier.errors import InvalidData

from ..data.ranking_set import MAX_GRADE, RankingSet

Pairs = Callable[[str, int, list[str]], list[str]]
"""A line's location, its row and its fields after the grade → its `feature:value` fields."""

MAX_FEATURES = 1_000_000
MAX_VALUE = float(np.finfo(np.float32).max)
MAX_DIGITS = 18
"""Of a whole number: int() refuses thousands of digits, and a longer one does not fit into 64 bits."""


def read_letor(path: Path) -> RankingSet:
    """A file in LETOR's format, with as many features as the highest number in it.

    Raises InvalidData, which names the line, if the file is not in the format, or if the lines of a query are not together.
    """
    query_ids: list[str] = []
    starts: list[int] = []

    def pairs(location: str, row: int, fields: list[str]) -> list[str]:
        if not fields[:1] or not fields[0].startswith("qid:") or len(fields[0]) == 4:
            raise InvalidData(location, " ".join(fields)[:80], "a query, qid:ID, after the grade")
        query = fields[0].removeprefix("qid:")
        if not query_ids or query_ids[-1] != query:
            query_ids.append(query)
            starts.append(row)
        return fields[1:]

    values_RF, grades_R = _read(path, None, math.nan, pairs)
    if len(set(query_ids)) != len(query_ids):
        repeated = next(query for position, query in enumerate(query_ids) if query in query_ids[:position])
        raise InvalidData(str(path), f"qid:{repeated} in two places", "the lines of a query together")
    return RankingSet(values_RF, grades_R, np.array([*starts, len(grades_R)], np.int64), _names(values_RF), tuple(query_ids))


def read_svmlight(path: Path, sizes: Path, *, features: int | None = None) -> RankingSet:
    """A file of `grade feature:value …` lines, and a file with each query's number of lines, as LightGBM reads them.

    features  how many there are; None: the highest number in the file
    Errors as `read_letor`.
    """
    values_RF, grades_R = _read(path, features, 0.0, lambda location, row, fields: fields)
    counts = array("q")
    with _opened(sizes) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                if not line.strip().isdecimal() or len(line.strip()) > MAX_DIGITS or int(line) == 0:
                    raise InvalidData(f"{sizes}, line {number}", line.strip()[:80], "a query's number of lines, at least 1")
                counts.append(int(line))
    offset = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(counts, np.int64))])
    if offset[-1] != len(grades_R):
        raise InvalidData(str(sizes), f"{offset[-1]} lines in all", f"{len(grades_R)}, as {path} has")
    return RankingSet(values_RF, grades_R, offset, _names(values_RF))


def _names(values_RF: Float32) -> tuple[str, ...]:
    return tuple(str(name) for name in range(1, values_RF.shape[1] + 1))


def _read(path: Path, features: int | None, absent: float, pairs: Pairs) -> tuple[Float32, Float32]:
    """Features float32[R, F] and grades float32[R] of the non-empty lines of a file."""
    limit = MAX_FEATURES if features is None else features
    grades, rows, columns, values = array("f"), array("q"), array("q"), array("f")
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            body = line.partition("#")[0]
            fields, location, row = body.split(), f"{path}, line {number}", len(grades)
            if not fields:
                continue
            grade = _number(fields[0], math.nan)
            if not 0 <= grade <= MAX_GRADE:
                raise InvalidData(location, fields[0][:80], f"a grade from 0 to {MAX_GRADE}")
            grades.append(grade)
            seen_columns = set()
            for field in pairs(location, row, fields[1:]):
                name, _, text = field.partition(":")
                value = math.nan if text.upper() == "NULL" else _number(text, math.inf)
                if not name.isdecimal() or len(name) > MAX_DIGITS or abs(value) > MAX_VALUE:
                    raise InvalidData(location, field[:80], "feature:value, a number counted from 1 and a number or NULL")
                column = int(name) - 1
                if not 0 <= column < limit or column in seen_columns:
                    raise InvalidData(location, field[:80], f"features from 1 to {limit}, each once")
                seen_columns.add(column)
                rows.append(row)
                columns.append(column)
                values.append(value)
    if not grades:
        raise InvalidData(str(path), "no lines", "at least one query")
    values_RF = np.full((len(grades), features or max(columns, default=-1) + 1), absent, np.float32)
    values_RF[np.array(rows), np.array(columns)] = values
    return values_RF, np.array(grades)


def _number(text: str, default: float) -> float:
    """The number in a text; `default` if it is none."""
    try:
        return float(text)
    except ValueError:
        return default


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            yield file
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidData(str(path), str(error), "a readable text file") from error
