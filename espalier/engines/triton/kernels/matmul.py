"""Matrix products for query encoders. A row of the product does not depend on the batch; with cuBLAS it does.

Legend: M rows, N columns, K summed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, DEPTH = 16, 32, 32
"""The tile of one program. It is fixed, so the sums of a row are always added in the same order."""


@triton.jit(do_not_specialize=["M", "table_rows", "left_batch", "right_batch", "index_batch"])
def matmul_kernel(
    left, right, index, out, M, N, K, table_rows, left_batch, right_batch, index_batch,
    GATHERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[b, m, n] = Σ_k left[b, m, k] · right[b, k, n], float32; one tile a program.

    GATHERED  right's row k is row index[b, k] of one table of `table_rows` rows for all b; a row number out of range gives zeros
    """
    b = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, K, DEPTH):
        k = start + tl.arange(0, DEPTH)
        rows = tl.load(
            left + b * left_batch + m[:, None].to(tl.int64) * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0
        )
        if GATHERED:
            row = tl.load(index + b * index_batch + k, mask=k < K, other=0)
            row = tl.where(row < 0, row + table_rows, row)  # ONNX counts from the end
        else:
            row = k.to(tl.int64)
        inside = ((k < K) & (row >= 0) & (row < table_rows))[:, None] & (n < N)[None, :]
        columns = tl.load(right + b * right_batch + row[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
        sums = tl.dot(rows, columns, sums, input_precision="tf32x3")
    tl.store(out + b * M * N + m[:, None].to(tl.int64) * N + n[None, :], sums, mask=(m < M)[:, None] & (n < N)[None, :])


def matmul(left: Tensor, right: Tensor, index: Tensor | None = None) -> Tensor:
    """left [..., M, K] · right → float32 [..., M, N].

    left   float32; leading axes broadcast against those of right or index
    right  float32 [..., K, N]; with an index a table float32 or float16 [rows, N]
    index  int64 [..., K]: the table's rows that are multiplied
    """
    columns = right.shape[-1]
    if index is None and right.ndim == 2:
        flat = left.reshape(1, -1, left.shape[-1])
        return _launch(flat, right, None, (1, flat.shape[1], columns)).view(*left.shape[:-1], columns)
    other = right.shape[:-2] if index is None else index.shape[:-1]
    lead = torch.broadcast_shapes(left.shape[:-2], other)
    left = left.expand(*lead, *left.shape[-2:]).reshape(-1, *left.shape[-2:])
    if index is None:
        right = right.expand(*lead, *right.shape[-2:]).reshape(-1, *right.shape[-2:])
    else:
        index = index.expand(*lead, index.shape[-1]).reshape(-1, index.shape[-1])
    return _launch(left, right, index, (len(left), left.shape[1], columns)).view(*lead, left.shape[1], columns)


def _launch(left: Tensor, right: Tensor, index: Tensor | None, shape: tuple[int, int, int]) -> Tensor:
    batch, rows, columns = shape
    out = torch.empty(shape, dtype=torch.float32, device=left.device)
    left, right = left.contiguous(), right.contiguous()
    index = None if index is None else index.contiguous()
    if out.numel():
        # A grid's third axis holds 65,535 programs.
        for start in range(0, batch, 65_535):
            part = slice(start, start + 65_535)
            count = len(out[part])
            matmul_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS), count)](
                left[part], right[part] if index is None and right.ndim == 3 else right, right if index is None else index[part], out[part],
                rows, columns, left.shape[-1], right.shape[-2], left.stride(0), right.stride(0) if index is None and right.ndim == 3 else 0,
                0 if index is None else index.stride(0), index is not None, ROWS, COLUMNS, DEPTH,
            )  # fmt: skip
    return out
