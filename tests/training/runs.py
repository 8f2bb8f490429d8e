"""A training run before its first step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from espalier.bundle import Bundle
from espalier.tree import Tree
from training.deep.first_model import build_model
from training.deep.fit import fit, steps_of
from training.deep.prepare import Prepared, build_tree, prepare
from training.deep.run import fit_and_export
from training.deep.scorers.model import NodeScorer
from training.deep.sequence.rules import with_rules
from training.deep.topology import Topology
from training.specification.deep import DeepConfig
from training.specification.models import deep_config

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Begun:
    """A configuration with its data. Its tree, its first model and its steps are made when they are first asked for."""

    config: DeepConfig
    prepared: Prepared

    @cached_property
    def tree(self) -> Tree:
        return build_tree(self.config, self.prepared)

    @cached_property
    def topology(self) -> Topology:
        return Topology(self.tree, CPU)

    @cached_property
    def model(self) -> NodeScorer:
        return build_model(self.config, self.tree, self.prepared)

    @cached_property
    def steps(self) -> Any:
        return steps_of(self.config, self.model, self.topology, self.prepared)

    def fit(self, work: Path, resume: bool = False) -> NodeScorer:
        work.mkdir(exist_ok=True)
        return fit(self.config, self.prepared, self.tree, CPU, work, resume)


def begun(raw: dict[str, Any], work: Path, **sections: dict[str, Any]) -> Begun:
    """`sections` changes single keys."""
    work.mkdir(exist_ok=True)
    config = deep_config(raw | {name: raw.get(name, {}) | section for name, section in sections.items()})
    prepared = prepare(config, None, work)
    return Begun(with_rules(config, prepared), prepared)


def exported(raw: dict[str, Any], out: Path, resume: bool = False) -> Bundle:
    """What `fit` writes to models/NAME/VERSION."""
    bundle = fit_and_export(deep_config(raw), None, out, CPU, resume)
    assert bundle is not None
    return bundle


def weights(model: torch.nn.Module) -> dict[str, Any]:
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
