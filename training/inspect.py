"""Shows a bundle: its manifest in words, its tree level by level, and sample paths from the root to an item."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from espalier.bundle import Bundle
from espalier.checks.heldout import RELEVANCE
from espalier.errors import BundleCorrupt
from espalier.manifest import LinearScorer, Manifest
from espalier.queries import Kind, TextKind, VectorKind

SAMPLES = 5
TITLES_PER_NODE = 3


def inspect(bundle: Bundle) -> str:
    """A text report."""
    manifest, tree = bundle.manifest, bundle.tree
    ranking = manifest.ranking
    defaults = manifest.search
    lines = [
        f"{manifest.name} version {manifest.version}: {manifest.algorithm}, created {manifest.created:%Y-%m-%d %H:%M}",
        f"tree: {tree.item_count} items, {tree.node_count} nodes, {tree.height + 1} levels",
        *_data(manifest),
        _scorer(manifest),
        f"rank(n) = {ranking.own}(n) + {ranking.gamma:g} · rank(parent); search defaults: beam {defaults.beam_size}, m {defaults.m}",
        *_stages(manifest),
        "",
        f"{'level':>5} {'nodes':>9} {'children':>10} {'items below a node':>24}",
    ]
    for h in range(tree.height + 1):
        span = tree.level(h)
        below = tree.items_below[span.start : span.stop]
        children = np.diff(tree.first_child[span.start : span.stop + 1]) if h < tree.height else np.zeros(1, np.int64)
        spread = f"{below.min()} … {below.max()} (mean {below.mean():.1f})"
        lines.append(f"{h:5d} {len(span):9d} {f'{children.min()}–{children.max()}':>10} {spread:>24}")
    lines += ["", "Sample paths, with some items below each node:"]
    rng = np.random.default_rng(0)
    for item in rng.choice(tree.item_count, min(SAMPLES, tree.item_count), replace=False):
        path = tree.ancestors(tree.leaf_of_item[[item]])[0]
        lines.append(f"  {_label(bundle, item)}")
        for h in sorted({max(1, tree.height - step) for step in (6, 4, 2, 1)}):
            lines.append(
                f"    level {h:2d} node {path[h]}: {'; '.join(_label(bundle, row) for row in _some_items(bundle, int(path[h]), rng))}"
            )
    return "\n".join(lines)


def _data(manifest: Manifest) -> Iterator[str]:
    """Lines about the further trees of a forest, the queries, relevance, live items and the shard."""
    for number, further in enumerate(manifest.trees, start=2):
        yield f"tree {number}: {further.tree.nodes} nodes, {further.tree.levels} levels, {further.scorer.weights:,} weights"
    if manifest.trees:
        yield f"an item's score is its mean over the {1 + len(manifest.trees)} trees; what follows is of the first"
    yield f"query: {_query(manifest.query)}"
    if (relevance := manifest.data.get(RELEVANCE)) is not None:
        yield _relevance(relevance)
    if (live := manifest.live) is not None:
        origin = "trained" if live.folded_from is None else f"folded from version {live.folded_from}"
        yield f"live items: up to operation {live.through}, {origin}"
    if (shard := manifest.shard) is not None:
        whole_text = f"{shard.of} version {shard.version} ({shard.digest[:12]}…), of {shard.items} items"
        yield f"shard {shard.index} of {shard.count} of {whole_text}"


def _query(kind: Kind) -> str:
    if isinstance(kind, TextKind):
        return f"text, {kind.width:,} features: " + ", ".join(f"{block.unit} {block.n}-grams" for block in kind.blocks)
    if isinstance(kind, VectorKind):
        return f"vectors of {kind.width} numbers"
    return str(kind)


def _scorer(manifest: Manifest) -> str:
    scorer = manifest.scorer
    if isinstance(scorer, LinearScorer):
        return f"scorer: linear, {scorer.weights:,} weights of {scorer.features:,} features in {scorer.rows:,} rows"
    encoder = ", sequence encoder" if scorer.encoder == "sequence" else ""
    return f"scorer: node rows [{manifest.tree.nodes}, {scorer.node_dim}] {scorer.dtype}, state {scorer.state_dim}{encoder}"


def _relevance(data: Any) -> str:
    """The distribution of relevance over training labels, if it has degrees."""
    try:
        quantiles = ", ".join(f"{100 * float(share):g} % {value:.4g}" for share, value in data["quantiles"].items())
        return f"relevance: {data['labels']:,} training labels, mean {data['mean']:.4g}, scale {data['scale']:.4g}; quantiles {quantiles}"
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        expected = "labels, mean, scale and quantiles"
        raise BundleCorrupt(f"data.{RELEVANCE} of the manifest is {str(data)[:80]}, expected {expected}") from error


def _stages(manifest: Manifest) -> Iterator[str]:
    """Lines about the stages that order items besides the scorer."""
    if (memory := manifest.memory) is not None:
        entries = f"{memory.entries:,} entries, {memory.entries / manifest.tree.items:.1f} an item"
        yield f"memory: key(n) = rank(n) + {memory.weight:g} · mem(n); {entries}; the last {memory.length} items of a history"
        if any(memory.occurrence) or any(memory.left_out):
            terms = zip(memory.occurrence, memory.left_out, strict=True)
            names = ", ".join("left out" if left_out else f"+{memory.weight * bonus:.3g}" for bonus, left_out in terms)
            yield f"items of the history, each time by the items after it, left out by the last time (0, 1, 2, 4, 8, 16 and more): {names}"
    if (stacking := manifest.stacking) is not None:
        gain = stacking.training.get("gain")
        gain_text = "" if gain is None else f"; gain of nDCG@5 and recall@10 when it was trained {gain!s:.20}"
        yield f"stacking: a network orders the best {stacking.candidates} anew, {stacking.points:,} training points vote{gain_text}"
    if (ranker := manifest.ranker) is not None:
        yield f"ranker: of the best {ranker.depth}, at most {ranker.max_depth}, by {', '.join(ranker.features)}"


def _some_items(bundle: Bundle, node: int, rng: np.random.Generator) -> list[int]:
    tree = bundle.tree
    low, high = node, node + 1
    while low < tree.leaf_offset:
        low, high = int(tree.first_child[low]), int(tree.first_child[high])
    items = tree.leaf_item[low - tree.leaf_offset : high - tree.leaf_offset]
    items = items[items >= 0]
    return [int(item) for item in rng.choice(items, min(TITLES_PER_NODE, len(items)), replace=False)]


def _label(bundle: Bundle, item: int) -> str:
    row = np.array([item])
    title = bundle.items.values("title", row)[0] if "title" in bundle.items.fields else None
    name = bundle.items.ids_of(row)[0]
    return f"{name} ({title})" if title else name
