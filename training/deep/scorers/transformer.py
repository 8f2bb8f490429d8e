"""The encoder of SASRec (Kang & McAuley 2018, arXiv 1808.09781): a causal transformer over a history of items.

Knows vectors of items and their order. Does not know item tables, losses or search. A block normalises its inputs and not its outputs
(pre-norm), which trains at most learning rates; its dense part is 4 D wide.

    x_t ← v_t                                                                      the item's vector
    x_t ← x_t + W_o · Σ_{s ≤ t} softmax_s(⟨q_t, k_s⟩ / √(D/H) + b(t − s)) · v_s         q, k, v = W · norm(x)
    x_t ← x_t + W_2 · gelu(W_1 · norm(x_t))
    state_t = norm(x_t)

b is learned for each head and bucket of distances, 0 at the start (Raffel et al. 2020, arXiv 1910.10683, 2.1). Published SASRec adds a
vector for each position from the oldest item instead, which does not tell recency, and tells nothing if longer lists are cut.

Legend: B sequences, T positions, D width, H heads, E width of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...deep.parallel import process_rows


class Dropout:
    """Sets a share of numbers to 0 and raises the others in proportion. The share is rounded to a multiple of 1/256.

    A mask takes 8 random bits a number: torch's own masks take a CPU longer than the matrix products around them.

    rows  number of rows of the whole batch, if x holds only those of this process; None: x is the whole batch
    """

    def __init__(self, share: float, generator: torch.Generator, rows: int | None = None) -> None:
        self.dropped_of_256 = round(256 * share)
        self.generator = generator
        self.rows = rows

    def __call__(self, x: Tensor) -> Tensor:
        if self.dropped_of_256 == 0:
            return x
        shape = (len(x) if self.rows is None else self.rows, *x.shape[1:])
        numbers = math.prod(shape)
        words = torch.empty(-(-numbers // 8), dtype=torch.int64, device=x.device).random_(-(2**63), None, generator=self.generator)
        byte = words.view(torch.uint8)[:numbers].view(shape)
        byte = byte if self.rows is None else byte[process_rows(self.rows)]
        return x * ((byte >= self.dropped_of_256).to(x.dtype) * (256 / (256 - self.dropped_of_256)))


EXACT, BUCKETS = 16, 33
"""Distances below the first have separate buckets; the second is the number of buckets, the last one for the first position."""


def buckets_of(length: int) -> Tensor:
    """int64[T, T]: the bucket of a column's position, seen from a row's position.

    Each distance below EXACT has a separate bucket. 16 more buckets get wider up to EXACT² and above. The first position, which padding may
    follow, has the last bucket.
    """
    distance_TT = (torch.arange(length)[:, None] - torch.arange(length)).clamp(min=0)
    far_TT = EXACT + (torch.log(distance_TT.clamp(min=1) / EXACT) / math.log(EXACT) * (BUCKETS - 1 - EXACT)).long()
    bucket_TT = torch.where(distance_TT < EXACT, distance_TT, far_TT.clamp(max=BUCKETS - 2))
    bucket_TT[:, 0] = BUCKETS - 1
    return bucket_TT


class SequenceEncoder(nn.Module):
    """Vectors of items → states.

    width   D, a multiple of `heads`
    length  most positions of a sequence
    """

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        future_TT = torch.full((length, length), -torch.inf).triu(1)  # −∞ where the column is later than the row, else 0
        self.register_buffer("hidden_TT", future_TT, persistent=False)
        self.hidden_TT: Tensor
        self.register_buffer("bucket_TT", buckets_of(length), persistent=False)
        self.bucket_TT: Tensor

    def forward(self, items_BTD: Tensor, dropout: Dropout | None = None) -> Tensor:
        """[B, T, D] → [B, T, D]: the state at t depends only on positions 0 … t. Oldest first, padding last, where it has no effect."""
        length = items_BTD.shape[1]
        x_BTD = items_BTD if dropout is None else dropout(items_BTD)
        for block, mask_HTT in zip(self.blocks, self._masks(), strict=True):
            x_BTD = block(x_BTD, mask_HTT[:, :length, :length], dropout)
        state_BTD: Tensor = self.norm(x_BTD)
        return state_BTD

    def last(self, items_BTD: Tensor, present_BT: Tensor) -> Tensor:
        """[B, D]: the state at the last present position, as `forward` gives it for the present positions alone.

        present_BT  bool[B, T]: true at the first position, false at some (or none) of the next ones, then true; values where it is false
                    have no effect
        """
        x_BTD = torch.cat([items_BTD[:, :-1], torch.where(present_BT[:, -1:, None], items_BTD[:, -1:], items_BTD[:, :1])], 1)
        padding_BT = torch.zeros_like(present_BT, dtype=x_BTD.dtype).masked_fill(~present_BT, -torch.inf)
        length = present_BT.shape[1]
        *lower_masks, top_mask = [mask_HTT[:, :length, :length] + padding_BT[:, None, None] for mask_HTT in self._masks()]
        for block, mask_BHTT in zip(list(self.blocks)[:-1], lower_masks, strict=True):
            x_BTD = block(x_BTD, mask_BHTT, None)
        state_BD: Tensor = self.norm(self.blocks[-1](x_BTD, top_mask, None, last=True)).squeeze(1)
        return state_BD

    def _masks(self) -> list[Tensor]:
        """[H, T, T] for each block: what is added to the logit of each row and column. In an exported graph these are constants."""
        return [nn.functional.embedding(self.bucket_TT, block.bias_KH).permute(2, 0, 1) + self.hidden_TT for block in self.typed_blocks]

    @property
    def typed_blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]


class Block(nn.Module):
    """Attention, then two dense layers; each output is added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.bias_KH = nn.Parameter(torch.zeros(BUCKETS, heads))
        self.attention_norm, self.dense_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for layer in (self.query_key_value, self.out, self.up, self.down):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x_BTD: Tensor, mask: Tensor, dropout: Dropout | None, last: bool = False) -> Tensor:
        """[B, T, D] → [B, T, D], or with `last` [B, 1, D], only the last position.

        mask  [H, T, T] or [B, H, T, T]: −∞ where the row does not see the column, else the bias of their distance
        """
        update_BTD = self.out(self._attended(self.attention_norm(x_BTD), mask, last))
        x_BTD = (x_BTD[:, -1:] if last else x_BTD) + (update_BTD if dropout is None else dropout(update_BTD))
        update_BTD = self.down(nn.functional.gelu(self.up(self.dense_norm(x_BTD))))
        return x_BTD + (update_BTD if dropout is None else dropout(update_BTD))

    def _attended(self, x_BTD: Tensor, mask: Tensor, last: bool) -> Tensor:
        # Plain products: for sequences of some hundred positions they are faster on a CPU than torch's fused attention.
        if last:
            weight, bias = self.query_key_value.weight, self.query_key_value.bias
            width = x_BTD.shape[2]
            query = nn.functional.linear(x_BTD[:, -1:], weight[:width], bias[:width])
            key, value = nn.functional.linear(x_BTD, weight[width:], bias[width:]).chunk(2, 2)
            mask = mask[..., -1:, :]
        else:
            query, key, value = self.query_key_value(x_BTD).chunk(3, 2)
        query_BHTE, key_BHTE, value_BHTE = (self._by_head(states) for states in (query, key, value))
        logit_BHTT = (query_BHTE * query_BHTE.shape[-1] ** -0.5) @ key_BHTE.transpose(-1, -2)
        weight_BHTT = torch.softmax(logit_BHTT + mask.to(logit_BHTT.dtype), -1)
        attended_BHTE = weight_BHTT.to(value_BHTE.dtype) @ value_BHTE
        return attended_BHTE.transpose(1, 2).flatten(2)

    def _by_head(self, part_BTD: Tensor) -> Tensor:
        """[B, H, T, E]."""
        batch, length, width = part_BTD.shape
        return part_BTD.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
