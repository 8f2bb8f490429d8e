"""Imports ONNX Runtime without its telemetry. No other module imports it.

Its official builds send facts about the machine, graphs and sessions to Microsoft and write a device id into the home folder, unless an
environment variable, set before the first import, forbids it. A deployment that wants telemetry sets ORT_DISABLE_TELEMETRY=0.

Sessions get graphs as bytes and no folder for external data, so no graph can read another file.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import onnx

from espalier.errors import MissingExtra

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

try:
    import onnxruntime as ort
except ModuleNotFoundError as missing:
    raise MissingExtra(f"a model needs {missing.name}: pip install 'espalier[cpu]', or 'espalier[gpu]'") from missing

__all__ = ["opened_session", "ort"]


def opened_session(model: onnx.ModelProto, threads: int = 1, device: Literal["cpu", "cuda"] = "cpu") -> ort.InferenceSession:
    """A session for a graph of a bundle. threads: of one run on the CPU."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # no notes about unused initializers
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
    providers: list[Any] = ["CPUExecutionProvider"]
    if device == "cuda":
        providers.insert(0, ("CUDAExecutionProvider", {"use_tf32": "0"}))
    return ort.InferenceSession(model.SerializeToString(), options, providers=providers)
