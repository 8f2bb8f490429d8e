"""ONNX Runtime, as it is loaded here: without its telemetry.

Its official builds send what machine, graphs and sessions they run on to Microsoft, and write a device id into the home folder, unless an
environment variable says otherwise before the first import. A deployment that wants it sets ORT_DISABLE_TELEMETRY=0. This is the only
importer of onnxruntime.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

__all__ = ["ort"]
