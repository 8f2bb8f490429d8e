"""The query encoder that reads a history as a sequence, once for all levels of the tree.

It has one part, or several that are trained separately: each has its columns of the node rows, its bias, and its softmax in training. Ranks
are the sum of the parts' ranks, a product of experts: a transformer and means over windows err on different queries, and trained under one
softmax they overfit sooner.

    x_t     = row(leaf of the t-th item), the part's columns without its bias        t = 1 … the newest item
    z       = reader(x_1, …, x_newest)                                               (transformer.py, window_states.py)
    state_h = (s_h ∘ z, 1) of one part after the other                               s_h a scale per level, 1 at the start

A linear map of z for each level would add nothing to s_h: inner nodes have separate rows, which can absorb such a map. Readers are as wide
as their columns, and read 0 instead of the bias.

Legend: B queries, T positions of a history, X = T + 1, L levels, D node row, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...deep.scorers.row_table import Rows, lookup
from ...deep.scorers.transformer import Dropout, SequenceEncoder
from ...deep.scorers.window_states import WindowStates


class TransformerStates(nn.Module):
    """A transformer over sequences that begin with a learned start, so that an empty history has a state too."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.start_D = nn.Parameter(torch.randn(width) * 0.02)
        self.transformer = SequenceEncoder(width, layers, heads, length + 1)

    def forward(self, items_BTD: Tensor, dropout: Dropout | None = None) -> Tensor:
        """[B, T, D] → [B, X, D]: the states before the first item and after each; oldest first, padding last."""
        state_BXD: Tensor = self.transformer(self._with_start(items_BTD), dropout)
        return state_BXD

    def last(self, items_BTD: Tensor, present_BT: Tensor) -> Tensor:
        """[B, D]: the state after the newest item; values at positions where present_BT is false have no effect."""
        present_BX = torch.cat([torch.ones_like(present_BT[:, :1]), present_BT], 1)
        return self.transformer.last(self._with_start(items_BTD), present_BX)

    def _with_start(self, items_BTD: Tensor) -> Tensor:
        return torch.cat([self.start_D.expand(items_BTD.shape[0], 1, -1).to(items_BTD.dtype), items_BTD], 1)


Reader = TransformerStates | WindowStates


class SequencePart(nn.Module):
    """A reader over its columns of the node rows, the last of which is a bias.

    dropout  share of a reader's inputs and of its layers' outputs that is 0 in training
    """

    def __init__(self, reader: Reader, columns: slice, levels: int, dropout: float) -> None:
        super().__init__()
        self.reader, self.columns, self.dropout = reader, columns, dropout
        self.scale_LD = nn.Parameter(torch.ones(levels, columns.stop - columns.start - 1))

    def inputs(self, rows_BTD: Tensor) -> Tensor:
        """The reader's input from whole rows: its columns, with 0 instead of the bias."""
        columns_BTD = rows_BTD[..., self.columns]
        return torch.cat([columns_BTD[..., :-1], torch.zeros_like(columns_BTD[..., -1:])], -1)


class SequenceQuery(nn.Module):
    """history_leaves int64[B, T] (leaf nodes, newest last, −1 = padding), node_rows float32[N, D] → features float32[B, L, D − 1].

    length  T, the most positions of a history
    parts   in the order of their columns
    """

    def __init__(self, length: int, parts: Sequence[SequencePart]) -> None:
        super().__init__()
        self.length = length
        self.parts = nn.ModuleList(parts)

    @property
    def typed_parts(self) -> list[SequencePart]:
        return [part for part in self.parts if isinstance(part, SequencePart)]

    def forward(self, history_leaves: Tensor, node_rows: Rows) -> Tensor:
        rows_BTD = lookup(history_leaves.clamp(min=0), node_rows)
        states = []
        for part in self.typed_parts:
            state_BLD = part.scale_LD * part.reader.last(part.inputs(rows_BTD), history_leaves >= 0)[:, None, :-1]
            states += [state_BLD, torch.ones_like(state_BLD[..., :1])]
        return torch.cat(states[:-1], 2)

    def states(self, leaves_BT: Tensor, node_rows: Rows, generator: torch.Generator | None, rows: int | None = None) -> list[Tensor]:
        """[B, X, D] of each part: z before the first item and after each; oldest first, −1 after the newest.

        generator  for dropout; None: nothing is dropped
        rows       number of rows of the whole batch, if leaves_BT are only those of this process; None: they are the whole batch
        """
        rows_BTD = lookup(leaves_BT.clamp(min=0), node_rows)
        drops = [None if generator is None else Dropout(part.dropout, generator, rows) for part in self.typed_parts]
        return [part.reader(part.inputs(rows_BTD), dropout) for part, dropout in zip(self.typed_parts, drops, strict=True)]
