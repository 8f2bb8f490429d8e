"""Table 1 of OTM (Zhuo et al. 2020): labels that say "something relevant below" cost regret under beam search, however much data there is.

    python -m benchmarks.otm_table1 --runs 100 --json otm_table1.json

No queries: item j is relevant with probability η_j ~ U[0, 1], independently. A node's score is an estimate of p(z_n = 1), z_n = 1 where any
item below is relevant (OTM Eq. 1): the mean over N instances, or exactly for N = ∞. Beam search with k then misses items of large η. Two
rows at ∞: in float32, as published (1 − ∏(1 − η) rounds to 1 near the root, so that nodes tie), and in exact order. The last one scores a
node by its largest η (OTM Prop. 1, the Bayes optimum under beam search): its regret is 0.

Legend: N instances, M leaves, I items, K beam.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.papers.otm.regret import regret_at_m
from benchmarks.report_file import command_line, write_report
from espalier.arrays import Array, Float64, Int64

ITEMS, HEIGHT = 1000, 10
GRID = 1 << 24
"""η are multiples of 1 / GRID: their sums are exact in any order, so that the regret of the best items is 0 and not 2e-17."""
BEAMS = (1, 5, 10, 20, 50)
PUBLISHED = {
    "100": (0.095, 0.075, 0.062, 0.057, 0.042),
    "1000": (0.076, 0.055, 0.043, 0.036, 0.021),
    "10000": (0.074, 0.050, 0.036, 0.031, 0.016),
    "inf float32": (0.059, 0.037, 0.024, 0.018, 0.011),
}
Levels = list[Array]
"""Scores of the nodes of each level, root first."""


def upward(leaves: Array, join: np.ufunc) -> Levels:
    """Values of all levels from those of the leaves (last axis), joined pairwise."""
    levels = [leaves]
    while levels[0].shape[-1] > 1:
        levels.insert(0, join(levels[0][..., ::2], levels[0][..., 1::2]))
    return levels


def estimated(rng: np.random.Generator, eta_M: Float64, instances: int) -> Levels:
    """The mean of z_n over `instances` instances, whose items are drawn independently."""
    relevant_NM = rng.random((instances, len(eta_M)), np.float32) < eta_M.astype(np.float32)
    return [z.mean(axis=0) for z in upward(relevant_NM, np.logical_or)]


def scores(rng: np.random.Generator, eta_M: Float64) -> dict[str, Levels]:
    none_M = (1 - eta_M).astype(np.float32)
    with np.errstate(divide="ignore"):
        log_none = upward(np.log1p(-eta_M), np.add)
    return {
        **{str(instances): estimated(rng, eta_M, instances) for instances in (100, 1000, 10_000)},
        "inf float32": [np.float32(1) - none for none in upward(none_M, np.multiply)],
        "inf": [-value for value in log_none],  # p(z = 1) = 1 − exp of it: the same order, and never rounded to 1
        "max": upward(eta_M, np.maximum),
    }


def beam_search(levels: Levels, beam_size: int) -> Int64:
    """The leaves that beam search keeps of a complete binary tree; of equals the lower node."""
    beam_K = np.zeros(1, np.int64)
    for score in levels[1:]:
        candidates = np.sort(np.concatenate([2 * beam_K, 2 * beam_K + 1]))
        beam_K = np.sort(candidates[np.argsort(-score[candidates], kind="stable")[:beam_size]])
    return beam_K


def regrets(seed: int) -> dict[str, list[float]]:
    """Of one random tree with random η: the regret of each row at every beam size, m = k."""
    rng = np.random.default_rng(seed)
    eta_M = np.zeros(1 << HEIGHT)
    eta_I = np.floor(rng.random(ITEMS) * GRID) / GRID
    eta_M[rng.permutation(1 << HEIGHT)[:ITEMS]] = eta_I
    return {
        name: [float(regret_at_m(eta_M[None], beam_search(levels, k)[None], k)[0]) for k in BEAMS]
        for name, levels in scores(rng, eta_M).items()
    }


def table(runs: int, seed: int) -> list[dict[str, Any]]:
    """Rows {"N", "k", "paper", "ours", "standard_error"}; the paper has no exact ∞ and no max."""
    runs_regrets = [regrets(seed + run) for run in tqdm(range(runs), desc="runs", disable=None)]
    rows = []
    for name in runs_regrets[0]:
        for i, k in enumerate(BEAMS):
            values = np.array([run_regrets[name][i] for run_regrets in runs_regrets])
            paper = PUBLISHED[name][i] if name in PUBLISHED else None
            error = float(values.std(ddof=1) / np.sqrt(runs)) if runs > 1 else None
            rows.append({"N": name, "k": k, "paper": paper, "ours": float(values.mean()), "standard_error": error})
    return rows


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'N':>12} {'k':>4} {'paper':>7} {'ours':>8} {'± error':>8}")
    for row in rows:
        paper = "" if row["paper"] is None else f"{row['paper']:.3f}"
        error = "" if row["standard_error"] is None else f"{row['standard_error']:.4f}"
        print(f"{row['N']:>12} {row['k']:4d} {paper:>7} {row['ours']:8.4f} {error:>8}")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=100, help="random trees and η (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = {"runs": options.runs, "seed": options.seed, "rows": table(options.runs, options.seed)}
    print_table(report["rows"])
    write_report(options.json, report)


if __name__ == "__main__":
    main()
