"""The baselines by name, each imported at its first use; and the estimates of their needs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..retrieval.needs import Estimate, by_parts
from ..retrieval.repeats import with_seen_placed
from ..retrieval.task import Method, Task


def _at(module: str, function: str, **arguments: str) -> Callable[[Task], Any]:
    """A function of a module, which is imported when it is called."""

    def call(task: Task) -> Any:
        return getattr(import_module(f"..{module}", __package__), function)(task, **arguments)

    return call


FOR_VECTORS = ("popularity", "item-means")
"""The baselines of logs whose queries are vectors; the others learn from histories."""

Row = tuple[Method, Estimate]


def _timed_by_parts(module: str, function: str, trials: float, once: float = 1) -> Row:
    """A method whose time is estimated from fits to parts of the users; see `by_parts`."""
    method = _at(module, function)
    return method, by_parts(method, trials, once)


def _with_needs(module: str, function: str, **arguments: str) -> Row:
    return _at(module, function, **arguments), _at(module, "needs", **arguments)


_ROWS = {
    "popularity": _timed_by_parts("baselines.popularity", "popularity", trials=1),
    "item-cf": _timed_by_parts("baselines.item_cf", "item_cf", trials=3),
    "neighbours": _timed_by_parts("neighbours.fit", "neighbours", trials=120),
    "ease": _with_needs("baselines.ease", "ease"),
    "graph-filter": _timed_by_parts("baselines.graph_filter", "graph_filter", trials=40),
    "ials": _timed_by_parts("baselines.ials", "ials", trials=100, once=8),  # its shortest fit is one iteration of eight
    "content": _timed_by_parts("baselines.content", "content", trials=5),
    "item-means": _timed_by_parts("baselines.item_means", "item_means", trials=10),
    "product-dnn": _with_needs("baselines.product_dnn", "product_dnn"),
    "sasrec": _with_needs("baselines.sasrec", "sasrec"),
    "sasrec-full": _with_needs("baselines.sasrec", "sasrec", loss="full"),
    "sasrec-sampled": _with_needs("baselines.sasrec", "sasrec", loss="sampled"),
}

METHODS: dict[str, Method] = {name: with_seen_placed(method) for name, (method, _) in _ROWS.items()}
NEEDS: dict[str, Estimate] = {name: estimate for name, (_, estimate) in _ROWS.items()}
