"""The baselines by name, each imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from training.retrieval.task import Fitted, Method, Task


def _at(module: str, function: str) -> Method:
    def method(task: Task) -> Fitted:
        return cast(Method, getattr(import_module(f"training.{module}"), function))(task)

    return method


FOR_VECTORS = ("popularity", "item-means")
"""The baselines of logs whose queries are vectors; the others learn from histories."""

METHODS: dict[str, Method] = {
    "popularity": _at("baselines.popularity", "popularity"),
    "item-cf": _at("baselines.item_cf", "item_cf"),
    "neighbours": _at("neighbours.fit", "neighbours"),
    "ease": _at("baselines.ease", "ease"),
    "ials": _at("baselines.ials", "ials"),
    "content": _at("baselines.content", "content"),
    "item-means": _at("baselines.item_means", "item_means"),
    "product-dnn": _at("baselines.product_dnn", "product_dnn"),
    "sasrec": _at("baselines.sasrec", "sasrec"),
    "sasrec-full": _at("baselines.sasrec", "sasrec_full"),
    "sasrec-sampled": _at("baselines.sasrec", "sasrec_sampled"),
}
