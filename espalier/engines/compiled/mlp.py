"""The logits of an MLP for rows of nodes, compiled: out(… layer₂(φ(row · weight₁ + bias₁ + state)) …).

AT_ONCE rows are scored together, and AT_ONCE inputs of a layer are added to its outputs in one pass over these: loads and stores would take
longer than the sums. Inputs are padded by zeros to multiples of it. Knows weights. Does not know trees.

Legend: N nodes, C nodes to score, D node row, S state, R rows together, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.engines.scorer_weights import ScorerWeights
from espalier.engines.stored_numbers import number
from espalier.read_only import read_only

Array = NDArray[Any]
FAST = {"reassoc", "contract", "arcp", "nsz"}
"""Fast-math without `nnan` and `ninf`: numbers that are not finite must be seen."""
AT_ONCE = 4
ROOM = 2048 + 32
"""More than the widest layer (`scorer_weights.MAX_MATRIX`), and no multiple of 4096 bytes: such addresses slow each other down."""
ONE, TWO, THREE = np.uint64(1), np.uint64(2), np.uint64(3)
ROW_1, ROW_2, ROW_3 = np.uint64(ROOM), np.uint64(2 * ROOM), np.uint64(3 * ROOM)


def packed(weights: ScorerWeights) -> tuple[Any, ...]:
    """A scorer as compiled code takes it: widths int64[layers + 1], empty for an inner product; the offset; one behind the other, the
    layers' weights float32[I, O], biases and slopes; out.
    """
    layers = weights.layers
    widths = [len(layers[0].weight), *(len(layer.bias) for layer in layers)] if layers else []
    matrices = [np.pad(layer.weight, ((0, -len(layer.weight) % AT_ONCE), (0, 0))) for layer in layers]
    none = np.empty(0, np.float32)
    joined = (
        np.concatenate([none, *(np.ravel(array) for array in arrays)], dtype=np.float32)
        for arrays in (matrices, [layer.bias for layer in layers], [layer.slope for layer in layers], [weights.out])
    )
    return *read_only(np.array(widths, np.int64)), np.float32(weights.offset), *read_only(*joined)


@compiled(fastmath=FAST)
def mlp_logits(nodes_C: Array, count: int, rows_ND: Array, state_S: Array, scorer: Any, logits_C: Array) -> None:
    """Write the logits of the first `count` nodes for one query.

    rows_ND  as compiled code has stored numbers (`stored_numbers`)
    scorer   of `packed`, with layers
    """
    widths, offset, weight, bias, slope, out = scorer
    x_RI, y_RO = np.empty((AT_ONCE, ROOM), np.float32), np.empty((AT_ONCE, ROOM), np.float32)
    for begin in range(0, count, AT_ONCE):
        rows = min(AT_ONCE, count - begin)
        for r in range(AT_ONCE):  # the last row is scored again where there are no more
            node = nodes_C[begin + min(r, rows - 1)]
            for i in range(widths[0]):
                x_RI[r, i] = number(rows_ND[node, i])
            x_RI[r, widths[0] : widths[0] + AT_ONCE] = 0
        at, first = 0, 0  # of the layer in `weight`, and in `bias` and `slope`
        for layer in range(len(widths) - 1):
            inputs, outputs = -(-widths[layer] // AT_ONCE) * AT_ONCE, widths[layer + 1]
            for r in range(AT_ONCE):
                for o in range(outputs):
                    y_RO[r, o] = bias[first + o]
                for s in range(outputs if layer == 0 else 0):
                    y_RO[r, s] += state_S[s]
            add_products(x_RI.ravel(), weight[at : at + inputs * outputs], np.uint64(inputs), np.uint64(outputs), y_RO.ravel())
            for r in range(AT_ONCE):
                for o in range(outputs):
                    x_RI[r, o] = y_RO[r, o] if y_RO[r, o] >= 0 else y_RO[r, o] * slope[first + o]
                x_RI[r, outputs : outputs + AT_ONCE] = 0  # 0 · ∞ would be no number
            at, first = at + inputs * outputs, first + outputs
        for r in range(rows):
            logit = offset
            for o in range(len(out)):
                logit += x_RI[r, o] * out[o]
            logits_C[begin + r] = logit


@compiled(fastmath=FAST)
def add_products(x: Array, weight: Array, inputs: Any, outputs: Any, y: Array) -> None:
    """Add x · weight to y, for AT_ONCE rows that lie ROOM apart: the compiler knows that they do not overlap, so it need not ask.

    weight  float32[inputs · outputs]

    Indices are unsigned: numba tests signed ones for whether they count from the end.
    """
    for i in range(np.uint64(0), inputs, np.uint64(AT_ONCE)):
        a_0, a_1, a_2, a_3 = x[i], x[i + ONE], x[i + TWO], x[i + THREE]
        b_0, b_1, b_2, b_3 = x[ROW_1 + i], x[ROW_1 + i + ONE], x[ROW_1 + i + TWO], x[ROW_1 + i + THREE]
        c_0, c_1, c_2, c_3 = x[ROW_2 + i], x[ROW_2 + i + ONE], x[ROW_2 + i + TWO], x[ROW_2 + i + THREE]
        d_0, d_1, d_2, d_3 = x[ROW_3 + i], x[ROW_3 + i + ONE], x[ROW_3 + i + TWO], x[ROW_3 + i + THREE]
        at = i * outputs
        for o in range(outputs):
            w_0, w_1, w_2, w_3 = weight[at + o], weight[at + outputs + o], weight[at + TWO * outputs + o], weight[at + THREE * outputs + o]
            y[o] += a_0 * w_0 + a_1 * w_1 + a_2 * w_2 + a_3 * w_3
            y[ROW_1 + o] += b_0 * w_0 + b_1 * w_1 + b_2 * w_2 + b_3 * w_3
            y[ROW_2 + o] += c_0 * w_0 + c_1 * w_1 + c_2 * w_2 + c_3 * w_3
            y[ROW_3 + o] += d_0 * w_0 + d_1 * w_1 + d_2 * w_2 + d_3 * w_3
