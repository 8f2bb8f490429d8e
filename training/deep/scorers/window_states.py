"""An encoder of histories that averages items inside time windows: the papers' input (TDM §5.1), at every place of a sequence at once.

    x   = (mean of the items in each window, counted back from the newest; 0 for an empty window)
    z   = W₂ relu(W₁ x + b₁) + b₂

Knows vectors of items and their order. Does not know item tables, losses or search. What a transformer has to learn, that the last item
says most and older ones less, stands in the windows; it learns in a third of the steps, and errs on other queries.

Legend: B sequences, T places of a history, X = T + 1, W windows, D width.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn

from training.deep.scorers.transformer import Dropout

RECENT = (1, 1, 1, 2, 2, 2, 10, 10, 20, 20)
"""Lengths of the papers' windows, newest first: 69 items."""


def windows_of(length: int) -> tuple[int, ...]:
    """Windows over a history of so many items, newest first: the papers', cut to it, and one for what is older."""
    ends = [min(end, length) for end in accumulate(RECENT)]
    sizes = [end - begin for begin, end in zip([0, *ends], [*ends, length], strict=False)]
    return tuple(size for size in sizes if size)


class WindowStates(nn.Module):
    """Vectors of items → states.

    width   D
    hidden  units of the layer between
    length  T, most items of a history
    """

    def __init__(self, width: int, hidden: int, length: int) -> None:
        super().__init__()
        self.windows = windows_of(length)
        self.up, self.down = nn.Linear(len(self.windows) * width, hidden), nn.Linear(hidden, width)
        window_T = torch.repeat_interleave(torch.arange(len(self.windows)), torch.tensor(self.windows)).flip(0)  # newest last
        self.register_buffer("member_WT", (window_T == torch.arange(len(self.windows))[:, None]).float(), persistent=False)
        self.member_WT: Tensor

    def forward(self, items_BTD: Tensor, dropout: Dropout | None = None) -> Tensor:
        """[B, T, D] → [B, X, D]: the states before the first item and after each; oldest first, padding behind."""
        batch, length, width = items_BTD.shape
        sum_BXD = torch.cat([items_BTD.new_zeros(batch, 1, width), items_BTD.cumsum(1)], 1).float()
        end_X = torch.arange(length + 1, device=items_BTD.device)
        means = []
        for size in self.windows:
            begin_X = (end_X - size).clamp(min=0)
            count_X1 = (end_X - begin_X).clamp(min=1)[:, None]
            means.append((sum_BXD[:, end_X] - sum_BXD[:, begin_X]) / count_X1)
            end_X = begin_X
        return self._state(torch.cat(means, 2), dropout)

    def last(self, items_BTD: Tensor, present_BT: Tensor) -> Tensor:
        """[B, D]: the state after the newest item; T places or fewer, padding in front.

        present_BT  bool[B, T]; what stands where it is false changes nothing
        """
        weight_BWT = self.member_WT[:, self.member_WT.shape[1] - present_BT.shape[1] :] * present_BT.to(items_BTD.dtype).unsqueeze(1)
        weight_BWT = weight_BWT / weight_BWT.sum(-1, keepdim=True).clamp(min=1)
        return self._state((weight_BWT @ items_BTD).flatten(1), None)

    def _state(self, means: Tensor, dropout: Dropout | None) -> Tensor:
        means = means if dropout is None else dropout(means)
        hidden = torch.relu(self.up(means))
        state: Tensor = self.down(hidden if dropout is None else dropout(hidden))
        return state
