"""The baselines by name, each imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from training.retrieval.task import Fitted, Method, Task


def _at(module: str, function: str) -> Method:
    def method(task: Task) -> Fitted:
        return cast(Method, getattr(import_module(f"training.baselines.{module}"), function))(task)

    return method


METHODS: dict[str, Method] = {
    "popularity": _at("popularity", "popularity"),
    "item-cf": _at("item_cf", "item_cf"),
    "neighbours": _at("neighbours", "neighbours"),
    "ease": _at("ease", "ease"),
    "ials": _at("ials", "ials"),
    "content": _at("content", "content"),
    "product-dnn": _at("product_dnn", "product_dnn"),
    "sasrec": _at("sasrec", "sasrec"),
    "sasrec-full": _at("sasrec", "sasrec_full"),
    "sasrec-sampled": _at("sasrec", "sasrec_sampled"),
}
