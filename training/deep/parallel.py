"""Several processes that train one model, each on its rows of every batch (`torchrun -m training fit …`).

Knows which process takes which rows and how values are averaged over processes. Does not know models or objectives. Without torchrun there
is one process, which takes all rows; then the functions here cost nothing.

Each process draws the random numbers of the whole batch and keeps those of its rows, so results do not depend on the number of processes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from espalier.arrays import Float64
from espalier.errors import InvalidConfig
from espalier.tree import Tree

LONGEST_WAIT = timedelta(days=1)
"""How long processes wait for each other. Process 0 may build a tree or export for hours; torch's own limit is minutes."""


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Inside it, this process is in torchrun's group: gloo on a CPU, NCCL on GPUs, one GPU each. No effect without torchrun.

    Raises InvalidConfig where there are more processes than GPUs.
    """
    if not dist.is_torchelastic_launched():
        yield
        return
    # The first step of an optimiser imports this module, whose functions hold the group that exists at import. Gloo's threads would then
    # outlive the group, and a thread that frees a tensor while the interpreter ends aborts the process (torch 2.13).
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


def process_rows(count: int) -> slice:
    """The rows of a batch of `count` rows that this process takes; the processes' numbers of rows differ by at most one."""
    return slice(count * process() // processes(), count * (process() + 1) // processes())


def drawn_rows(draw: Callable[[int], Tensor], count: int) -> Tensor:
    """This process's `count` rows of draw(rows of the whole batch): the same draws as in a single process."""
    rows = count * processes()
    return draw(rows)[process_rows(rows)]


@torch.no_grad()
def broadcast_from_first(values: Iterable[Tensor]) -> None:
    """Replace the values in all processes by those of process 0."""
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


def gathered_values(process_values: Float64, count: int, device: torch.device) -> Float64:
    """float64[count]: all values; process p of P passes those with numbers p, p + P, …. They are exact, so means do not depend on P."""
    if processes() == 1:
        return process_values
    all_values = torch.zeros(count, dtype=torch.float64, device=device)
    all_values[process() :: processes()] = torch.from_numpy(process_values).to(device)
    dist.all_reduce(all_values)
    values: Float64 = all_values.cpu().numpy()
    return values
