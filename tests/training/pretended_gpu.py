"""A GPU that is not there: tensors that say they are on it, so that a test finds arrays of two devices in one operation.

They lie in this machine's memory, and everything is computed there. What is on the GPU is known by its storage: what was moved or made
there, and what any operation makes of it. So the code takes the ways that it has for GPUs. What this cannot find are faults of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

GPU, CPU = torch.device("cuda"), torch.device("cpu")
Generator = torch.Generator
BETWEEN = ("aten::copy_", "aten::_to_copy", "aten::_local_scalar_dense", "aten::_embedding_bag", "aten::_embedding_bag_backward")
"""Operations that may have arrays on both sides; of the last two, torch makes one itself, and sees through the pretence."""


class TwoDevices(RuntimeError):
    """What a real GPU would refuse."""


def is_there(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "is_there", False)


def put_there(value: Any, there: bool = True) -> Any:
    for tensor in tree_iter(value):
        if isinstance(tensor, Tensor):
            vars(tensor.untyped_storage())["is_there"] = there
    return value


class _Operations(TorchDispatchMode):
    """Every operation, of backward passes and optimisers too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [value for value in tree_iter((args, kwargs or {})) if isinstance(value, Tensor)]
        places = {is_there(tensor) for tensor in found if tensor.dim() or is_there(tensor)}
        if len(places) == 2 and func._schema.name not in BETWEEN:
            shapes = [(tuple(tensor.shape), "GPU" if is_there(tensor) else "CPU") for tensor in found]
            raise TwoDevices(f"{func}: {shapes}")
        result = func(*args, **kwargs or {})
        if func._schema.name == "aten::copy_":
            return result
        return put_there(result) if True in places else result


class _Calls(TorchFunctionMode):
    """Calls that name a device, or ask for one."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func == torch.Tensor.device.__get__:
            return GPU if is_there(args[0]) else CPU
        if name == "numpy" and is_there(args[0]):
            raise TwoDevices("numpy of an array on the GPU")
        if name == "cpu":
            return put_there(args[0].clone(), there=False) if is_there(args[0]) else args[0]
        if name == "backward":  # with the pretence in what is computed again on the way
            one = torch.ones_like(args[0])
            with self:
                run_backward((args[0],), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)
            return None
        if name == "pin_memory":
            return args[0]
        named = [value for value in (*args[1:], kwargs.get("device")) if isinstance(value, torch.device)]
        if not named:
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and generator.place != named[0].type:
            raise TwoDevices(f"{name} on {named[0]} with a generator on {generator.place}")
        args = tuple(CPU if isinstance(value, torch.device) else value for value in args)
        kwargs |= {"device": CPU} if "device" in kwargs else {}
        result = func(*args, **kwargs)
        if named[0].type == "cpu":
            return put_there(result.clone(), there=False) if name == "to" and is_there(args[0]) else result
        if name == "to" and is_there(args[0]):
            return put_there(result)
        return put_there(result.clone() if name == "to" else result)


class _Generator(Generator):
    place: str

    def __new__(cls, device: torch.device | str = "cpu") -> _Generator:
        made = super().__new__(cls)
        made.place = torch.device(device).type
        return made


@contextmanager
def pretended_gpu() -> Iterator[torch.device]:
    """Inside, `cuda` is a device that tensors can be on. TwoDevices is raised where a real one would refuse."""
    with pytest.MonkeyPatch.context() as patch, _Calls(), _Operations():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        patch.setattr(torch, "Generator", _Generator)
        yield GPU
