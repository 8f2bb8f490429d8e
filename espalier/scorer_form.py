"""Which initialisers of an exported scorer.onnx hold the weights of its network: the form that its manifest declares.

An exporter is free to name, transpose and share what it writes, so the arrays are found by their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, takewhile

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper

from espalier.manifest import DenseLayer, MlpForm

Floats = NDArray[np.float32]


def mlp_form(model: ModelProto, weights: Mapping[str, Floats]) -> MlpForm | None:
    """The form of the network whose arrays training names `node_part`, `layers.0` … and `out`, with `slopes.0` …, as `MlpHead` has them.

    None where the graph holds another array than those.
    """
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    layers = ["node_part", *takewhile(lambda name: f"{name}.weight" in weights, (f"layers.{i}" for i in count()))]
    try:
        found = [_layer(arrays, weights, name, f"slopes.{i}.weight") for i, name in enumerate(layers)]
        return MlpForm(layers=tuple(found), out=_layer(arrays, weights, "out", None))
    except KeyError:
        return None


def _layer(arrays: Mapping[str, Floats], weights: Mapping[str, Floats], name: str, slope: str | None) -> DenseLayer:
    """Raises KeyError where an array is not there."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    for transposed, values in ((False, weight.T), (True, weight)):  # torch has [out, in]
        stored = next((key for key, array in arrays.items() if np.array_equal(array, values)), None)
        if stored is not None:
            return DenseLayer(
                weight=stored,
                transposed=transposed,
                bias=None if bias is None else _vector(arrays, bias),
                slope=None if slope is None else _vector(arrays, weights[slope]),
            )
    raise KeyError(name)


def _vector(arrays: Mapping[str, Floats], values: Floats) -> str:
    for name, array in arrays.items():
        if np.array_equal(array.reshape(-1), values.reshape(-1)):
            return name
    raise KeyError("vector")
