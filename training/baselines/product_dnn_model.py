"""A trained product-DNN (`product_dnn.py`), in NumPy: how it answers, and its file.

Legend: B queries, T history, W windows, I items, E input width, D vector width, F features, M results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from espalier.errors import InvalidData
from espalier.queries import HistoryKind, pad_histories
from training.retrieval.scores import best_of_all

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class ProductDnn:
    """A trained model in NumPy, so that one query costs no framework's overhead.

    windows        history window lengths, old to recent
    input_IE       float32[I, E], the input table
    layers         (float32[in, out], float32[out]) of each dense layer; ReLU between them
    item_vectors   float32[I, D], contiguous; the last number of each is its bias
    curve          (step, validation figure) of every round
    """

    windows: tuple[int, ...]
    input_IE: Float32
    layers: tuple[tuple[Float32, Float32], ...]
    item_vectors: Float32
    curve: tuple[tuple[int, float], ...] = ()

    def user_vectors(self, histories: Sequence[Int64]) -> Float32:
        """float32[B, D], the last number of each is 1, so that ⟨user, item⟩ has the bias in it.

        histories  item rows, oldest first; entries below 0 (unknown items) are skipped. Raises InvalidData on rows beyond the catalogue.
        """
        history_BT = pad_histories(HistoryKind(length=sum(self.windows)), histories).array
        if history_BT.size and history_BT.max() >= len(self.input_IE):
            raise InvalidData("histories", int(history_BT.max()), f"item rows below {len(self.input_IE)}")
        start_W = np.cumsum((0, *self.windows[:-1]))
        present_BT = history_BT >= 0
        rows_BTE = self.input_IE[history_BT]
        rows_BTE[~present_BT] = 0
        count_BW: NDArray[np.floating] = np.maximum(np.add.reduceat(present_BT, start_W, axis=1, dtype=np.float32), 1)
        hidden_BF: Float32 = (np.add.reduceat(rows_BTE, start_W, axis=1) / count_BW[:, :, None]).reshape(len(history_BT), -1)
        for place, (weight, bias) in enumerate(self.layers):
            hidden_BF = (np.maximum(hidden_BF, 0) if place else hidden_BF) @ weight + bias
        return np.concatenate([hidden_BF, np.ones((len(hidden_BF), 1), np.float32)], axis=1)

    @property
    def bytes(self) -> int:
        """Of what answering needs."""
        return self.input_IE.nbytes + self.item_vectors.nbytes + sum(weight.nbytes + bias.nbytes for weight, bias in self.layers)

    def rank(self, histories: Sequence[Int64], m: int, exclude_seen: bool) -> Int64:
        """int64[B, M = m]: items by inner product, ties by the lower row, without the history's own when `exclude_seen`.

        NO_ITEM fills the row where fewer than m items are left.
        """
        return best_of_all(lambda part: self.user_vectors(part) @ self.item_vectors.T, len(self.item_vectors), histories, m, exclude_seen)

    def save(self, file: Path) -> None:
        """Write a safetensors file, which `load_product_dnn` reads."""
        arrays: dict[str, NDArray[Any]] = {"windows": np.array(self.windows), "curve": np.array(self.curve, np.float64).reshape(-1, 2)}
        arrays |= {"input_IE": self.input_IE, "item_vectors": self.item_vectors}
        for i, (weight, bias) in enumerate(self.layers):
            arrays |= {f"weight_{i}": weight, f"bias_{i}": bias}
        save_file(arrays, file)


def load_product_dnn(file: Path) -> ProductDnn:
    """What `save` wrote."""
    arrays = load_file(file)
    return ProductDnn(
        windows=tuple(arrays["windows"].tolist()),
        input_IE=arrays["input_IE"],
        layers=tuple((arrays[f"weight_{i}"], arrays[f"bias_{i}"]) for i in range(sum(name.startswith("weight_") for name in arrays))),
        item_vectors=arrays["item_vectors"],
        curve=tuple((int(step), float(recall)) for step, recall in arrays["curve"]),
    )
