"""An earlier model as the start of training: its tree over the present catalogue, and its scorer.

Knows how to turn a bundle into a tree and a model to train. Items are matched by id. An item that the log lacks leaves an empty leaf. A new
item gets an empty leaf, or one that is added, where the scorer would look for it (the first levels of JTM's matching, `jtm.py`). All other
items, and all nodes with their rows, stay where they are.

Legend: I items of the log, N nodes, D node row, P nodes of the level above the leaves.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from espalier.arrays import Bool, Int64
from espalier.bundle import WEIGHTS, Bundle
from espalier.errors import BundleNotFound, InvalidConfig
from espalier.items import ItemTable
from espalier.live.folded_chunks import folded_tree
from espalier.queries import VectorKind
from espalier.tree import EMPTY_LEAF, Tree

from ..data.interactions import Interactions
from ..data.splits import LEARNED_VALIDATION
from ..deep.jtm import Likelihood, Matching, sum_below
from ..deep.jtm_samples import Samples, draw_samples
from ..deep.scorers.model import NodeScorer, new_model
from ..specification.deep import DeepConfig, TreeOfEarlierModel
from ..specification.models import config_of

log = logging.getLogger(__name__)

SHAPES = ("node_dim", "length")
"""Keys of a scorer that are taken from the earlier model if they are `auto`."""


@dataclass(frozen=True)
class EarlierModel:
    """`tree` holds the log's item rows; `model` has a row for each of its nodes and takes histories of `length`.

    gamma       γ of the ranks that it was trained on
    likelihood  how such a rank is a log-likelihood; path products have a γ of their own
    """

    tree: Tree
    model: NodeScorer
    length: int
    gamma: float
    likelihood: Likelihood


def open_earlier(
    path: Path, config: DeepConfig, tree: TreeOfEarlierModel, interactions: Interactions, users: Int64, items: ItemTable
) -> EarlierModel:
    """The earlier model of a configuration, checked against it.
    users  training users, from whose events new items are placed
    Raises InvalidConfig with the key if the configuration has another scorer or branching, the bundle lacks weights or has those of another
    scorer, or its tree has no room for the new items. Raises the bundle's errors if it cannot be read.
    """
    bundle = Bundle.open(path)
    earlier_config = config_of(bundle.manifest, DeepConfig, "earlier_model")
    branching = max(bundle.tree.max_children) if earlier_config.tree.branching == "auto" else earlier_config.tree.branching
    _check_alike(config, earlier_config, branching)
    _check_queries(bundle, interactions)
    warn_of_known_answers(path, bundle, config, earlier_config)
    row_I = bundle.items.rows_of(items.column("id").to_pylist())
    if (row_I < 0).all():
        raise InvalidConfig("earlier_model", str(path), f"a model of the log's items, such as {items.ids_of(np.zeros(1, np.int64))[0]!r}")
    model = load_scorer(bundle, earlier_config)
    length, likelihood = earlier_config.history_length, likelihood_of(earlier_config)
    leaf_I = np.where(row_I >= 0, bundle.tree.leaf_of_item[row_I], -1)
    new_items = np.flatnonzero(row_I < 0)
    node_n = np.zeros(0, np.int64)
    if len(new_items):
        empty = np.ones(bundle.tree.leaf_count, np.bool_)
        empty[leaf_I[leaf_I >= 0] - bundle.tree.leaf_offset] = False
        room_N = _room(bundle.tree, empty, branching)
        if len(new_items) > room_N[0]:
            expected = f"kmeans, since the log has {len(new_items)} items that earlier_model lacks and its tree has room for {room_N[0]}"
            raise InvalidConfig("tree.kind", tree.kind, expected)
        samples = draw_samples(interactions, users, length, tree.samples, seed=config.seed, wanted_I=row_I < 0)
        new_samples = _in_earlier_rows(samples, new_items, row_I)
        no_home_IL = np.full((len(new_items), bundle.tree.height), -1, np.int64)
        matching = Matching(model, bundle.tree, new_samples, bundle.manifest.ranking.gamma, likelihood)  # γ: where a search would look
        node_n = matching.descend(no_home_IL, room_N, bundle.tree.height - 1, tree.gap)
    grown_tree, source_N = grow(bundle.tree, leaf_I, new_items, node_n)
    stay_count = len(row_I) - len(new_items)
    log.info("%s: %d items are where they were, %d are new, %d are gone", path, stay_count, len(new_items), len(bundle.items) - stay_count)
    return EarlierModel(grown_tree, _with_rows(model, source_N), length, earlier_config.objective.gamma, likelihood)


def warn_of_known_answers(path: Path, bundle: Bundle, config: DeepConfig, earlier_config: DeepConfig) -> None:
    """Warn if the earlier model may have learned from this run's validation or test queries."""
    if bundle.manifest.data.get(LEARNED_VALIDATION):
        log.warning(
            "%s has learned from validation queries: if this run has the same ones, it chooses by answers that the model knows. "
            "Train a model with refit = false to go on from it",
            path,
        )
    split = [(c.seed, c.data.split, c.data.format) for c in (config, earlier_config)]
    if split[0] != split[1]:
        log.warning("the earlier model was trained with another split: test users of this one may have been its training users")


def as_earlier(config: DeepConfig, tree: Tree, model: NodeScorer) -> EarlierModel:
    """A newly trained model, as the start of the next round."""
    return EarlierModel(tree, model, config.history_length, config.objective.gamma, likelihood_of(config))


def likelihood_of(config: DeepConfig) -> Likelihood:
    """The log-likelihood that the ranks of a model of this configuration stand for."""
    if config.ranks_by_path_product:
        return "path"
    return "softmax" if config.is_softmax else "sigmoid"


def load_scorer(bundle: Bundle, config: DeepConfig) -> NodeScorer:
    """The scorer that a bundle was exported from (`config`: its own). Raises InvalidConfig if its weights are missing or another's."""
    path = str(bundle.path)
    model = new_model(config, bundle.tree, bundle.manifest.query)
    try:
        weights = {name: torch.from_numpy(np.array(array)) for name, array in bundle.weights().items()}
    except BundleNotFound as error:
        raise InvalidConfig("earlier_model", path, f"a bundle with {WEIGHTS}; this one cannot be trained on") from error
    weights["node_rows"] = torch.from_numpy(np.asarray(bundle.node_rows_ND, np.float32))
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = {name: list(tensor.shape) for name, tensor in weights.items()}
    for name in sorted(expected.keys() | stored.keys()):
        if expected.get(name) != stored.get(name):
            raise InvalidConfig("earlier_model", path, f"weights {name} of shape {expected.get(name)}, got {stored.get(name)}")
    model.load_state_dict(weights)
    return model.eval()


def grow(tree: Tree, leaf_I: Int64, new: Int64, node_n: Int64) -> tuple[Tree, Int64]:
    """The tree over another catalogue, and the source of each of its node rows.

    leaf_I  int64[I]: the leaf of each item, −1 for the `new` ones
    new     int64[n]: the new items
    node_n  int64[n]: the parents of their leaves; a parent's empty leaves are filled first, then leaves are added at its end
    Returns the tree and int64[N]: each node's number in the old tree, −1 for an added leaf.
    """
    old_items = np.flatnonzero(leaf_I >= 0)
    row_I = np.full(tree.item_count, -1)
    row_I[tree.leaf_item[leaf_I[old_items] - tree.leaf_offset]] = old_items
    leaf_n = _free_leaves(tree, row_I, node_n)
    folded = folded_tree(tree, row_I, node_n, leaf_n - tree.first_child[node_n], new)
    source = folded.source + tree.leaf_offset
    reused_n = np.where(leaf_n < tree.first_child[node_n + 1], leaf_n, -1)
    source[folded.live] = reused_n[-1 - folded.source[folded.live]]
    return folded.tree, np.concatenate([np.arange(tree.leaf_offset), source])


def _free_leaves(tree: Tree, row_I: Int64, node_n: Int64) -> Int64:
    """int64[n]: a separate leaf under each of the parents: first leaves without an item (`row_I` below 0), then new ones, numbered on from
    the parent's last child.
    """
    empty = np.flatnonzero(np.append(row_I, EMPTY_LEAF)[tree.leaf_item] < 0) + tree.leaf_offset
    order = np.argsort(node_n, kind="stable")
    node = node_n[order]
    number = np.arange(len(node)) - np.searchsorted(node, node)  # among those of the same node
    first, after = (np.searchsorted(tree.parent[empty], node, side=side) for side in ("left", "right"))
    is_empty = first + number < after
    leaf_n = np.empty(len(node), np.int64)
    leaf_n[order] = tree.first_child[node + 1] + number - (after - first)
    leaf_n[order[is_empty]] = empty[(first + number)[is_empty]]
    return leaf_n


def _check_alike(config: DeepConfig, earlier_config: DeepConfig, branching: int) -> None:
    """Raise InvalidConfig where the tree, or with `scorer.init = "earlier"` the scorer, differs from the earlier model's configuration."""
    pairs: list[tuple[str, object, object]] = []
    if config.tree.branching != "auto":
        pairs.append(("tree.branching", config.tree.branching, branching))
    if config.scorer.init == "earlier":
        pairs.append(("instances.windows", list(config.windowed_instances.windows), list(earlier_config.windowed_instances.windows)))
        free_keys = {"init", "init_std", "dtype", "dropout"}
        earlier_keys = earlier_config.scorer.model_dump(exclude=free_keys)
        scorer_keys = config.scorer.model_dump(exclude=free_keys | {key for key in SHAPES if getattr(config.scorer, key, None) == "auto"})
        pairs += [(f"scorer.{key}", value, earlier_keys.get(key)) for key, value in scorer_keys.items()]
    for key, value, expected in pairs:
        if value != expected:
            raise InvalidConfig(key, value, f"{expected!r}, as in earlier_model")


def _check_queries(bundle: Bundle, interactions: Interactions) -> None:
    """Raise InvalidConfig unless both take histories, or both take vectors of one width."""
    kind, vectors_UF = bundle.manifest.query, interactions.vectors_UF
    width = kind.width if isinstance(kind, VectorKind) else None
    log_width = None if vectors_UF is None else vectors_UF.shape[1]
    if width != log_width:
        expected = "a model of histories" if log_width is None else f"a model of vectors of {log_width} numbers"
        raise InvalidConfig("earlier_model", str(bundle.path), f"{expected}, as the log's queries are")


def _room(tree: Tree, empty: Bool, branching: int) -> Int64:
    """int64[N]: how many new items each node's subtree can take: its empty leaves, and the leaves that can still be added."""
    span = tree.level(tree.height - 1)
    count_P = np.diff(tree.first_child[span.start : span.stop + 1])
    empty_P = np.add.reduceat(empty, tree.first_child[span.start : span.stop] - tree.leaf_offset, dtype=np.int64)
    return sum_below(tree, np.maximum(branching - count_P, 0) + empty_P, tree.height - 1)


def _in_earlier_rows(samples: Samples, new: Int64, row_I: Int64) -> Samples:
    """Samples of new items, as targets 0 … n − 1, and with histories in the earlier catalogue's rows (`row_I`)."""
    history_ST = np.append(row_I, -1).astype(np.int32)[samples.history_ST]
    return replace(samples, history_ST=history_ST, target_S=np.searchsorted(new, samples.target_S))


def _with_rows(model: NodeScorer, source_N: Int64) -> NodeScorer:
    """The model over the grown tree: an added leaf starts with the row of the leaf before it, a child of the same node."""
    row_source_N = np.maximum.accumulate(np.where(source_N >= 0, np.arange(len(source_N)), 0))
    model.node_rows = torch.nn.Parameter(model.node_rows.detach()[torch.from_numpy(source_N[row_source_N])])
    return model
