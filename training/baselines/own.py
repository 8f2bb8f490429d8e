"""A method of one's own in `compare`, measured as all others are: an object with `fit` and `recommend`, or a class of such.

    fit(lists)                      lists of item ids, one for each training user, oldest first. It is called several times, with some users
                                    first, to see how long it takes: of a class each time on a new object, and an object must begin anew
    recommend(histories, m)         for each history, a list of item ids, at most m item ids, best first

Ids that the log does not have, and repeats, are left out; where seen items are left out, so many more are asked for. It gets no time limit
and chooses by itself. Knows the interface. Does not know what is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from espalier.errors import EspalierError, InvalidConfig
from espalier.items import Items
from espalier.search import NO_ITEM

from ..retrieval.task import Fitted, Method, Task

Int64 = NDArray[np.int64]


class Own(Protocol):
    """See the module."""

    def fit(self, lists: Sequence[Sequence[str]], /) -> object: ...

    def recommend(self, histories: Sequence[Sequence[str]], m: int, /) -> Sequence[Sequence[str]]: ...


def own_method(option: str, where: str) -> tuple[str, Method]:
    """The name and the method of `module:name`, found from the current folder. Raises InvalidConfig where there is none."""
    module, _, name = where.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    expected = "module:name of an object, or of a class without arguments, that has `fit` and `recommend`"
    try:
        found = getattr(import_module(module), name)
        method = cast(Own, found() if isinstance(found, type) else found)
    except Exception as error:  # whatever somebody else's module does when it is imported
        raise InvalidConfig(option, where, f"{expected} ({type(error).__name__}: {error})") from error
    if not (callable(getattr(method, "fit", None)) and callable(getattr(method, "recommend", None))):
        raise InvalidConfig(option, where, expected)

    def fitted(task: Task) -> Fitted:
        begin, lists = time.perf_counter(), task.split.lists
        method = cast(Own, found() if isinstance(found, type) else found)
        rows = [lists.item_of_event_E[lists.offset_U1[user] : lists.offset_U1[user + 1]] for user in task.split.train.tolist()]
        with _named(option, where):
            method.fit([task.items.ids_of(row.astype(np.int64)) for row in rows])

        def rank(queries: Sequence[Any], /, m: int, exclude_seen: bool) -> Int64:
            with _named(option, where):
                return _answer_rows(method, task.items, queries, m, exclude_seen)

        return Fitted(rank, {}, 0, time.perf_counter() - begin)

    return name, fitted


@contextmanager
def _named(option: str, where: str) -> Iterator[None]:
    """Name the method whose own error ends it, so that the others are measured all the same."""
    try:
        yield
    except EspalierError:
        raise
    except Exception as error:
        raise InvalidConfig(option, where, f"a method that does not raise {type(error).__name__}: {error}") from error


def _answer_rows(method: Own, items: Items, queries: Sequence[Any], m: int, exclude_seen: bool) -> Int64:
    """int64[B, M = m]: what a fitted method answers, in item rows."""
    known = [np.asarray(query, np.int64) for query in queries]
    known = [query[query >= 0] for query in known]
    most = m + (max((len(query) for query in known), default=0) if exclude_seen else 0)
    answers = method.recommend([items.ids_of(query) if len(query) else [] for query in known], most)
    if len(answers) != len(known):
        raise InvalidConfig("recommend", f"{len(answers)} lists", f"{len(known)}, one for each history")
    found_BM = np.full((len(known), m), NO_ITEM, np.int64)
    for row_M, answer, query in zip(found_BM, answers, known, strict=True):
        rows = items.rows_of([str(item) for item in answer]).tolist() if len(answer) else []
        left_out = set(query.tolist()) if exclude_seen else set()
        best = [row for row in dict.fromkeys(rows) if row >= 0 and row not in left_out][:m]
        row_M[: len(best)] = best
    return found_BM
