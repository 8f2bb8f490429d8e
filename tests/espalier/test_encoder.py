"""At how many places the encoder of histories reads them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from espalier.engines.encoder import own_length, places


@pytest.mark.parametrize(
    ("items", "length", "read"),
    [(0, 6, 1), (1, 6, 1), (2, 6, 2), (3, 6, 4), (4, 6, 4), (5, 6, 6), (6, 6, 6), (64, 100, 64), (65, 100, 100), (1, 1, 1), (0, 1, 1)],
)
def test_a_history_is_read_at_the_power_of_two_that_holds_it_and_at_most_at_its_length(items: int, length: int, read: int) -> None:
    history_T = np.full(length, -1)
    history_T[length - items :] = np.arange(items)
    assert places(history_T) == read


def test_padding_between_items_is_read() -> None:
    assert places(np.array([-1, -1, -1, 0, -1, -1, 2, -1])) == 8
    assert places(np.array([-1, -1, -1, -1, 7, -1, -1, -1])) == 4


@pytest.mark.parametrize(
    ("name", "shape", "is_own"),
    [
        ("history_leaves", ["B", "T"], True),
        ("history_leaves", [None, None], True),
        ("history_leaves", ["B", 6], False),
        ("history_leaves", None, False),
        ("history_nodes", ["B", "L", "T"], True),
        ("history_nodes", ["B", "L", 6], False),
        ("vector", ["B", "F"], False),
    ],
)
def test_only_histories_whose_length_is_no_number_are_cut(name: str, shape: list[str | int | None] | None, is_own: bool) -> None:
    rows = helper.make_tensor_value_info("node_rows", onnx.TensorProto.FLOAT, ["N", 4])
    query = helper.make_tensor_value_info(name, onnx.TensorProto.INT64, shape)
    graph = helper.make_graph([], "query", [rows, query], [])
    assert own_length(helper.make_model(graph)) is is_own
