"""ONNX Runtime, as it is loaded here: without its telemetry.

Its official builds send what machine, graphs and sessions they run on to Microsoft, and write a device id into the home folder, unless an
environment variable says otherwise before the first import. A deployment that wants it sets ORT_DISABLE_TELEMETRY=0. This is the only
importer of onnxruntime.

Graphs are given to it as bytes, and it is told of no folder in which a graph's data could be: none may bring data from another file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from espalier.errors import BundleCorrupt, MissingExtra

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

try:
    import onnxruntime as ort
except ModuleNotFoundError as missing:
    raise MissingExtra(f"a model needs {missing.name}: pip install 'espalier[cpu]', or 'espalier[gpu]'") from missing

__all__ = ["open_session", "ort", "session_options"]


def session_options(threads: int) -> ort.SessionOptions:
    """Options of a session for a bundle's graphs on so many threads."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # graph clean-up notes are no news
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
    return options


def open_session(file: Path, graph: bytes, threads: int = 1, device: Literal["cpu", "cuda"] = "cpu") -> ort.InferenceSession:
    """A session for the graph of a bundle's file. Raises BundleCorrupt where there can be none."""
    providers: list[Any] = ["CPUExecutionProvider"]
    if device == "cuda":
        providers.insert(0, ("CUDAExecutionProvider", {"use_tf32": "0"}))
    try:
        return ort.InferenceSession(graph, session_options(threads), providers=providers)
    except Exception as error:  # ONNX Runtime's own classes have no common base
        raise BundleCorrupt(f"{file}: ONNX Runtime cannot open it ({error})") from error
