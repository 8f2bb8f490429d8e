"""Triton's interpreter with a check: a store outside the arrays of a launch is an error, not a crash of some later test."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def stores_inside() -> Iterator[None]:
    """Refuses stores outside the tensors that the running kernel was given."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    store, to_host = builder.create_masked_store, executor._init_args_hst
    spans: list[tuple[int, int]] = []

    def begin(self: Any, arguments: Any, options: Any) -> Any:
        on_host = to_host(self, arguments, options)
        spans[:] = sorted(_span(array) for array in (*on_host[0], *on_host[1].values()) if isinstance(array, torch.Tensor))
        return on_host

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        begins, ends = np.array(spans, np.uint64).T
        stored = np.asarray(pointers.data)[np.broadcast_to(mask.data, np.shape(pointers.data)).astype(bool)]
        span = np.searchsorted(begins, stored, "right") - 1
        is_inside = (span >= 0) & (stored + np.uint64(value.data.dtype.itemsize) <= np.maximum.accumulate(ends)[span])
        assert is_inside.all(), f"{np.count_nonzero(~is_inside)} stores outside the arrays of a kernel"
        return store(self, pointers, value, mask, *options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_init_args_hst", begin)
        patch.setattr(builder, "create_masked_store", checked_store)
        yield


def _span(array: torch.Tensor) -> tuple[int, int]:
    """The first address of an array, and the one after its last."""
    length = sum((size - 1) * stride for size, stride in zip(array.shape, array.stride(), strict=True)) + 1
    return array.data_ptr(), array.data_ptr() + (length * array.element_size() if array.numel() else 0)
