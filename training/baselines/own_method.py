"""A caller's own method in `compare`: an object with `fit` and `recommend`, or a class of such objects. It is measured like all others.

    fit(lists)                      lists of item ids, one for each training user, oldest first. It is called several times, first with some
                                    of the users, to measure its time. A class gets a new object for each call; an object must start afresh
    recommend(histories, m)         for each history a list of at most m item ids, best first

Ids that the log does not have, and repeats, are left out. If seen items are left out, `m` grows by the longest history. The method has no
time limit and chooses its own options. Knows the interface. Does not know metrics.
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

from espalier.arrays import Int64
from espalier.errors import EspalierError, InvalidConfig
from espalier.items import Items
from espalier.search import padded

from ..retrieval.task import Fitted, Method, Task


class OwnMethod(Protocol):
    """The interface; see the module."""

    def fit(self, lists: Sequence[Sequence[str]], /) -> object: ...

    def recommend(self, histories: Sequence[Sequence[str]], m: int, /) -> Sequence[Sequence[str]]: ...


def own_method(option: str, source: str) -> tuple[str, Method]:
    """The name and the method of `module:name`, imported from the current folder. Raises InvalidConfig if there is none."""
    module, _, name = source.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    expected = "module:name of an object, or of a class without arguments, that has `fit` and `recommend`"
    try:
        target = getattr(import_module(module), name)
        method = cast(OwnMethod, target() if isinstance(target, type) else target)
    except Exception as error:  # importing a caller's module may raise anything
        raise InvalidConfig(option, source, f"{expected} ({type(error).__name__}: {error})") from error
    if not (callable(getattr(method, "fit", None)) and callable(getattr(method, "recommend", None))):
        raise InvalidConfig(option, source, expected)

    def fitted(task: Task) -> Fitted:
        begin, lists = time.perf_counter(), task.split.lists
        method = cast(OwnMethod, target() if isinstance(target, type) else target)
        with _errors_named(option, source):
            method.fit([task.items.ids_of(lists.of(user)) for user in task.split.train.tolist()])

        def rank(queries: Sequence[Any], /, m: int, exclude_seen: bool) -> Int64:
            with _errors_named(option, source):
                return _answer_rows(method, task.items, queries, m, exclude_seen)

        return Fitted(rank, {}, 0, time.perf_counter() - begin)

    return name, fitted


@contextmanager
def _errors_named(option: str, source: str) -> Iterator[None]:
    """Turn an error of the method into one that names it, so that the comparison goes on with the others."""
    try:
        yield
    except EspalierError:
        raise
    except Exception as error:
        raise InvalidConfig(option, source, f"a method that does not raise {type(error).__name__}: {error}") from error


def _answer_rows(method: OwnMethod, items: Items, queries: Sequence[Any], m: int, exclude_seen: bool) -> Int64:
    """int64[B, M = m]: the answers of a fitted method, in item rows."""
    histories = [np.asarray(query, np.int64) for query in queries]
    histories = [query[query >= 0] for query in histories]
    count = m + (max((len(query) for query in histories), default=0) if exclude_seen else 0)
    answers = method.recommend([items.ids_of(query) if len(query) else [] for query in histories], count)
    if len(answers) != len(histories):
        raise InvalidConfig("recommend", f"{len(answers)} lists", f"{len(histories)}, one for each history")
    lists = []
    for answer, query in zip(answers, histories, strict=True):
        rows = items.rows_of([str(item) for item in answer]).tolist() if len(answer) else []
        excluded = set(query.tolist()) if exclude_seen else set()
        lists.append(np.array([row for row in dict.fromkeys(rows) if row >= 0 and row not in excluded][:m], np.int64))
    return padded(lists, m)
