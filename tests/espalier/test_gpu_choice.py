"""Which engine opens where there is a GPU, where there seems to be one, and where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.synthetic import trained_kind
from espalier import open_engine
from espalier.bundle import Bundle
from espalier.engines import ENGINES, gpu_usable
from espalier.engines.onnx import engine as onnx_engine
from espalier.errors import DeviceUnavailable, UnsupportedGraph
from espalier.search import Device, Precision
from espalier.tree import complete_tree

pytest.importorskip("triton", reason="there are no wheels of it outside Linux")


from espalier.engines.triton import gpu_engine
from espalier.engines.triton.graph_engine import TritonSearch
from tests.espalier.gpu_families import GRAPHS, LINEAR, Family, each_family

pytestmark = pytest.mark.release


def small(folder: Path, family: Family) -> Bundle:
    return family.make(folder, np.random.default_rng(5), complete_tree(np.arange(8), 2))


@each_family
def test_a_gpu_that_was_asked_for_and_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family) -> None:
    monkeypatch.setattr("espalier.engines.triton.gpu_engine.gpu_available", lambda: False)
    bundle, name = small(tmp_path, family), family.engine
    with pytest.raises(DeviceUnavailable, match=f"{name} needs a CUDA device, and torch finds none"):
        open_engine(bundle, engine=name)
    with pytest.raises(DeviceUnavailable, match=f"{name} needs a CUDA device, and torch finds none"):
        open_engine(bundle, "cuda")
    with pytest.raises(DeviceUnavailable, match=f"engine {name} does not run on device cpu"):
        open_engine(bundle, "cpu", name)
    monkeypatch.setattr("espalier.engines.find_spec", lambda name: None)
    with pytest.raises(DeviceUnavailable, match=f"{name} cannot run {bundle.manifest.name} version 1: torch and triton not installed"):
        open_engine(bundle, engine=name)


@pytest.fixture
def seeming_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that seems to have a GPU. ONNX Runtime can use it where `cuda_available` says so."""
    monkeypatch.setattr("espalier.engines.gpu_present", lambda: True)
    for family in (GRAPHS, LINEAR):

        def made(bundle: Bundle, precision: Precision, family: Family = family) -> Any:
            return family.search(bundle, "cpu", precision, family.cells)

        monkeypatch.setattr(family.module, family.search.__name__, made)

    class Onnx:
        encodes = merges = False

        def __init__(self, bundle: Bundle, device: str, threads: int) -> None:
            self.name = f"onnx-{device}"
            if device == "cuda" and not onnx_engine.cuda_available():
                raise DeviceUnavailable("no CUDA device")

        def close(self) -> None:
            pass

    monkeypatch.setattr("espalier.engines.onnx.engine.OnnxSearch", Onnx)


@each_family
@pytest.mark.usefixtures("seeming_gpu")
def test_a_gpu_is_taken_and_named_and_precision_refused_where_it_would_not_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: Family
) -> None:
    caplog.set_level("INFO")
    bundle, name = small(tmp_path, family), family.engine
    assert open_engine(bundle).name == open_engine(bundle, "cuda").name == open_engine(bundle, engine=name).name == name
    assert f"{bundle.manifest.name} version 1 runs on {name}" in caplog.text
    assert open_engine(bundle, precision="float16").rounding > open_engine(bundle).rounding
    assert open_engine(bundle, "cpu").name == open_engine(bundle, engine=family.on_cpu).name == family.on_cpu
    refused: tuple[tuple[Device, str | None], ...] = (("cpu", None), ("auto", "reference"))
    for device, engine in refused:
        with pytest.raises(DeviceUnavailable, match=f"precision float16 needs the engine {name}; {bundle.manifest.name} would run on"):
            open_engine(bundle, device, engine, precision="float16")


@pytest.mark.usefixtures("seeming_gpu")
@pytest.mark.parametrize(("family", "cuda", "instead"), [(GRAPHS, True, "onnx-cuda"), (GRAPHS, False, None), (LINEAR, False, None)])
def test_a_gpu_that_cannot_be_used_is_left_to_the_next_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, family: Family, cuda: bool, instead: str | None
) -> None:
    """An old driver, or a bundle that does not fit: an error where the GPU was asked for, another engine where it was not."""

    def refuse(bundle: Bundle, precision: str) -> None:
        raise DeviceUnavailable("too large")

    caplog.set_level("INFO")
    monkeypatch.setattr(family.module, family.search.__name__, refuse)
    monkeypatch.setattr("espalier.engines.onnx.engine.cuda_available", lambda: cuda)
    bundle = small(tmp_path, family)
    assert open_engine(bundle).name == (instead or family.on_cpu)
    assert f"{bundle.manifest.name} version 1 cannot run on {family.engine}: too large" in caplog.text
    on_cpu = f"{bundle.manifest.name} version 1 runs on the CPU: there is a GPU, but {family.engine} cannot use it: too large"
    assert (on_cpu in caplog.text) == (instead is None)
    with pytest.raises(DeviceUnavailable, match="too large"):
        open_engine(bundle, "cuda")


@pytest.mark.parametrize(
    ("kind", "hidden", "reason"),
    [
        ("attention", (16,), r"declares no form of scorer\.onnx"),
        ("mlp", (16,) * 5, r"5 hidden layers, at most 4 are known"),
        ("mlp", (512, 256), "a layer of 512 × 256 weights"),
    ],
)
def test_a_scorer_that_it_does_not_know_is_left_to_another_engine(tmp_path: Path, kind: str, hidden: tuple[int, ...], reason: str) -> None:
    bundle = trained_kind(tmp_path, kind, hidden, np.random.default_rng(5))
    with pytest.raises(UnsupportedGraph, match=reason):
        TritonSearch(bundle, "cpu")


@pytest.mark.usefixtures("seeming_gpu")
def test_a_scorer_that_triton_does_not_know_goes_to_onnx_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    unknown = trained_kind(tmp_path, "attention", (16,), np.random.default_rng(5), name="unknown")
    monkeypatch.setattr("espalier.engines.onnx.engine.cuda_available", lambda: True)
    assert open_engine(small(tmp_path, GRAPHS), "cuda", "onnx-cuda").name == "onnx-cuda"
    assert open_engine(unknown).name == "onnx-cuda"
    assert "unknown version 1 cannot run on triton" in caplog.text
    assert "unknown version 1 runs on onnx-cuda" in caplog.text
    with pytest.raises(DeviceUnavailable, match="triton cannot run unknown version 1: "):
        open_engine(unknown, engine="triton")
    monkeypatch.setattr("espalier.engines.onnx.engine.cuda_available", lambda: False)
    assert open_engine(unknown).name == "onnx-cpu"
    assert "unknown version 1 runs on the CPU: there is a GPU, but triton cannot use it: " in caplog.text
    assert "; onnx-cuda cannot use it: no CUDA device" in caplog.text


def test_whether_a_gpu_would_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(ENGINES) == {"compiled-cpu", "onnx-cpu", "onnx-cuda", "triton", "sparse-cpu", "sparse-cuda", "reference"}
    monkeypatch.setattr("espalier.engines.gpu_present", lambda: False)
    assert not gpu_usable()
    monkeypatch.setattr("espalier.engines.gpu_present", lambda: True)
    for torch_sees, onnx_sees in ((True, False), (False, True), (False, False)):
        monkeypatch.setattr(gpu_engine, "gpu_available", lambda seen=torch_sees: seen)
        monkeypatch.setattr("espalier.engines.onnx.engine.cuda_available", lambda seen=onnx_sees: seen)
        assert gpu_usable() == (torch_sees or onnx_sees)
