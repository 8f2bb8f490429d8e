"""Checkpoints of a training run: its progress, and all state that it needs to go on as if it had not stopped."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from espalier.durable import atomic_write
from espalier.errors import InvalidConfig
from espalier.tree import Tree

from ..deep.optimiser import Optimiser
from ..deep.parallel import process, processes, wait_for_all
from ..deep.prepare import Prepared
from ..deep.row_shares import gather_rows, map_rows
from ..deep.scorers.model import NodeScorer
from ..run_files import check_identity, file_digests
from ..specification.deep import DeepConfig

log = logging.getLogger(__name__)


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
        """The step whose weights are the result."""
        if not self.recalls:
            return self.step
        return min(self.step, every * (len(self.recalls) - self.recalls[::-1].index(max(self.recalls))))

    def out_of_patience(self, patience: int) -> bool:
        """Whether none of the last `patience` recalls was better than all before."""
        return len(self.recalls) > patience and max(self.recalls[-patience:]) <= max(self.recalls[:-patience])


@dataclass(frozen=True)
class Checkpoint:
    """The file of one run. The model and the optimiser are saved, and restored in place.

    nodes  number of nodes of the tree: the file has the rows of all, so that another number of processes can resume
    """

    file: Path
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
            with_all_rows = map_rows(content, lambda rows_nD: self._gather(rows_nD, Path(folder) / str(next(count))))
            if process() == 0:
                self._write(with_all_rows)

    def _gather(self, rows_nD: Tensor, file: Path) -> Tensor:
        """In process 0 all rows, in a file rather than in memory; in the others the rows that they hold."""
        if process():
            gather_rows(rows_nD, self.nodes, None)
            return rows_nD
        shape = self.nodes, *rows_nD.shape[1:]
        all_rows_ND = torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=rows_nD.dtype).view(shape)
        gather_rows(rows_nD, self.nodes, all_rows_ND)
        return all_rows_ND

    def _write(self, content: dict[str, Any]) -> None:
        with atomic_write(self.file) as part, part.open("wb") as stream:
            try:
                torch.save(content, stream)
            except RuntimeError as error:  # torch raises this one after the stream's own, of a full disk for example
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise

    def restore(self) -> RunState:
        """Load the file (tensors and plain values only), if there is one. Raises InvalidConfig if it is damaged."""
        if not self.file.exists():
            return RunState()
        try:
            content: dict[str, Any] = torch.load(self.file, map_location="cpu", weights_only=True, mmap=processes() > 1)
        except Exception as error:  # a damaged file raises almost anything
            expected = f"a readable checkpoint ({type(error).__name__}); delete it to start anew"
            raise InvalidConfig("--resume", str(self.file), expected) from error
        if processes() > 1:
            content = map_rows(content, lambda all_rows_ND: all_rows_ND[process() :: processes()].clone())
        self.model.load_state_dict(content["model"])
        self.optimiser.load_state_dict(content["optimiser"])
        state = RunState(**content["progress"])
        log.info("resumed at step %d", state.step)
        return state


def step_of(file: Path) -> int:
    """The step of a checkpoint."""
    progress: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)["progress"]
    return int(progress["step"])


def run_identity(config: DeepConfig, prepared: Prepared) -> dict[str, str]:
    """The inputs of a run. The catalogue depends on the log and a journal."""
    ids = hashlib.sha256("\0".join(prepared.items.column("id").to_pylist()).encode()).hexdigest()
    trees = {"the earlier model": prepared.earlier, "the shared start": prepared.shared_start}
    return {
        "the configuration": config.model_dump_json(),
        "the log": prepared.interactions.fingerprint,
        **file_digests(config.data.model_copy(update={"log": None}), "data"),
        "the items": ids,
        "the journal": "" if prepared.run_journal is None else prepared.run_journal.identity,
        **{name: "" if source is None else _tree_digest(source.tree) for name, source in trees.items()},
    }


def check_run(config: DeepConfig, prepared: Prepared, work: Path, resume: bool) -> None:
    """Process 0 writes the identity of a run, or compares it with the one in the work folder; the other processes compare theirs with it.

    Raises InvalidConfig as `check_identity`.
    """
    identity = run_identity(config, prepared)
    if process() == 0:
        check_identity(work, identity, resume)
    wait_for_all()
    if process():
        check_identity(work, identity, resume=True)


def _tree_digest(tree: Tree) -> str:
    return hashlib.sha256(tree.first_child.tobytes() + tree.leaf_item.tobytes()).hexdigest()
