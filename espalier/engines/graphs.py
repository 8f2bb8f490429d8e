"""The graphs of a bundle: read, checked against the contract, and rewritten into what ONNX Runtime runs fast.

    query.onnx    history_nodes int64[B, L, T], node_rows[N, D]  → query_state[B, L, S]
                  or history_leaves int64[B, T], node_rows       → query_state[B, L, S]   a sequence encoder
                  or vector float32[B, F]                        → query_state[B, L, S]
    scorer.onnx   query_state[B, S], node_rows[B, C, D]          → logits[B, C]
    content.onnx  features int64[I, X], values float32[I, X]     → rows float32[I, D]     0 = padding
    ranker.onnx   features float32[N, F], NaN where one lacks    → scores float32[N]      higher is better

`history_nodes` are the ancestors of the history's items on each level, the leaf level last; −1 is padding. `history_leaves` are the leaves,
padding in front, the newest last. If a graph's T is no fixed number, histories are shortened to their items. L is H + 1, or 1 where all
levels share a state. An empty history must have a finite state. `node_rows` lie outside the graphs. ONNX opset 18 to 23, without control
flow, custom operators or external data.

A tensor may refer to another file for its numbers. The ONNX library and ONNX Runtime would read that file, relative to the folder that the
process runs in, and the scores could reveal any file. So every message of a graph is checked: initializers, attributes of any kind, local
functions and their defaults. Knows query.onnx, scorer.onnx, ranker.onnx and content.onnx. Does not know trees or searches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, inliner, numpy_helper

from espalier.bundle import CONTENT, RANKER
from espalier.errors import BundleCorrupt

FORBIDDEN_OPS = frozenset({"If", "Loop", "Scan", "SequenceMap"})
MIN_OPSET, MAX_OPSET = 18, 23
CONTRACT: dict[str, tuple[set[str], ...]] = {
    "query.onnx": ({"history_nodes", "node_rows"}, {"history_leaves", "node_rows"}, {"vector", "node_rows"}, {"vector"}),
    "scorer.onnx": ({"query_state", "node_rows"},),
    RANKER: ({"features"},),
    CONTENT: ({"features", "values"},),
}
"""The inputs that each graph may have."""
MAX_NODES = 100_000
"""Most nodes of a graph once its local functions are expanded: a few functions that call each other twice could make any number."""
MAX_CALLS = 64
"""Local functions that may call each other in a row."""
NUMBERS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")


def load_graph(name: str, data: bytes) -> onnx.ModelProto:
    """A bundle's graph, checked, without local functions and slow operators. Raises BundleCorrupt when it breaks the contract."""
    model = read_graph(name, data)
    rewrite_prelu(model)
    return model


def read_graph(name: str, data: bytes) -> onnx.ModelProto:
    """A bundle's graph as it was exported, checked, without local functions. Raises BundleCorrupt when it breaks the contract.

    All code must read a bundle's graphs through this function: the graph that it returns refers to no other file.
    """
    model = parsed_model(name, data)
    try:
        model = inliner.inline_local_functions(model)
        del model.functions[:], model.metadata_props[:]  # ONNX Runtime might take options from the latter
        onnx.checker.check_model(model)
    except Exception as error:  # protobuf and the checker raise many kinds, none of them ours
        raise BundleCorrupt(
            f"{name}: not a valid ONNX model ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error
    foreign = sorted({node.domain for node in model.graph.node} - {"", "ai.onnx"})
    control = sorted({node.op_type for node in model.graph.node} & FORBIDDEN_OPS)
    inputs, outputs = {entry.name for entry in model.graph.input}, [entry.name for entry in model.graph.output]
    if len(outputs) != 1 or not any(inputs == names for names in CONTRACT[name]):
        expected = " or ".join(str(sorted(names)) for names in CONTRACT[name])
        raise BundleCorrupt(f"{name}: inputs {sorted(inputs)} and {len(outputs)} outputs, expected inputs {expected} and one output")
    if foreign or control:
        raise BundleCorrupt(f"{name}: custom operators {foreign} or control flow {control} are not accepted")
    opset_of(model)
    return model


def rewrite_prelu(model: onnx.ModelProto) -> None:
    """PRelu's CPU kernel is slow: one with a single shared slope becomes LeakyRelu, which is exact."""
    slopes = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        slope = slopes.get(node.input[1]) if node.op_type == "PRelu" else None
        if slope is not None and np.all(slope == slope.flat[0]):
            node.CopyFrom(helper.make_node("LeakyRelu", [node.input[0]], list(node.output), node.name, alpha=float(slope.flat[0])))


def opset_of(model: onnx.ModelProto) -> int:
    """The version of ONNX's own operators that a model uses. Raises BundleCorrupt when it is not supported."""
    version = next((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if not MIN_OPSET <= version <= MAX_OPSET:
        raise BundleCorrupt(f"ONNX opset {version}, expected {MIN_OPSET} to {MAX_OPSET}")
    return version


def parsed_model(name: str, data: bytes) -> onnx.ModelProto:
    """A model from its bytes alone. Fields that this version of ONNX does not know are dropped, so no other reader sees them.

    Raises BundleCorrupt where the bytes are no model, or the model has external data, sparse tensors, subgraphs, tensors that declare more
    numbers than they hold, or endlessly recursive local functions.
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
    pending = [root]
    while pending:
        message = pending.pop()
        yield message
        for field, value in message.ListFields():
            if field.message_type is not None:
                pending.extend([value] if hasattr(value, "ListFields") else value)


def _refusal(message: Any) -> str:
    """Why a message may not be in a bundle's graph; empty where it may."""
    if isinstance(message, onnx.TensorProto):
        if message.data_location != onnx.TensorProto.DEFAULT or message.external_data:
            return f"tensor {message.name!r} has external data, which is not accepted"
        if message.HasField("segment"):
            return f"tensor {message.name!r} is a segment of one, which is not accepted"
        # The smallest numbers take half a byte, so each byte or entry of a field holds at most two numbers.
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
    """Raise BundleCorrupt where inlining the local functions would make too many nodes, or never end."""
    functions = {(function.domain, function.name, function.overload): function.node for function in model.functions}
    sizes: dict[tuple[str, str, str], float] = {}
    size = _size(model.graph.node, functions, sizes, MAX_CALLS)
    if not size <= MAX_NODES:
        raise BundleCorrupt(f"{name}: more than {MAX_NODES} operators, or local functions that call each other without end")


def _size(
    nodes: Sequence[Any], functions: Mapping[tuple[str, str, str], Sequence[Any]], sizes: dict[tuple[str, str, str], float], calls: int
) -> float:
    """How many nodes these are once all functions are inlined; infinite where more than `calls` functions call each other in a row."""
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
