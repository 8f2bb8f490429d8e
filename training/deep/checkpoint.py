"""Checkpoints of a training run: how far it is, and all that it needs to go on exactly as it would have."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from espalier.durable import flush
from espalier.errors import InvalidConfig
from espalier.tree import Tree

from ..deep.optimiser import Optimiser
from ..deep.parallel import process, processes
from ..deep.prepare import Prepared
from ..deep.row_shares import gather_rows, map_rows
from ..deep.scorers.model import NodeScorer
from ..specification.deep import DeepConfig

log = logging.getLogger(__name__)
TREE_ARRAYS = ("level_offset", "first_child", "leaf_item")
ANOTHER_RUN = "a {} of the same configuration, log, items and tree; delete it or leave out --resume to start anew"


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
    """The file of one run, which its `identity` names. The model and the optimiser are saved, and restored in place.

    nodes  of the tree: the file has the rows of all, so another number of processes can go on
    """

    file: Path
    identity: dict[str, str]
    model: NodeScorer
    optimiser: Optimiser
    nodes: int

    def save(self, state: RunState) -> None:
        """Replaces the file in one step. All processes call it, after `refresh` of the optimiser, and process 0 writes."""
        progress = {"step": state.step, "recalls": list(state.recalls), "best": state.best}
        content: dict[str, Any] = {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict(), "progress": progress}
        if processes() == 1:
            self._write(content)
            return
        with TemporaryDirectory(dir=self.file.parent, prefix=".checkpoint-rows-") as folder:
            count = itertools.count()
            whole = map_rows(content, lambda own_nD: self._gathered(own_nD, Path(folder) / str(next(count))))
            if process() == 0:
                self._write(whole)

    def _gathered(self, own_nD: Tensor, file: Path) -> Tensor:
        """All rows in process 0, in a file rather than in memory; in the others their own."""
        if process():
            gather_rows(own_nD, self.nodes, None)
            return own_nD
        shape = self.nodes, *own_nD.shape[1:]
        whole_ND = torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=own_nD.dtype).view(shape)
        gather_rows(own_nD, self.nodes, whole_ND)
        return whole_ND

    def _write(self, content: dict[str, Any]) -> None:
        with _replaced(self.file) as stream:
            torch.save(content | {"identity": self.identity}, stream)

    def restore(self) -> RunState:
        """Load the file (tensors and plain values only), if there is one. Raises InvalidConfig where it is damaged or another run's."""
        if not self.file.exists():
            return RunState()
        try:
            content: dict[str, Any] = torch.load(self.file, map_location="cpu", weights_only=True, mmap=processes() > 1)
            identity = content["identity"]
        except Exception as error:  # a damaged file raises almost anything
            expected = f"a readable checkpoint ({type(error).__name__}); delete it to start anew"
            raise InvalidConfig("--resume", str(self.file), expected) from error
        if identity != self.identity:
            raise InvalidConfig("--resume", str(self.file), ANOTHER_RUN.format("checkpoint"))
        if processes() > 1:
            content = map_rows(content, lambda whole_ND: whole_ND[process() :: processes()].clone())
        self.model.load_state_dict(content["model"])
        self.optimiser.load_state_dict(content["optimiser"])
        state = RunState(**content["progress"])
        log.info("resumed at step %d", state.step)
        return state


def identity_of(config: DeepConfig, prepared: Prepared, tree: Tree) -> dict[str, str]:
    """The configuration, log, items and tree of a run."""
    return _begun_with(config, prepared) | {"tree": _digest(tree)}


def _begun_with(config: DeepConfig, prepared: Prepared) -> dict[str, str]:
    """All that a tree is made from: the catalogue and the earlier model are the log's and a journal's."""
    ids = hashlib.sha256("\0".join(prepared.items.column("id").to_pylist()).encode()).hexdigest()
    earlier = "" if prepared.earlier is None else _digest(prepared.earlier.tree)
    begun = "" if prepared.begun is None else _digest(prepared.begun.tree)
    log = prepared.interactions.fingerprint
    return {"config": config.model_dump_json(), "log": log, "items": ids, "earlier": earlier, "begun": begun}


def _digest(tree: Tree) -> str:
    return hashlib.sha256(tree.first_child.tobytes() + tree.leaf_item.tobytes()).hexdigest()


def kept_tree(file: Path, config: DeepConfig, prepared: Prepared, build: Callable[[], Tree], resume: bool) -> Tree:
    """The tree that a run which is resumed was begun with, from its file, if there is one; else a new one, which is written there.

    Another processor, or another number of threads, would round, and so build, another tree.

    Raises InvalidConfig where the file is damaged or another run's.
    """
    identity = json.dumps(_begun_with(config, prepared))
    if resume and file.exists():
        try:
            with file.open("rb") as kept, np.load(kept) as content:
                tree, begun_with = Tree(*(content[name] for name in TREE_ARRAYS)), str(content["identity"])
        except Exception as error:  # a damaged file raises almost anything
            raise InvalidConfig("--resume", str(file), f"a readable tree ({type(error).__name__}); delete it to start anew") from error
        if begun_with != identity:
            raise InvalidConfig("--resume", str(file), ANOTHER_RUN.format("tree"))
        return tree
    tree = build()
    if resume and file.with_name("checkpoint.pt").exists():  # of a tree that is gone: this one must be the same, or is refused
        return tree
    with _replaced(file) as stream:
        np.savez(stream, identity=identity, **{name: getattr(tree, name) for name in TREE_ARRAYS})
    return tree


@contextmanager
def _replaced(file: Path) -> Iterator[IO[bytes]]:
    """What is written inside takes the place of a file in one step, once it is on the disk."""
    part_file = file.with_suffix(".part")
    with part_file.open("wb") as stream:
        yield stream
    flush(part_file)
    part_file.replace(file)
