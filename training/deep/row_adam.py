"""AdamW for tables of which a step reads few rows, with the mean of the rows over steps (`optimiser.py`).

Dense AdamW changes every row at every step: a row without a gradient moves on by its momentum, and its moments fade. All of that follows
from the row as it was after some step s. With m, v its moments then and u = m / (√v + ε), a later step t without a gradient makes it

    row_t = (1 − η_t λ) · row_{t−1} − η_t · √(1 − β₂^t) / (1 − β₁^t) · (β₁ / √β₂)^{t−s} · u

which is dense AdamW except that ε fades with √v here. So a row is not updated until it is read. Then it is brought up to date with factors
that depend only on s and the present: one table of factors serves all rows (`_Clock`). The mean over steps follows in the same way.

Knows rows and gradients. Does not know models or processes.

Legend: N rows, D numbers of a row, R rows at a time, S times, F factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

EPSILON = 1e-8
BLOCK = {"cpu": 1 << 7, "cuda": 1 << 16}
"""Rows that are updated at a time. On a CPU they, their moments and their mean then stay in its cache."""


class RowAdam:
    """The optimiser of rows_ND, float32[N, D], and of their mean over steps, mean_ND. Both are changed in place."""

    def __init__(self, rows_ND: Tensor, mean_ND: Tensor, betas: tuple[float, float], weight_decay: float) -> None:
        self.steps = 0
        self._rows_ND, self._mean_ND = rows_ND.detach(), mean_ND.detach()
        self._first_ND, self._second_ND = torch.zeros_like(self._rows_ND), torch.zeros_like(self._rows_ND)
        self._tables = self._rows_ND, self._first_ND, self._second_ND, self._mean_ND
        self._betas, self._weight_decay = betas, weight_decay
        self._clock = _Clock(rows_ND.device)
        self._time_N = torch.zeros(len(rows_ND), dtype=torch.int32, device=rows_ND.device)
        self._block = BLOCK[rows_ND.device.type]

    @torch.no_grad()
    def refresh(self, position_R: Tensor) -> None:
        """Bring distinct rows, int64[R], up to date."""
        stale = position_R[self._time_N[position_R] < self._clock.now]
        for positions in stale.split(self._block):
            blocks = [table.index_select(0, positions) for table in self._tables]
            self._move_on(blocks, self._time_N[positions])
            self._write(positions, blocks)
        self._time_N[stale] = self._clock.now

    @torch.no_grad()
    def refresh_all(self) -> None:
        """Bring all rows and their means up to date."""
        for start in range(0, len(self._rows_ND), self._block):
            block = slice(start, start + self._block)
            self._move_on([table[block] for table in self._tables], self._time_N[block])
        self._clock = _Clock(self._rows_ND.device)
        self._time_N.zero_()

    @torch.no_grad()
    def step(self, position_R: Tensor, gradient_RD: Tensor, rate: float) -> None:
        """One step of all rows, those at distinct position_R with a gradient, at a learning rate."""
        self.refresh(position_R)
        self.steps += 1
        first, second = self._betas
        decay, corrected_rate = 1 - rate * self._weight_decay, rate / (1 - first**self.steps)
        root = (1 - second**self.steps) ** 0.5
        self._clock.step(first, second, decay, corrected_rate * root)
        for positions, gradient in zip(position_R.split(self._block), gradient_RD.split(self._block), strict=True):
            rows_RD, first_RD, second_RD = blocks = [table.index_select(0, positions) for table in self._tables[:3]]
            first_RD.lerp_(gradient, 1 - first)
            second_RD.mul_(second).addcmul_(gradient, gradient, value=1 - second)
            rows_RD.mul_(decay).addcdiv_(first_RD, second_RD.sqrt().div_(root).add_(EPSILON), value=-corrected_rate)
            self._write(positions, blocks)
        self._time_N[position_R] = self._clock.now

    @torch.no_grad()
    def average(self, decay: float) -> None:
        """mean ← decay · mean + (1 − decay) · row, for all rows."""
        self._clock.average(decay)

    def state_dict(self) -> dict[str, Any]:
        """The moments of rows that are up to date, not copied."""
        return {"steps": self.steps, "first": self._first_ND, "second": self._second_ND}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self._first_ND.copy_(state["first"])
        self._second_ND.copy_(state["second"])

    def _write(self, positions: Tensor, blocks: Sequence[Tensor]) -> None:
        for table, block_RD in zip(self._tables, blocks, strict=False):
            table.index_copy_(0, positions, block_RD)

    def _move_on(self, blocks: Sequence[Tensor], time_R: Tensor) -> None:
        """Bring blocks of all tables, which were up to date at time_R, to the present; in place."""
        rows_RD, first_RD, second_RD, mean_RD = blocks
        first, second, decay, moved, mean, mean_of_row, mean_of_move = self._clock.since(time_R)
        move_RD = first_RD / second_RD.sqrt().add_(EPSILON)
        mean_RD.mul_(mean).addcmul_(rows_RD, mean_of_row).addcmul_(move_RD, mean_of_move, value=-1)
        rows_RD.mul_(decay).addcmul_(move_RD, moved, value=-1)
        first_RD.mul_(first)
        second_RD.mul_(second)


class _Clock:
    """The factors that bring rows, last up to date at each earlier time, to the present. A step or an average begins a new time.

    A row, its moments m and v, its mean and u = m / (√v + ε) have become

        m · first,   v · second,   row · decay − u · moved,   mean · mean + row · mean_of_row − u · mean_of_move
    """

    def __init__(self, device: torch.device) -> None:
        self.now = 0
        self._new_F1 = torch.tensor([[1.0], [1.0], [1.0], [0.0], [1.0], [0.0], [0.0], [1.0]], dtype=torch.float64, device=device)
        self._factors_FS = self._new_F1.clone()

    def step(self, beta1: float, beta2: float, decay: float, move: float) -> None:
        """A step that multiplies a row by `decay`, and moves it by move · (β₁ / √β₂)^k · u where its last gradient is k steps old."""
        first, second, decay_S, moved, *_, fading = self._factors_FS
        fading.mul_(beta1 / beta2**0.5)
        first.mul_(beta1)
        second.mul_(beta2)
        decay_S.mul_(decay)
        moved.mul_(decay).add_(fading, alpha=move)
        self._begin()

    def average(self, mean_decay: float) -> None:
        """An average that multiplies the mean by `mean_decay`."""
        _, _, decay_S, moved, mean, mean_of_row, mean_of_move, _ = self._factors_FS
        mean.mul_(mean_decay)
        mean_of_row.mul_(mean_decay).add_(decay_S, alpha=1 - mean_decay)
        mean_of_move.mul_(mean_decay).add_(moved, alpha=1 - mean_decay)
        self._begin()

    def since(self, time_R: Tensor) -> list[Tensor]:
        """The first seven factors, each float32[R, 1], of rows that were up to date at int32[R]."""
        return list(self._factors_FS[:7, time_R.long()].float().unsqueeze(2))

    def _begin(self) -> None:
        self._factors_FS = torch.cat([self._factors_FS, self._new_F1], 1)
        self.now += 1
