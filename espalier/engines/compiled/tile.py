"""One tile of a layer: ROWS inputs times LANES columns of its weights, summed in registers.

Loops that numba compiles load and store a sum at each step. Here the sums stay in vector registers until all inputs are added, so a layer
takes half the time. Six rows of sixteen sums fill the 256-bit registers of a processor, and keep a processor with 512 bits busy.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

ROWS, LANES = 6, 16
ROOM = 2048 + 32
"""Numbers between two rows: more than the widest layer (`scorer_weights.MAX_MATRIX`), and no multiple of 4096 bytes: such addresses slow
each other down."""
VECTOR, LANE = ir.VectorType(ir.FloatType(), LANES), ir.IntType(32)


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
