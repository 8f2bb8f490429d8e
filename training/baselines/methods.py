"""The baselines by name, each imported when it is asked for; and what each needs of a log."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..retrieval.needs import Estimate, by_parts
from ..retrieval.repeats import with_seen_placed
from ..retrieval.task import Method, Task


def _at(module: str, function: str, **given: str) -> Callable[[Task], Any]:
    """A function of a module, which is imported when it is called."""

    def of(task: Task) -> Any:
        return getattr(import_module(f"training.{module}"), function)(task, **given)

    return of


FOR_VECTORS = ("popularity", "item-means")
"""The baselines of logs whose queries are vectors; the others learn from histories."""

_METHODS: dict[str, Method] = {
    "popularity": _at("baselines.popularity", "popularity"),
    "item-cf": _at("baselines.item_cf", "item_cf"),
    "neighbours": _at("neighbours.fit", "neighbours"),
    "ease": _at("baselines.ease", "ease"),
    "graph-filter": _at("baselines.graph_filter", "graph_filter"),
    "ials": _at("baselines.ials", "ials"),
    "content": _at("baselines.content", "content"),
    "item-means": _at("baselines.item_means", "item_means"),
    "product-dnn": _at("baselines.product_dnn", "product_dnn"),
    "sasrec": _at("baselines.sasrec", "sasrec"),
    "sasrec-full": _at("baselines.sasrec", "sasrec", loss="full"),
    "sasrec-sampled": _at("baselines.sasrec", "sasrec", loss="sampled"),
}

METHODS = {name: with_seen_placed(method) for name, method in _METHODS.items()}

NEEDS: dict[str, Estimate] = {
    "popularity": by_parts(_METHODS["popularity"], trials=1),
    "item-cf": by_parts(_METHODS["item-cf"], trials=3),
    "neighbours": by_parts(_METHODS["neighbours"], trials=40),
    "ease": _at("baselines.ease", "needs"),
    "graph-filter": by_parts(_METHODS["graph-filter"], trials=40),
    "ials": by_parts(_METHODS["ials"], once=8, trials=100),  # its shortest fit is one iteration of eight
    "content": by_parts(_METHODS["content"], trials=5),
    "item-means": by_parts(_METHODS["item-means"], trials=10),
    "product-dnn": _at("baselines.product_dnn", "needs"),
    "sasrec": _at("baselines.sasrec", "needs"),
    "sasrec-full": _at("baselines.sasrec", "needs", loss="full"),
    "sasrec-sampled": _at("baselines.sasrec", "needs", loss="sampled"),
}
