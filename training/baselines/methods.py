"""The baselines by name, each imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from training.retrieval.task import Fitted, Method, Task


def _at(module: str, function: str) -> Method:
    def method(task: Task) -> Fitted:
        return cast(Method, getattr(import_module(f"training.{module}"), function))(task)

    return method


METHODS: dict[str, Method] = {
    "popularity": _at("baselines.popularity", "popularity"),
    "item-cf": _at("baselines.item_cf", "item_cf"),
    "neighbours": _at("neighbours.fit", "neighbours"),
    "ease": _at("baselines.ease", "ease"),
    "ials": _at("baselines.ials", "ials"),
    "content": _at("baselines.content", "content"),
    "product-dnn": _at("baselines.product_dnn", "product_dnn"),
    "sasrec": _at("baselines.sasrec", "sasrec"),
    "sasrec-full": _at("baselines.sasrec", "sasrec_full"),
    "sasrec-sampled": _at("baselines.sasrec", "sasrec_sampled"),
}
