"""What else is watched of models and machines: the default version, the memory of GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from espalier.bundle import Bundle
from espalier.engines import open_engine
from service.live.catalogues import LiveCatalogues
from service.models.follower import Follower
from service.models.loading import EngineSource
from service.models.worker_progress import Workers
from service.settings import Settings
from service.watch import process_usage
from service.watch.metrics import Metrics
from tests.service.probing import sample
from tests.service.running import Running, run
from tests.waiting import until


def default(running: Running, model: str = "books") -> float | None:
    return sample(running.client.get("/metrics").text, "espalier_model_default_version", model=model)


def test_the_default_version_is_said_and_0_while_none_is_ready(models: Path) -> None:
    def broken(opened: Bundle) -> Any:
        raise RuntimeError("no engine")

    with run(models) as running:
        until(lambda: default(running) == 1)
    with run(models, broken) as running:
        until(lambda: default(running) == 0)
        assert sample(running.client.get("/metrics").text, "espalier_workers") == 1


def test_a_model_that_came_late_and_never_was_ready_is_nobodys_alarm(versions: Path) -> None:
    with run(versions, poll_s=0.05) as running:
        broken = versions / "films" / "1"
        broken.mkdir(parents=True)
        (broken / "manifest.json").write_text("{}")
        until(lambda: default(running, "films") is not None)
        assert np.isnan(default(running, "films") or 0)
        assert default(running) == 2


def test_a_worker_that_comes_in_for_another_says_nothing_before_it_can_answer(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, settings = Metrics(), Settings(models=models)
    follower = Follower(settings, metrics, EngineSource(open_engine), Workers(), LiveCatalogues(settings, metrics))
    monkeypatch.setattr(Workers, "others_serve", lambda self: True)
    follower._report_default(follower.entries["books"])
    assert "espalier_model_default_version{" not in metrics.render().decode()
    monkeypatch.setattr(Workers, "others_serve", lambda self: False)
    follower._report_default(follower.entries["books"])
    assert 'espalier_model_default_version{model="books"} 0.0' in metrics.render().decode()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ModuleType | None], Metrics]]:
    """Metrics of a machine with this driver of GPUs."""

    def with_driver(nvml: ModuleType | None) -> Metrics:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        process_usage._nvml.cache_clear()
        metrics = Metrics()
        metrics.watch_gpus(process_usage.gpu_memory)
        return metrics

    yield with_driver
    process_usage._nvml.cache_clear()


def test_gpu_memory_is_asked_for_at_each_scrape(driver: Callable[[ModuleType | None], Metrics]) -> None:
    used, nvml = {0: 3e9, 1: 5e9}, ModuleType("pynvml")
    vars(nvml).update(
        NVMLError=type("NVMLError", (Exception,), {}),
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(used),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=used[handle], total=80e9),
    )
    metrics = driver(nvml)
    assert sample(metrics.render().decode(), "espalier_gpu_memory_bytes", device=1) == 5e9
    used[1] = 6e9
    text = metrics.render().decode()
    assert sample(text, "espalier_gpu_memory_bytes", device=1) == 6e9
    assert sample(text, "espalier_gpu_memory_limit_bytes", device=0) == 8e10


def test_without_the_driver_there_are_no_metrics_of_gpu_memory(
    driver: Callable[[ModuleType | None], Metrics], caplog: pytest.LogCaptureFixture
) -> None:
    metrics = driver(None)
    for _ in range(2):
        assert "espalier_gpu_memory_bytes{" not in metrics.render().decode()
    assert len(caplog.records) == 1
