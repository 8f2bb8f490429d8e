"""The tree methods of `benchmarks.otm_real`: the changes of each to a set's configuration, its training, and its rows.

Knows configurations, trees and beams. Does not know baselines.
"""

from __future__ import annotations

import json
import re
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.papers.otm.otm_real_report import MS, Row, measured, recall_change
from espalier.errors import InvalidConfig
from espalier.tree import Tree
from training.data.splits import EvaluationPair, without_seen
from training.deep.earlier import as_earlier
from training.deep.export import export
from training.deep.fit import CURVE, fit, use_bfloat16
from training.deep.prepare import Prepared, build_tree
from training.deep.scorers.model import NodeScorer
from training.deep.topology import Topology
from training.deep.validation import search_pairs, trained_ranking
from training.specification.deep import DeepConfig, RobustObjective, WindowConfig
from training.specification.models import deep_config
from training.specification.networks import OptimiserConfig, ProductScorer

CPU = torch.device("cpu")
Sections = dict[str, dict[str, Any]]
RECIPE: Sections = {
    "scorer": ProductScorer().model_dump(),
    "objective": RobustObjective().model_dump(),
    "optimiser": OptimiserConfig().model_dump(include={"batch", "learning_rate", "average"}),
}
PUBLISHED: Sections = {
    "scorer": {"kind": "mlp", "node_dim": 24, "hidden": (128, 64, 24)},
    "instances": {"targets": 20},
    "optimiser": {"batch": 100, "learning_rate": 1e-2},
}
ON_TDM: Sections = {"tree": {"kind": "earlier"}, "scorer": {"init": "earlier"}, "optimiser": {"learning_rate": 2e-3}}


def _published(kind: str, *more: Sections) -> tuple[str, Sections]:
    sections: Sections = {name: dict(keys) for name, keys in PUBLISHED.items()}
    for changes in more:
        for name, keys in changes.items():
            sections[name] = sections.get(name, {}) | keys
    return kind, sections


OF_200: Sections = {"objective": {"beam_size": 200}}
TREES: dict[str, tuple[str, Sections]] = {
    "otm-robust": ("otm-robust", RECIPE),
    "tdm-same-scorer": ("tdm", RECIPE | {"objective": {}}),
    "tdm": _published("tdm"),
    "tdm-random-rows": _published("tdm", {"scorer": {"init": "random"}}),
    "plt": _published("plt"),
    "hsm": _published("hsm"),
    "jtm": _published("tdm", ON_TDM, {"tree": {"kind": "jtm"}}),
    "otm": _published("otm", OF_200, ON_TDM),
    "otm-no-bs": _published("otm-no-bs", OF_200, ON_TDM),
    "otm-no-optest": _published("otm-no-optest", OF_200, ON_TDM),
}
"""Method → its kind, and its changes to a set's configuration."""


@dataclass
class Run:
    """The data that all methods of one seed and log share. `trained`: models that later methods start from."""

    config: DeepConfig
    prepared: Prepared
    folder: Path
    trained: dict[str, tuple[Tree, NodeScorer]] = field(default_factory=dict)

    @property
    def test(self) -> list[EvaluationPair]:
        return list(self.prepared.split.test)


def method_config(config: DeepConfig, method: str) -> DeepConfig:
    """The set's configuration with the method's changes. Raises InvalidConfig if a change has no valid key or value."""
    name, *changes = method.split("+")
    kind, own_sections = TREES[name]
    sections: Sections = {"scorer": {}} | {section: dict(keys) for section, keys in own_sections.items()}
    changed: Sections = {}
    for change in changes:
        key_path, _, text = change.partition("=")
        section, _, key = key_path.partition(".")
        if not key:
            raise InvalidConfig("--methods", change, "section.key=value of a configuration, such as objective.gamma=0")
        if section == "scorer" and sections["scorer"].get("init") == "earlier":
            raise InvalidConfig("--methods", change, f"no other scorer, since {name} goes on from tdm's weights")
        try:
            changed.setdefault(section, {})[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise InvalidConfig("--methods", change, "a value as in TOML, strings in quotation marks") from error
    raw = config.model_dump(mode="json") | {"kind": kind, "scorer": {}, "objective": {}}  # the set's own do not count
    if not isinstance(config, WindowConfig):  # nor do a sequence's places, and its defaults
        steps = min(config.optimiser.steps, OptimiserConfig().steps)  # fewer for a quick look
        shared = {"targets", "cold_share"} & config.instances.model_fields_set
        raw |= {"instances": config.instances.model_dump(mode="json", include=shared), "optimiser": {"steps": steps}}
        raw.pop("refit", None)  # the published methods have none
    if changed.get("scorer", {}).get("kind", sections["scorer"].get("kind")) != sections["scorer"].get("kind"):
        sections["scorer"] = {}  # another kind has other defaults
    for layer in (sections, changed):
        for section, keys in layer.items():
            raw[section] = raw.get(section, {}) | keys
    if raw["scorer"].get("init") == "earlier":
        raw["earlier_model"] = "tdm"  # the one in memory: see train_tree
    return deep_config(raw)


def train_tree(run: Run, method: str) -> tuple[Tree, NodeScorer, Row]:
    """The trained method, and how it was trained: seconds and steps, without those of the model that it goes on from."""
    config, prepared = method_config(run.config, method), run.prepared
    if config.scorer.init == "earlier":
        if "tdm" not in run.trained:
            train_tree(run, "tdm")
        prepared = replace(prepared, earlier=as_earlier(method_config(run.config, "tdm"), *run.trained["tdm"]))
    begin = time.perf_counter()
    tree = build_tree(config, prepared)
    work = run.folder / re.sub(r"[^a-z0-9.-]", "_", method)
    work.mkdir(exist_ok=True)
    model = fit(config, prepared, tree, CPU, work, resume=False).eval()
    curve = json.loads((work / CURVE).read_text())
    if method == "tdm":
        run.trained[method] = tree, model
    seconds = round(time.perf_counter() - begin, 1)
    return tree, model, {"train_seconds": seconds, "best_step": curve["best_step"], "steps": curve["steps"]}


def tree_rows(run: Run, method: str, beams: Sequence[int], bundles: Path | None) -> list[Row]:
    tree, model, training = train_tree(run, method)
    config = method_config(run.config, method)
    own_ranking, gamma = trained_ranking(config)
    gammas = [gamma] if own_ranking == "log_activation" else sorted({0.0, gamma} | ({0.5} if config.kind == "tdm" else set()))
    topology, rows = Topology(tree, CPU), []
    for gamma in gammas:
        best_B = None
        for beam in beams:
            beam = min(beam, tree.leaf_count)
            for exclude_seen in (False, True):
                searched = config.model_copy(update={"search": config.search.model_copy(update={"exclude_seen": exclude_seen})})
                pairs = without_seen(run.test) if exclude_seen else run.test
                with torch.autocast("cpu", torch.bfloat16, enabled=use_bfloat16(config, CPU)):
                    found_BM, _ = search_pairs(searched, topology, model, pairs, gamma, own_ranking, beam, max(MS))
                row_columns = {"gamma": gamma, "beam_size": beam, "exclude_seen": exclude_seen} | training
                beam_rows, recall_B = measured(found_BM, pairs, row_columns)
                if not exclude_seen:
                    if best_B is not None:
                        beam_rows[-1] |= recall_change(recall_B - best_B)
                    if best_B is None or recall_B.mean() > best_B.mean():
                        best_B = recall_B
                rows += beam_rows
    if bundles is not None and method in TREES:
        path = bundles / f"{run.config.name}-{method}" / str(run.config.seed)
        if not path.exists():
            export(config.model_copy(update={"name": path.parent.name}), run.prepared, tree, model, path)
    return rows


def is_tree(method: str) -> bool:
    return method.split("+")[0] in TREES
