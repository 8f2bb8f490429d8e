"""What an ONNX graph of a bundle may hold, whoever wrote it: operators and their weights, all of them in the file itself.

A tensor may say that its numbers are in another file, which the ONNX library and ONNX Runtime then read relative to wherever a process
runs: a graph could show any file through its scores. So every message of a graph is looked at, wherever it hangs: initializers, attributes
of any kind, local functions and their defaults. Knows protobuf messages. Does not know what the graphs compute: see `graphs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx

from espalier.errors import BundleCorrupt

MAX_NODES = 100_000
"""Most nodes of a graph once its local functions are expanded: a few functions that call each other twice could make any number."""
MAX_CALLS = 64
"""Local functions that may call each other in a row."""
NUMBERS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")


def parsed_model(name: str, data: bytes) -> onnx.ModelProto:
    """A model from its bytes alone. What this software has no field for is dropped, so that no other reader of the model finds it.

    Raises BundleCorrupt where the bytes are no model, or one that holds what no bundle may: external data, sparse tensors, subgraphs,
    tensors that declare more numbers than they bring, local functions without end.
    """
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as error:  # protobuf's own class depends on its implementation
        raise BundleCorrupt(f"{name}: not a valid ONNX model ({error})") from error
    model.DiscardUnknownFields()
    for message in messages(model):
        refusal = _refusal(message)
        if refusal:
            raise BundleCorrupt(f"{name}: {refusal}")
    _check_calls(name, model)
    return model


def messages(root: Any) -> Iterator[Any]:
    """A message and all messages inside it."""
    waiting = [root]
    while waiting:
        message = waiting.pop()
        yield message
        for field, value in message.ListFields():
            if field.message_type is not None:
                waiting.extend([value] if hasattr(value, "ListFields") else value)


def _refusal(message: Any) -> str:
    """Why a message may not be in a bundle's graph; empty where it may."""
    if isinstance(message, onnx.TensorProto):
        if message.data_location != onnx.TensorProto.DEFAULT or message.external_data:
            return f"tensor {message.name!r} has external data, which is not accepted"
        if message.HasField("segment"):
            return f"tensor {message.name!r} is a segment of one, which is not accepted"
        # Half a byte is the smallest number; every field of numbers has at least one entry for each two of them.
        room = 2 * (len(message.raw_data) + sum(len(getattr(message, field)) for field in NUMBERS))
        if any(size < 0 for size in message.dims) or math.prod(message.dims) > room:
            return f"tensor {message.name!r} declares the shape {list(message.dims)[:8]}, which is more than it holds"
    if isinstance(message, onnx.SparseTensorProto):
        return "sparse tensors are not accepted"
    if isinstance(message, onnx.AttributeProto) and (message.HasField("g") or message.graphs):
        return f"attribute {message.name!r} is a graph: control flow is not accepted"
    if isinstance(message, onnx.TrainingInfoProto):
        return "training information is not accepted"
    return ""


def _check_calls(name: str, model: onnx.ModelProto) -> None:
    """Raise BundleCorrupt where local functions, written out, would make a graph of too many nodes, or of endlessly many."""
    functions = {(function.domain, function.name, function.overload): function.node for function in model.functions}
    sizes: dict[tuple[str, str, str], float] = {}
    size = _size(model.graph.node, functions, sizes, MAX_CALLS)
    if not size <= MAX_NODES:
        raise BundleCorrupt(f"{name}: more than {MAX_NODES} operators, or local functions that call each other without end")


def _size(
    nodes: Sequence[Any], functions: Mapping[tuple[str, str, str], Sequence[Any]], sizes: dict[tuple[str, str, str], float], calls: int
) -> float:
    """How many nodes some nodes are when all functions are written out; infinite where more than `calls` call each other in a row."""
    total = 0.0
    for node in nodes:
        key = (node.domain, node.op_type, node.overload)
        if key not in functions:
            total += 1
        elif calls == 0:
            return math.inf
        else:
            if key not in sizes:
                sizes[key] = _size(functions[key], functions, sizes, calls - 1)
            total += sizes[key]
    return total
