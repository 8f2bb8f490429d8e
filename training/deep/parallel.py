"""Several processes that train one model, each on its rows of every batch (`torchrun -m training fit …`).

Knows which process takes which rows and how values are averaged over processes. Does not know models or objectives. Without torchrun there
is one process, which takes all rows; every function here is then free.

Each process draws the random numbers of the whole batch and keeps those of its rows, so results do not depend on the number of processes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from espalier.errors import InvalidConfig
from espalier.tree import Tree

LONGEST_WAIT = timedelta(days=1)
"""How long processes wait for each other. Process 0 may build a tree or export for hours; torch's own limit is minutes."""


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Join torchrun's group of processes inside: gloo on a CPU, NCCL on GPUs, one GPU each. No effect without torchrun.

    Raises InvalidConfig where there are more processes than GPUs.
    """
    if not dist.is_torchelastic_launched():
        yield
        return
    # Its functions keep the group that there is when it is imported, which the first step of an optimiser does. With it gloo's threads
    # would outlive the group, and one that frees a tensor while the interpreter ends aborts the process (torch 2.13).
    importlib.import_module("torch.distributed.nn.functional")
    if device.type == "cuda":
        gpu = dist.get_node_local_rank()
        if gpu >= torch.cuda.device_count():
            raise InvalidConfig("--nproc-per-node", f"more than {gpu} processes", f"at most {torch.cuda.device_count()}, one for each GPU")
        torch.cuda.set_device(gpu)
        dist.init_process_group("nccl", timeout=LONGEST_WAIT, device_id=torch.device("cuda", gpu))
    else:
        dist.init_process_group("gloo", timeout=LONGEST_WAIT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def process() -> int:
    """The number of this process; process 0 writes files and logs."""
    return dist.get_rank() if dist.is_initialized() else 0


def processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def wait_for_all() -> None:
    if processes() > 1:
        dist.barrier()


def own_rows(count: int) -> slice:
    """The rows of a batch of `count` that this process takes: as many as the others take, or one more or less."""
    return slice(count * process() // processes(), count * (process() + 1) // processes())


def drawn_rows(draw: Callable[[int], Tensor], own: int) -> Tensor:
    """This process's `own` rows of draw(rows of the whole batch): what one process alone would have drawn for them."""
    rows = own * processes()
    return draw(rows)[own_rows(rows)]


@torch.no_grad()
def from_first(values: Iterable[Tensor]) -> None:
    """All processes take the values of process 0, in place."""
    if processes() > 1:
        for tensor in values:
            dist.broadcast(tensor, 0)


def shared_tree(build: Callable[[], Tree], device: torch.device) -> Tree:
    """The tree that process 0 builds, on every process."""
    if processes() == 1:
        return build()
    trees: list[Any] = [build() if process() == 0 else None]
    dist.broadcast_object_list(trees, 0, device=device)
    tree: Tree = trees[0]
    return tree


def average(values: Tensor) -> Tensor:
    """The mean of a tensor over the processes."""
    if processes() > 1:
        dist.all_reduce(values)
        values /= processes()
    return values


def every_value(own: NDArray[np.float64], count: int, device: torch.device) -> NDArray[np.float64]:
    """float64[count]: the values of which process p of P has numbers p, p + P, … (`own`); exactly, so that means do not depend on P."""
    if processes() == 1:
        return own
    whole = torch.zeros(count, dtype=torch.float64, device=device)
    whole[process() :: processes()] = torch.from_numpy(own).to(device)
    dist.all_reduce(whole)
    values: NDArray[np.float64] = whole.cpu().numpy()
    return values
