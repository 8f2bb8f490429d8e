"""What a loss with its gradient costs by the length of the list: elimination in linear time, and written down as Eq. 5 in quadratic time.

    python -m benchmarks.nce_losses --json F [--device cuda]

One thread. Each cell is a batch of queries with 10,000 items in all, float32. The figure is the fastest of some rounds in which all losses
take turns, as what else a machine does only adds to a time. The naive loss masks a matrix of N × N and reduces it, as it would be written
in torch; it is skipped where one such matrix would take more than 1 GB (there are several). Marginal ties are of three grades.

Legend: B queries, N items of each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.report_file import command_line, write_report
from training.rankers.choice_models import elimination_loss, plackett_luce_loss, tied_elimination_loss

LENGTHS = (10, 30, 100, 300, 1000, 3000, 10_000)
ITEMS = 10_000
MEMORY = 1e9


def naive_elimination(scores_BN: Tensor, present_BN: Tensor) -> Tensor:
    """Eq. 5 by a mask of N × N."""
    length = scores_BN.shape[1]
    below_NN = torch.ones(length, length, dtype=torch.bool, device=scores_BN.device).tril()
    log_worth_BNN = torch.where(below_NN & present_BN[:, None, :], -scores_BN[:, None, :], -torch.inf)
    return torch.where(present_BN, scores_BN + log_worth_BNN.logsumexp(-1), 0).sum(-1)


def _tied(scores_BN: Tensor, present_BN: Tensor) -> Tensor:
    rank_N = torch.arange(scores_BN.shape[1], device=scores_BN.device)
    return tied_elimination_loss(scores_BN, (2 - 3 * rank_N // scores_BN.shape[1]).expand_as(scores_BN), present_BN)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "elimination": elimination_loss,
    "plackett-luce": plackett_luce_loss,
    "elimination, marginal ties": _tied,
    "elimination, naive": naive_elimination,
}


def measure(rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """A row for each length."""
    rows = []
    for length in LENGTHS:
        queries = max(1, ITEMS // length)
        scores_BN = torch.randn(queries, length, generator=torch.Generator().manual_seed(length)).to(device)
        present_BN = torch.ones_like(scores_BN, dtype=torch.bool)
        row: dict[str, Any] = {"items": length, "queries": queries}
        matrix = 4.0 * queries * length**2
        losses = {name: loss for name, loss in LOSSES.items() if "naive" not in name or matrix <= MEMORY}
        if len(losses) < len(LOSSES):
            row["skipped"] = f"elimination, naive: each of its matrices would take {matrix / 1e9:.1f} GB"
        times: dict[str, list[float]] = {name: [] for name in losses}
        for _ in range(rounds):
            for name, loss in losses.items():
                leaf = scores_BN.clone().requires_grad_()
                begin = time.perf_counter()
                loss(leaf, present_BN).sum().backward()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times[name].append(time.perf_counter() - begin)
        for name, seconds in times.items():
            best = min(seconds)
            row[name] = {"queries_per_s": round(queries / best, 1), "ns_per_item": round(1e9 * best / queries / length, 1)}
        print(json.dumps(row, ensure_ascii=False), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    rows = measure(options.rounds, device)
    write_report(options.json, {"rows": rows}, torch.cuda.get_device_name(device) if device.type == "cuda" else None)


if __name__ == "__main__":
    main()
