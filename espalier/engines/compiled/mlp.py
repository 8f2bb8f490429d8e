"""The logits of an MLP for rows of nodes, compiled: out(… layer₂(φ(row · weight₁ + bias₁ + state)) …).

A tile of a layer is ROWS inputs times LANES columns of its weights, summed in registers. Loops that numba compiles load and store a sum at
each step. Here the sums stay in vector registers until all inputs are added, so a layer takes half the time. Six rows of sixteen sums fill
the 256-bit registers of a processor, and keep a processor with 512 bits busy. Outputs are padded with zeros to multiples of LANES. Knows
weights. Does not know trees.

Legend: N nodes, C nodes to score, D node row, S state, R rows together, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from espalier.arrays import Array, read_only
from espalier.compiled_code import compiled
from espalier.engines.scorer_weights import ScorerWeights
from espalier.stored_numbers import number, scale

FAST = {"reassoc", "contract", "arcp", "nsz"}
"""Fast-math without `nnan` and `ninf`: numbers that are not finite must be seen."""
ROWS, LANES = 6, 16
ROOM = 2048 + 32
"""Numbers between two rows: more than the widest layer (`scorer_weights.MAX_MATRIX`), and no multiple of 4096 bytes: such addresses slow
each other down."""
VECTOR, LANE = ir.VectorType(ir.FloatType(), LANES), ir.IntType(32)


def packed(weights: ScorerWeights) -> tuple[Any, ...]:
    """A scorer as compiled code reads it: widths int64[layers + 1], empty for an inner product; the offset; the weights float32[O / LANES,
    I, LANES] of all layers end to end, their biases and their slopes; out.
    """
    layers = weights.layers
    widths = [len(layers[0].weight), *(len(layer.bias) for layer in layers)] if layers else []
    tiles = [_padded(layer.weight).reshape(len(layer.weight), -1, LANES).swapaxes(0, 1) for layer in layers]
    biases, slopes = ([_padded(array) for array in arrays] for arrays in ([x.bias for x in layers], [x.slope for x in layers]))
    none = np.empty(0, np.float32)
    flat = (
        np.concatenate([none, *(np.ravel(array) for array in arrays)], dtype=np.float32)
        for arrays in (tiles, biases, slopes, [weights.out])
    )
    return *read_only(np.array(widths, np.int64)), np.float32(weights.offset), *read_only(*flat)


def _padded(array: Array) -> Array:
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % LANES)])


def _spread(builder: Any, value: Any) -> Any:
    """A vector with a number in every lane."""
    undefined, first = ir.Constant(VECTOR, ir.Undefined), ir.Constant(ir.VectorType(LANE, LANES), [0] * LANES)
    return builder.shuffle_vector(builder.insert_element(undefined, value, LANE(0)), undefined, first)


def _add_tile(typing: Any, x: Any, inputs: Any, weight: Any, at: Any, start: Any, slope: Any, first: Any, y: Any, o: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, weight, start, slope, y = (context.make_array(signature.args[k])(context, builder, arguments[k]).data for k in (0, 2, 4, 5, 7))
        inputs, at, first, o = (arguments[k] for k in (1, 3, 6, 8))
        number = inputs.type
        multiply_add = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VECTOR, [VECTOR] * 3), f"llvm.fmuladd.v{LANES}f32")

        def vector(array: Any, index: Any) -> Any:
            return builder.bitcast(builder.gep(array, [index]), VECTOR.as_pointer())

        def load(array: Any, index: Any) -> Any:
            return builder.load(vector(array, index), align=4)

        before, loop, after = builder.block, builder.append_basic_block("tile"), builder.append_basic_block("sums")
        begin = load(start, first)
        builder.branch(loop)
        builder.position_at_end(loop)
        i = builder.phi(number)
        sums = [builder.phi(VECTOR) for _ in range(ROWS)]
        weights = load(weight, builder.add(at, builder.mul(i, number(LANES))))
        added = []
        for r, total in enumerate(sums):
            value = _spread(builder, builder.load(builder.gep(x, [builder.add(i, number(r * ROOM))])))
            added.append(builder.call(multiply_add, [value, weights, total]))
            total.add_incoming(begin, before)
            total.add_incoming(added[r], loop)
        following = builder.add(i, number(1))
        i.add_incoming(number(0), before)
        i.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, inputs), loop, after)
        builder.position_at_end(after)
        slopes = load(slope, first)
        for r, total in enumerate(added):
            is_positive = builder.fcmp_ordered(">=", total, ir.Constant(VECTOR, [0.0] * LANES))
            value = builder.select(is_positive, total, builder.fmul(total, slopes))
            builder.store(value, vector(y, builder.add(o, number(r * ROOM))), align=4)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(x, integer, weight, integer, start, slope, integer, y, integer), generate


add_tile: Any = intrinsic(_add_tile)
"""add_tile(x, inputs, weight, at, start, slope, first, y, o): y[r, o + l] = φ(start[first + l] + Σ_i x[r, i] · weight[at + i · LANES + l])
for each row r and lane l, where φ(v) = v if v ≥ 0, else v · slope[first + l].

Arrays are float32 and contiguous, x and y with ROOM numbers a row; inputs ≥ 1. No index is checked.
"""


@compiled(fastmath=FAST)
def mlp_logits(nodes_C: Array, count: int, rows_ND: Array, state_S: Array, scorer: Any, logits_C: Array) -> None:
    """Write the logits of the first `count` nodes for one query.

    rows_ND  stored as in `stored_numbers`
    scorer   of `packed`, with layers
    """
    widths, offset, weight, bias, slope, out = scorer
    start = bias.copy()  # the initial value of the sums: biases, in the first layer also the state
    for s in range(widths[1]):
        start[s] += state_S[s]
    x, y = np.empty(ROWS * ROOM, np.float32), np.empty(ROWS * ROOM, np.float32)
    for begin in range(0, count, ROWS):
        rows = min(ROWS, count - begin)
        for r in range(ROWS):  # fewer than ROWS rows: the last one is repeated
            node = nodes_C[begin + min(r, rows - 1)]
            own_scale = scale(rows_ND, node)
            for i in range(widths[0]):
                x[r * ROOM + i] = number(rows_ND[node, i]) * own_scale
        at, first = 0, 0  # offsets of the tile in `weight`, and in `start` and `slope`
        for layer in range(len(widths) - 1):
            for o in range(0, widths[layer + 1], LANES):
                add_tile(x, widths[layer], weight, at, start, slope, first, y, o)
                at, first = at + widths[layer] * LANES, first + LANES
            x, y = y, x
        for r in range(rows):
            logit = offset
            for o in range(len(out)):
                logit += x[r * ROOM + o] * out[o]
            logits_C[begin + r] = logit
