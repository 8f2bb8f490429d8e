"""A whole training run of linear scorers: data, trees, scorers, bundle; resumable level by level of each tree."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array
from tqdm import tqdm

from espalier.bundle import Bundle
from espalier.chunks import TreeChunks
from espalier.errors import InvalidConfig
from espalier.stacking import Stacking
from espalier.tree import Tree

from ..data.csr import Csr
from ..data.xmc import LabelledPoints
from ..linear.choosing import Choice, TreeOf, choose
from ..linear.export import as_stored, export
from ..linear.fit import fit_linear
from ..linear.label_features import label_features
from ..linear.prepare import Prepared, prepare
from ..linear.stacking import learn
from ..linear.stacking_examples import Train
from ..linear.stacking_tables import Weighing
from ..live.taken_along import take_along
from ..specification.linear import LinearConfig
from ..trees.hierarchical_kmeans import hierarchical_kmeans
from ..versions import clear, only_run, work_folder

log = logging.getLogger(__name__)


def fit_version(config: LinearConfig, out: Path, resume: bool = False, journal: Path | None = None) -> Bundle:
    """`fit_and_export` in the version's own work folder, which goes once the bundle is there.

    resume  go on from the last checkpoint of a run that was killed
    Raises InvalidConfig where another run writes the version, too.
    """
    work = work_folder(out)
    with only_run(work):
        clear(work, resume)
        work.mkdir(exist_ok=True)
        bundle = fit_and_export(config, out, work, journal=journal)
        shutil.rmtree(work)
    return bundle


def fit_and_export(config: LinearConfig, out: Path, work: Path, threads: int | None = None, journal: Path | None = None) -> Bundle:
    """Train what a configuration says and write models/NAME/VERSION.

    work     an existing folder, empty or of a run of the same configuration and data that was killed; it goes on from there
    threads  none: as many as there are cores that this process may use, of which a container may have fewer than the machine
    journal  the model whose live items are taken along
    Raises InvalidConfig where the folder is another run's, and what `prepare` raises.
    """
    begin = time.perf_counter()
    prepared = prepare(config, None if journal is None else take_along(journal, work))
    _check_identity(work / "identity", config, prepared.fingerprint)
    threads = threads or len(os.sched_getaffinity(0))
    branching, max_leaf = config.tree.branching, config.tree.leaf_of(len(prepared.items), prepared.train.points.shape[1])

    def tree_of(points: LabelledPoints) -> tuple[Tree, Csr]:
        labels, centroids = label_features(points, prepared.own, config.linear)
        return hierarchical_kmeans(labels, branching, max_leaf, config.seed, threads), centroids

    choice = _choice(config, prepared, tree_of, threads, work / "chosen.json")
    log.info("C = %g, γ = %g, %.1f s after the start", choice.options.known_cost, choice.options.ranking.gamma, time.perf_counter() - begin)

    def grown(points: LabelledPoints, kept: Path | None = None) -> list[TreeChunks]:
        labels, centroids = label_features(points, prepared.own, config.linear)
        trees = []
        for place in range(config.tree.count):
            seed = seed_of_tree(config.seed, place)
            tree = hierarchical_kmeans(labels, branching, max_leaf, seed, threads)
            log.info("tree of %d items over %d levels, %.1f s after the start", tree.item_count, tree.height, time.perf_counter() - begin)
            with tqdm(total=tree.leaf_offset, desc="nodes", unit="node", disable=None) as bar:
                folder = None if kept is None else folder_of_tree(kept, place)
                trained = fit_linear(points, tree, choice.options, threads, seed, bar.update, folder, centroids)
            chunks = as_stored(trained, config.linear)
            del trained
            log.info("%d weights in %.1f MB, %.1f s", len(chunks.entry_weight), chunks.nbytes / 1e6, time.perf_counter() - begin)
            trees.append(TreeChunks(tree, chunks))
        return trees

    trees = grown(prepared.train, work)
    stacking = None if config.tail.form != "none" else _stacking(config, choice, prepared, grown, work)
    if prepared.own is not None:  # its rows: gigabytes of a million texts, which no export needs
        prepared = replace(prepared, own=replace(prepared.own, rows=csr_array(np.empty((0, 0), np.float32))))
    return export(config, choice, prepared, trees, out, stacking)


def _stacking(config: LinearConfig, choice: Choice, prepared: Prepared, train: Train, work: Path) -> Stacking | None:
    """What orders the best candidates anew, learned from points that trees of the same kind did not see."""
    inverse = prepared.relevance.inverse_propensity_I if config.relevance.source == "inverse-propensity" else None
    weighing, ranking = Weighing.of(prepared.train.labels, inverse), choice.options.ranking
    beam_size = config.search.beam_size
    return learn(prepared.train, weighing, train, ranking, config.stacking, beam_size, config.seed, work)


def seed_of_tree(seed: int, place: int) -> int:
    """The seed of a forest's tree, from 0: the first has the run's own, so that it is the tree of a model of one."""
    return seed if place == 0 else int(np.random.SeedSequence([seed, place]).generate_state(1)[0])


def folder_of_tree(work: Path, place: int) -> Path:
    """Where the trained levels of a forest's tree are kept: `work` itself for the first."""
    folder = work if place == 0 else work / f"tree-{place + 1}"
    folder.mkdir(exist_ok=True)
    return folder


def _choice(config: LinearConfig, prepared: Prepared, tree_of: TreeOf, threads: int, file: Path) -> Choice:
    """C and γ, chosen or read from the file of a run that was killed after it had chosen them."""
    if file.is_file():
        kept = json.loads(file.read_text())
        return Choice(config.linear.model_copy(update=kept["options"]), kept["report"])

    choice = choose(prepared.train, tree_of, config.linear, config.search.beam_size, threads, config.seed)
    chosen = {"cost": choice.options.cost, "gamma": choice.options.gamma}
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps({"options": chosen, "report": choice.report}))
    unfinished.replace(file)
    return choice


def _check_identity(file: Path, config: LinearConfig, fingerprint: str) -> None:
    mine = hashlib.sha256((config.model_dump_json() + fingerprint).encode()).hexdigest()
    if file.is_file() and file.read_text() != mine:
        raise InvalidConfig(
            "--resume", str(file.parent), "the folder of a run with this configuration and data; leave out --resume to start anew"
        )
    file.write_text(mine)
