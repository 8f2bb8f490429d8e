"""Memory that compiled code will need soon: asked for, not waited for.

Rows of a large tree lie far apart, and a processor guesses none of their addresses. Asking for them some nodes ahead takes a sixth off a
search of 2^20 items.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # it has no types
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LINE_BYTES = 64
"""What one request brings: a cache line of most processors."""
READ, KEEP, DATA = 0, 3, 1
"""The arguments of LLVM's `prefetch`."""


def _fetch(typing: Any, rows_ND: Any, n: Any, d: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        row_stride, column_stride = cgutils.unpack_tuple(builder, array.strides)  # type: ignore[no-untyped-call]  # numba leaves it untyped
        offset = builder.add(builder.mul(arguments[1], row_stride), builder.mul(arguments[2], column_stride))
        address = builder.gep(builder.bitcast(array.data, cgutils.voidptr_t), [offset])
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]  # likewise
        builder.call(function, [address, word(READ), word(KEEP), word(DATA)])
        return context.get_dummy_value()

    return types.void(rows_ND, types.int64, types.int64), generate


fetch: Any = intrinsic(_fetch)
"""fetch(rows_ND, n, d) asks for the cache line with number d of row n. No address can fault."""
