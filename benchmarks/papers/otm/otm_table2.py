"""Table 2 of OTM (Zhuo et al. 2020, with its supplement's A.2): regret under beam search of five ways to train the same linear tree model.

    python -m benchmarks.otm_table2 --seeds 5 --json otm_table2.json

Data: x ~ N(0, I_d), w_j ~ N(0, I_d), η_j(x) = σ(w_j · x + b), y_j ~ Bernoulli(η_j(x)); 1,000 items on random leaves of a complete binary
tree of 1,024 (an empty leaf has η = 0). Every node scores linearly, g(x, n) = θ_n · x + b_n. What differs is the nodes that a level trains
on and their labels, written out from the published equations for all 2,047 nodes at once:

    plt            children of nodes with z = 1; labels z (Eq. 1); served by the product of sigmoids along the path
    tdm            2k nodes of each level at random; labels z
    otm            the beam's candidates under the present parameters; labels ẑ (Eq. 15, 16)
    otm-no-bs      2k nodes of each level at random; labels ẑ
    otm-no-optest  the beam's candidates; labels z

The regret at m (Eq. 10) is measured on test queries with the same beam. `oracle` scores a node by the largest η below it (Prop. 1).

Legend: B queries, M leaves, N nodes, C trained nodes, K beam, D features. Nodes are in heap order, level h at 2^h − 1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid
from tqdm import tqdm

from benchmarks.papers.otm.regret import regret_at_m
from benchmarks.report_file import command_line, write_report

ITEMS, HEIGHT, FEATURES, TRAIN, TEST = 1000, 10, 10, 10_000, 1_000
LEAVES = 1 << HEIGHT
BEAM, EPOCHS, BATCH, LEARNING_RATE, INIT = 50, 60, 500, 0.03, 0.01
MS = (1, 10, 20, 50)
METHODS = ("plt", "tdm", "otm", "otm-no-bs", "otm-no-optest")
BIAS = -5.0
PUBLISHED: dict[str, tuple[float, ...]] = {
    "plt": (0.0444, 0.0778, 0.0955, 0.1492),
    "tdm": (0.0033, 0.0205, 0.0453, 0.1363),
    "otm": (0.0024, 0.0163, 0.0349, 0.1083),
    "otm-no-bs": (0.0048, 0.0201, 0.0421, 0.1313),
    "otm-no-optest": (0.0033, 0.0198, 0.0418, 0.1218),
}
"""Method → regret at each of MS, with the bias BIAS. Table A.2 has other biases."""


@dataclass(frozen=True)
class Data:
    """x_BD with a constant 1 at the end, η and y of every leaf."""

    x_BD: Tensor
    eta_BM: Tensor
    y_BM: Tensor


def make_data(generator: torch.Generator, bias: float) -> tuple[Data, Data]:
    """Training and test queries of one random world."""
    weights_ID = torch.randn(ITEMS, FEATURES, generator=generator)
    leaf_I = torch.randperm(LEAVES, generator=generator)[:ITEMS]

    def draw(count: int) -> Data:
        x_BD = torch.randn(count, FEATURES, generator=generator)
        eta_BM = torch.zeros(count, LEAVES)
        eta_BM[:, leaf_I] = torch.sigmoid(x_BD @ weights_ID.T + bias)
        y_BM = (torch.rand(count, LEAVES, generator=generator) < eta_BM).float()
        return Data(torch.cat([x_BD, torch.ones(count, 1)], 1), eta_BM, y_BM)

    return draw(TRAIN), draw(TEST)


def level(values_BN: Tensor, h: int) -> Tensor:
    return values_BN[:, (1 << h) - 1 : (2 << h) - 1]


def upward(leaves_BM: Tensor) -> Tensor:
    """[B, N]: the largest value below each node: z from y (Eq. 1), and the oracle's scores from η."""
    levels = [leaves_BM]
    while levels[0].shape[1] > 1:
        levels.insert(0, levels[0].view(len(leaves_BM), -1, 2).amax(2))
    return torch.cat(levels, 1)


def optimal_labels(y_BM: Tensor, g_BN: Tensor) -> Tensor:
    """[B, N]: ẑ (Eq. 15): a node's label is that of its child with the larger logit; of equals the positive one's."""
    levels = [y_BM]
    for h in range(HEIGHT, 0, -1):
        g_BN2 = level(g_BN, h).reshape(len(y_BM), -1, 2)
        z_BN2 = levels[0].view(len(y_BM), -1, 2)
        left_z, right_z = z_BN2.unbind(2)
        larger = torch.where(g_BN2[..., 0] > g_BN2[..., 1], left_z, right_z)
        levels.insert(0, torch.where(g_BN2[..., 0] == g_BN2[..., 1], torch.maximum(left_z, right_z), larger))
    return torch.cat(levels, 1)


def beam_candidates(score_BN: Tensor, beam_size: int) -> list[Tensor]:
    """For each level 1 … H, int64[B, C]: the children of the nodes that beam search keeps on the level above (Eq. 3)."""
    kept_BK = torch.zeros(len(score_BN), 1, dtype=torch.int64)
    candidates = []
    for _ in range(HEIGHT):
        candidates_BC = torch.stack([2 * kept_BK + 1, 2 * kept_BK + 2], 2).flatten(1)
        candidates.append(candidates_BC)
        if candidates_BC.shape[1] <= beam_size:
            kept_BK = candidates_BC
        else:
            kept_BK = candidates_BC.gather(1, score_BN.gather(1, candidates_BC).topk(beam_size).indices)
    return candidates


def random_nodes(generator: torch.Generator, queries: int, count: int) -> list[Tensor]:
    """For each level 1 … H, int64[B, C]: `count` nodes, or all, without replacement."""
    nodes = []
    for h in range(1, HEIGHT + 1):
        width = 1 << h
        if width <= count:
            positions = torch.arange(width).expand(queries, -1)
        else:
            positions = torch.rand(queries, width, generator=generator).topk(count).indices
        nodes.append(positions + width - 1)
    return nodes


def loss_of(method: str, g_BN: Tensor, y_BM: Tensor, generator: torch.Generator) -> Tensor:
    """The loss of a batch: binary cross-entropy summed over the trained nodes of all levels, mean over queries."""
    with torch.no_grad():
        labels_BN = optimal_labels(y_BM, g_BN) if method in ("otm", "otm-no-bs") else upward(y_BM)
    if method == "plt":
        weight_BN = torch.repeat_interleave(labels_BN[:, : LEAVES - 1], 2, dim=1)  # of the parent, for nodes 1 …
        return binary_cross_entropy_with_logits(g_BN[:, 1:], labels_BN[:, 1:], weight_BN, reduction="sum") / len(y_BM)
    with torch.no_grad():
        beam = method in ("otm", "otm-no-optest")
        nodes_BC = torch.cat(beam_candidates(g_BN, BEAM) if beam else random_nodes(generator, len(y_BM), 2 * BEAM), 1)
    return binary_cross_entropy_with_logits(g_BN.gather(1, nodes_BC), labels_BN.gather(1, nodes_BC), reduction="sum") / len(y_BM)


def fit(method: str, data: Data, generator: torch.Generator, epochs: int) -> Tensor:
    """float32[D, N]: the parameters of all nodes after training."""
    theta_DN = (INIT * torch.randn(FEATURES + 1, 2 * LEAVES - 1, generator=generator)).requires_grad_()
    optimiser = torch.optim.Adam([theta_DN], LEARNING_RATE)
    count = len(data.x_BD)
    steps = epochs * count // BATCH
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    for _ in range(epochs):
        for rows in torch.randperm(count, generator=generator).view(-1, BATCH):
            optimiser.zero_grad()
            loss = loss_of(method, data.x_BD[rows] @ theta_DN, data.y_BM[rows], generator)
            loss.backward()
            optimiser.step()
            schedule.step()
    return theta_DN.detach()


def ranks(method: str, g_BN: Tensor) -> Tensor:
    """[B, N]: what beam search orders nodes by: the logit, for PLT the log of the product of sigmoids along the path."""
    if method != "plt":
        return g_BN
    log_BN = logsigmoid(g_BN)
    levels = [torch.zeros(len(g_BN), 1)]
    for h in range(1, HEIGHT + 1):
        levels.append(level(log_BN, h) + torch.repeat_interleave(levels[-1], 2, dim=1))
    return torch.cat(levels, 1)


def regrets(rank_BN: Tensor, data: Data) -> list[float]:
    """Mean regret at each m of the leaves that beam search finds, best first."""
    last_BC = beam_candidates(rank_BN, BEAM)[-1]
    best = rank_BN.gather(1, last_BC).topk(max(MS)).indices
    leaves_BM = (last_BC.gather(1, best) - (LEAVES - 1)).numpy()
    eta_BM = data.eta_BM.double().numpy()
    return [float(regret_at_m(eta_BM, leaves_BM, m).mean()) for m in MS]


def run(seed: int, bias: float, methods: Sequence[str], epochs: int, tell: Any) -> list[dict[str, Any]]:
    """Rows {"method", "seed", "m", "regret", "seconds"} of one world."""
    train, test = make_data(torch.Generator().manual_seed(seed), bias)
    rows = []
    for method in ("oracle", *methods):
        began = time.perf_counter()
        if method == "oracle":
            rank_BN = upward(test.eta_BM)
        else:
            theta_DN = fit(method, train, torch.Generator().manual_seed(1000 + seed), epochs)
            rank_BN = ranks(method, test.x_BD @ theta_DN)
        seconds = time.perf_counter() - began
        for m, regret in zip(MS, regrets(rank_BN, test), strict=True):
            rows.append({"method": method, "seed": seed, "m": m, "regret": regret, "seconds": seconds})
        tell(f"seed {seed} {method}: regret at {max(MS)} {rows[-1]['regret']:.4f}, {seconds:.1f} s")
    return rows


def summary(rows: Sequence[dict[str, Any]], bias: float) -> list[dict[str, Any]]:
    """Rows {"method", "m", "paper", "mean", "sd"} over seeds; `paper` is None with another bias or method than in Table 2."""
    summary_rows = []
    for method in dict.fromkeys(row["method"] for row in rows):
        published = PUBLISHED.get(method) if bias == BIAS else None
        for i, m in enumerate(MS):
            values = [row["regret"] for row in rows if (row["method"], row["m"]) == (method, m)]
            sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
            summary_rows.append({"method": method, "m": m, "paper": published and published[i], "mean": float(np.mean(values)), "sd": sd})
    return summary_rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The report of a run: what it ran on, the rows of `summary`, and those of every seed."""
    began = time.perf_counter()
    runs = [
        row
        for seed in tqdm(range(options.seeds), desc="seeds", disable=None)
        for row in run(seed, options.bias, options.methods.split(","), options.epochs, tqdm.write)
    ]
    seconds = time.perf_counter() - began
    return {"b": options.bias, "seconds": seconds, "rows": summary(runs, options.bias), "runs": runs}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="random worlds (default %(default)s)")
    parser.add_argument("--b", type=float, default=BIAS, dest="bias", help="bias of η (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="default %(default)s")
    parser.add_argument("--methods", default=",".join(METHODS), help="default %(default)s")
    options = parser.parse_args()
    report = measure(options)
    print(f"{'method':>14} {'m':>4} {'paper':>7} {'mean':>8} {'sd':>7}")
    for row in report["rows"]:
        paper, sd = ("" if row[name] is None else f"{row[name]:.4f}" for name in ("paper", "sd"))
        print(f"{row['method']:>14} {row['m']:4d} {paper:>7} {row['mean']:8.4f} {sd:>7}")
    print(f"{report['seconds']:.0f} s")
    write_report(options.json, report)


if __name__ == "__main__":
    main()
