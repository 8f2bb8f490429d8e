"""The logits of an MLP for rows of nodes, compiled: out(… layer₂(φ(row · weight₁ + bias₁ + state)) …).

ROWS rows are scored together, LANES outputs of a layer at a time (`tile.py`). Outputs are padded with zeros to multiples of LANES. Knows
weights. Does not know trees.

Legend: N nodes, C nodes to score, D node row, S state, R rows together, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.engines.compiled.tile import LANES, ROOM, ROWS, add_tile
from espalier.engines.scorer_weights import ScorerWeights
from espalier.read_only import read_only
from espalier.stored_numbers import number, scale

Array = NDArray[Any]
FAST = {"reassoc", "contract", "arcp", "nsz"}
"""Fast-math without `nnan` and `ninf`: numbers that are not finite must be seen."""


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
    """An array padded with zeros to a multiple of LANES outputs."""
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % LANES)])


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
