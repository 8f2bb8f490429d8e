"""Figure 2 of OTM (Zhuo et al. 2020): how unevenly training instances fall on the nodes of a level.

    python -m benchmarks.otm_figure2 --data DIR --set ml-1m,sasrec-amazon-games,s3rec-yelp --json F
    python -m benchmarks.otm_figure2 --log FILE --config FILE

S_n is the number of training instances that node n is relevant to (z_n = 1, Eq. 1; one instance a training user, the second half of the
list its targets). The figure shows S_n / Σ_n' S_n' of a level's nodes, largest first, at h = 8. It needs a tree and the training users,
no scorer, so nothing is trained: the tree is the one that the configuration builds.

Two numbers sum up a level: `head`, the share that falls on the tenth of its nodes with the most, and `tail`, on the half with the fewest.

Legend: E pairs of an instance and one of its targets, n_h nodes of level h.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import real_logs
from benchmarks.report_file import command_line, write_report
from espalier.arrays import Float64, Int64
from espalier.tree import Tree
from training.data.splits import halves
from training.deep.prepare import build_tree, prepare

LEVEL = 8
PAPER = (
    "at h = 8 UserBehavior has the heavier tail, Amazon Books more of its instances on few nodes (no numbers printed);",
    "OTM's lift over JTM in recall@200 is 29.8 % on Amazon Books and 6.3 % on UserBehavior: more concentrated, more to gain",
)


def relevant_instances(tree: Tree, instance_E: Int64, item_E: Int64) -> list[Int64]:
    """For each level 0 … H int64[n_h]: S_n, how many instances have a target below node n."""
    count = int(instance_E.max()) + 1
    key_E = np.unique(tree.leaf_of_item[item_E] * count + instance_E)  # pairs of a node and an instance, each once
    levels = []
    for h in range(tree.height, -1, -1):
        nodes = tree.level(h)
        levels.append(np.bincount(key_E // count - nodes.start, minlength=len(nodes)).astype(np.int64))
        key_E = np.unique(tree.parent[key_E // count] * count + key_E % count)
    return levels[::-1]


def shares(relevant: Int64) -> Float64:
    """float64[n_h]: S_n / Σ S_n', largest first."""
    descending: Float64 = np.sort(relevant)[::-1] / relevant.sum()
    return descending


def head_and_tail(share: Float64) -> dict[str, float]:
    """What falls on the first tenth and on the second half of the nodes, a node on the border in proportion."""
    below = np.concatenate([[0], np.cumsum(share)])
    head, half = (float(np.interp(share_of_nodes * len(share), np.arange(len(below)), below)) for share_of_nodes in (0.1, 0.5))
    return {"head": head, "tail": 1 - half}


def study(real: real_logs.RealLog) -> dict[str, Any]:
    """{"set", "tree", "users", "levels": rows {"level", "nodes", "head", "tail"}, "shares": of level LEVEL, or of the last above it}."""
    config = real.config
    with tempfile.TemporaryDirectory() as work:
        prepared = prepare(config, real.log, Path(work))
        pairs = halves(prepared.interactions, prepared.split.train, seed=config.seed)
        tree = build_tree(config, prepared)
        item_E = np.concatenate([pair.relevant for pair in pairs])
    instance_E = np.repeat(np.arange(len(pairs)), [len(pair.relevant) for pair in pairs])
    by_level = [shares(relevant) for relevant in relevant_instances(tree, instance_E, item_E)]
    return {
        "set": real.name,
        "tree": config.tree.kind,
        "users": len(pairs),
        "levels": [{"level": h, "nodes": len(share)} | head_and_tail(share) for h, share in enumerate(by_level) if h],
        "shares": by_level[min(LEVEL, tree.height)].tolist(),
    }


def print_report(studies: Sequence[dict[str, Any]]) -> None:
    print("paper:", "\n       ".join(PAPER))
    print(f"{'ours':24} {'tree':20} {'users':>7} {'nodes':>6} {'head':>6} {'tail':>6}   (even: .100 and .500)")
    for study in studies:
        row = _figure_level(study)
        print(f"{study['set']:24} {study['tree']:20} {study['users']:7d} {row['nodes']:6d} {row['head']:6.3f} {row['tail']:6.3f}")
    if len(studies) > 1:
        by_head = sorted(studies, key=lambda study: -_figure_level(study)["head"])
        by_tail = sorted(studies, key=lambda study: _figure_level(study)["tail"])
        heads, tails = (" > ".join(study["set"] for study in ranked) for ranked in (by_head, by_tail))
        print(f"so OTM should gain, by the heads: {heads}; by the tails: {tails}")


def _figure_level(study: dict[str, Any]) -> dict[str, Any]:
    """The row of the level that the figure shows."""
    levels: list[dict[str, Any]] = study["levels"]
    return levels[min(LEVEL, len(levels)) - 1]


def main() -> None:
    parser = command_line(__doc__)
    real_logs.add_arguments(parser)
    options = parser.parse_args()
    studies = [study(real) for real in real_logs.load_all(options)]
    print_report(studies)
    write_report(options.json, {"paper": " ".join(PAPER), "studies": studies})


if __name__ == "__main__":
    main()
