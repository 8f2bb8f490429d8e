"""What else is watched of models and machines: the default version, the memory of GPUs."""

from __future__ import annotations

import shutil
import sys
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
from tests.service.models.registry import run as run_registry
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
    follower = Follower(settings, metrics, EngineSource(open_engine), Workers(), LiveCatalogues(settings, metrics, dict))
    monkeypatch.setattr(Workers, "others_serve", lambda self: True)
    follower._report_default(follower.entries["books"])
    assert "espalier_model_default_version{" not in metrics.render().decode()
    monkeypatch.setattr(Workers, "others_serve", lambda self: False)
    follower._report_default(follower.entries["books"])
    assert 'espalier_model_default_version{model="books"} 0.0' in metrics.render().decode()


def test_a_version_has_the_time_at_which_it_was_written_until_it_is_unloaded(versions: Path) -> None:
    def created(running: Running, version: int) -> float | None:
        text = running.client.get("/metrics").text
        return sample(text, "espalier_model_created_timestamp_seconds", model="books", version=version)

    with run(versions, poll_s=0.05) as running:
        written = Bundle.open(versions / "books" / "2").manifest.created.timestamp()
        until(lambda: created(running, 2) is not None)
        assert created(running, 2) == pytest.approx(written)
    metrics = Metrics()
    metrics.show("espalier_model_created_timestamp_seconds", written, "books", 2)
    metrics.forget_version("books", 2)
    assert "espalier_model_created_timestamp_seconds{" not in metrics.render().decode()


def test_the_disk_of_the_models_folder_is_measured_at_each_scrape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last numbers stay where the folder is gone."""
    metrics, free = Metrics(), [30]
    assert "espalier_models_disk_bytes 0.0" in metrics.render().decode()
    metrics.watch_disk(tmp_path)

    def measured(folder: Path) -> tuple[int, int, int]:
        assert folder == tmp_path
        return 100, 100 - 50, free[0]

    monkeypatch.setattr(shutil, "disk_usage", measured)
    for free[0] in (30, 20):
        text = metrics.render().decode()
        assert (sample(text, "espalier_models_disk_bytes"), sample(text, "espalier_models_disk_free_bytes")) == (100, free[0])
    monkeypatch.undo()
    metrics.watch_disk(tmp_path / "gone")
    assert sample(metrics.render().decode(), "espalier_models_disk_free_bytes") == 20


def test_a_worker_that_is_not_scraped_measures_the_disk_too(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [30]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: (100, 0, free[0]))
    with run_registry(models) as running:

        def measured() -> float:
            (family,) = running.metrics.gauges["espalier_models_disk_free_bytes"].collect()
            return family.samples[0].value

        assert measured() == 30
        free[0] = 20
        until(lambda: measured() == 20)


def test_gpu_memory_is_asked_for_at_each_scrape(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without the driver there is none of it, which the log says once."""
    used, nvml = {0: 3e9, 1: 5e9}, ModuleType("pynvml")
    vars(nvml).update(
        NVMLError=type("NVMLError", (Exception,), {}),
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(used),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=used[handle], total=80e9),
    )
    for driver in (nvml, None):
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        process_usage._nvml.cache_clear()
        metrics = Metrics()
        metrics.watches_gpus = True
        for bytes_1 in (5e9, 6e9):
            used[1] = bytes_1
            text = metrics.render().decode()
            assert sample(text, "espalier_gpu_memory_bytes", device=1) == (bytes_1 if driver else None)
            assert sample(text, "espalier_gpu_memory_limit_bytes", device=0) == (8e10 if driver else None)
    process_usage._nvml.cache_clear()
    assert len([record for record in caplog.records if record.name == process_usage.__name__]) == 1
