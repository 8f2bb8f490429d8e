"""A torch module as the bytes of an ONNX graph, in the opset of the bundles."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import Tensor, nn


def onnx_bytes(module: nn.Module, args: tuple[Tensor, ...], inputs: list[str], output: str, dims: list[dict[int, Any]]) -> bytes:
    """The graph of `module(*args)`; `dims` names the dynamic dimensions of each argument."""
    # At every export this logger says that torchvision is not installed, which nothing here uses.
    logging.getLogger("torch.onnx._internal.exporter._registration").disabled = True
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)  # torch 2.13 warns about its own export code
        program = torch.onnx.export(
            module.eval(),
            args,
            dynamo=True,
            input_names=inputs,
            output_names=[output],
            dynamic_shapes=dims,
            verbose=False,
            opset_version=20,
        )
    if program is None:
        raise RuntimeError("torch.onnx.export gave no program")
    ClearMetadataAndDocStringPass()(program.model)  # stack traces, with the paths of this machine
    serialised: bytes = program.model_proto.SerializeToString()
    return serialised
