"""Checkpoints of a training run: how far it is, and all that it needs to go on exactly as it would have."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from espalier.errors import InvalidConfig
from espalier.tree import Tree
from training.deep.parallel import process
from training.deep.prepare import Prepared
from training.deep.row_shares import gather_rows, map_rows, own_rows_of
from training.deep.scorers.model import NodeScorer
from training.specification.deep import DeepConfig

log = logging.getLogger(__name__)

Parts = Mapping[str, NodeScorer | AveragedModel | torch.optim.Optimizer]
"""What a checkpoint holds besides the state of the run."""


@dataclass
class RunState:
    """The steps made, the validation recalls so far, and the weights with the best of them (the last at a tie)."""

    step: int = 0
    recalls: list[float] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)

    def add(self, recall: float, model: NodeScorer) -> None:
        if recall >= max(self.recalls, default=-1.0):
            self.best = {name: values.detach().clone() for name, values in model.state_dict().items()}
        self.recalls.append(recall)

    def best_step(self, every: int) -> int:
        """The step whose weights are kept."""
        if not self.recalls:
            return self.step
        return min(self.step, every * (len(self.recalls) - self.recalls[::-1].index(max(self.recalls))))

    def out_of_patience(self, patience: int) -> bool:
        """Whether the last `patience` recalls were no better than what came before."""
        return len(self.recalls) > patience and max(self.recalls[-patience:]) <= max(self.recalls[:-patience])


@dataclass(frozen=True)
class Checkpoint:
    """The file of one run, which its `identity` names. `parts` are saved, and restored in place.

    nodes  of the node rows, where processes share them: the file has all rows, so another number of processes can go on; else None
    """

    file: Path
    identity: dict[str, str]
    parts: Parts
    nodes: int | None = None

    def save(self, state: RunState) -> None:
        """Replaces the file in one step. All processes call it, and process 0 writes."""
        progress = {"step": state.step, "recalls": list(state.recalls), "best": state.best}
        content: dict[str, Any] = {name: part.state_dict() for name, part in self.parts.items()} | {"progress": progress}
        if self.nodes is None:
            if process() == 0:
                self._write(content)
            return
        with TemporaryDirectory(dir=self.file.parent, prefix=".checkpoint-rows-") as folder:
            count = itertools.count()
            whole = map_rows(content, lambda own_nD: self._gathered(own_nD, Path(folder) / str(next(count))))
            if process() == 0:
                self._write(whole)

    def _gathered(self, own_nD: Tensor, file: Path) -> Tensor:
        """All rows in process 0, in a file rather than in memory; in the others their own."""
        nodes = self.nodes or 0
        if process():
            gather_rows(own_nD, nodes, None)
            return own_nD
        shape = nodes, *own_nD.shape[1:]
        whole_ND = torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=own_nD.dtype).view(shape)
        gather_rows(own_nD, nodes, whole_ND)
        return whole_ND

    def _write(self, content: dict[str, Any]) -> None:
        content = content | {"identity": self.identity}
        part_file = self.file.with_suffix(".part")
        with part_file.open("wb") as stream:
            torch.save(content, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part_file, self.file)

    def restore(self) -> RunState:
        """Load the file (tensors and plain values only), if there is one. Raises InvalidConfig where it is damaged or another run's."""
        if not self.file.exists():
            return RunState()
        try:
            content: dict[str, Any] = torch.load(self.file, map_location="cpu", weights_only=True, mmap=self.nodes is not None)
            identity = content["identity"]
        except Exception as error:  # a damaged file raises almost anything
            expected = f"a readable checkpoint ({type(error).__name__}); delete it to start anew"
            raise InvalidConfig("--resume", str(self.file), expected) from error
        if identity != self.identity:
            expected = "a checkpoint of the same configuration, log and tree; delete it or leave out --resume to start anew"
            raise InvalidConfig("--resume", str(self.file), expected)
        if self.nodes is not None:
            content = map_rows(content, own_rows_of)
        for name, part in self.parts.items():
            part.load_state_dict(content[name])
        state = RunState(**content["progress"])
        log.info("resumed at step %d", state.step)
        return state


def identity_of(config: DeepConfig, prepared: Prepared, tree: Tree) -> dict[str, str]:
    """The configuration, log and tree of a run."""
    nodes = hashlib.sha256(tree.first_child.tobytes() + tree.leaf_item.tobytes()).hexdigest()
    return {"config": config.model_dump_json(), "log": prepared.interactions.fingerprint, "tree": nodes}
