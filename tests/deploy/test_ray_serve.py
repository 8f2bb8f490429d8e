"""The application on a Ray of this machine: it answers like the bundle, loses no request with a replica, heals, scales and rolls out."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'espalier[ray]'")

from espalier.bundle import Bundle
from espalier.engines import open_engine
from tests.deploy.ray_running import Load, RayServing, ray_serving
from tests.service.running import run
from tests.service.shards.cutting import cut, whole_bundle
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.release]
STARTED_S = 180.0
"""On a busy machine that compiles everything anew."""
COMMAND = [sys.executable, "-m", "deploy.ray.small", "--cpus", "2"]
BODY: dict[str, Any] = {"queries": [{"history": ["item-3", "item-8"]}], "m": 12, "beam_size": 64}
FIRST, SECOND = "books-shards-0", "books-shards-1"


@dataclass
class Application:
    folder: Path
    whole: Bundle
    serving: RayServing


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """Two shards, each with a replica or, under load, two."""
    folder = tmp_path_factory.mktemp("ray")
    whole = whole_bundle(folder / "models", "product memory")
    cut(whole, folder / "books-shards")
    shards = {"folder": str(folder / "books-shards"), "count": 2, "cpus": 0.2, "settings": {"poll_s": 0.5}}
    # A busy machine starts a replica slowly, and must not end it before.
    scaled = {"min": 1, "max": 2, "target": 0.3, "up_after_s": 0, "down_after_s": 300, "average_over_s": 10.5}
    arguments = {
        "models": str(folder / "models"),
        "ingress": {"cpus": 0.2, "settings": {"poll_s": 0.5}},
        "shards": [shards | {"autoscale": scaled}],
        "settings": {"timeout_ms": 20_000, "max_queue_ms": 20_000},  # the machine may be busy
    }
    with ray_serving(COMMAND, arguments) as serving:
        serving.wait_for(BODY, STARTED_S)
        yield Application(folder, whole, serving)


def items(answer: Any) -> list[Any]:
    return [result["items"] for result in answer["results"]]


def test_it_answers_like_the_bundle(application: Application) -> None:
    with run(application.folder / "models", partial(open_engine, device="cpu")) as alone:
        excluding = {"queries": [{"history": ["item-3"], "exclude": ["item-10", "item-22"]}]}
        for body in (BODY, BODY | excluding, BODY | {"beam_size": 3, "m": 3}):
            status, answer = application.serving.ask(body)
            assert status == 200, answer
            assert answer["coverage"] == {"items": 1.0, "shards": 2, "answered": 2, "missing": []}
            if body["beam_size"] == 64:
                assert items(answer) == items(alone.client.post("/retrieve", json=body).json())


def test_ray_adds_a_replica_under_load_and_the_death_of_one_fails_no_request(application: Application) -> None:
    serving = application.serving
    with Load(serving, BODY, 2) as load:
        until(lambda: len(serving.replicas(FIRST)) == 2, serving.tail, within_s=STARTED_S)
        first = serving.replicas(FIRST)[0]
        seen = load.answered
        until(lambda: load.answered > seen + 20, serving.tail, within_s=30)
        os.kill(first, signal.SIGKILL)
        seen = load.answered
        until(lambda: load.answered > seen + 20, serving.tail, within_s=30)
        until(lambda: len([pid for pid in serving.replicas(FIRST) if pid != first]) == 2, serving.tail, within_s=STARTED_S)
    assert load.other == []
    assert load.lacking == 0


def test_a_shard_without_replicas_is_missing_until_ray_has_started_another(application: Application) -> None:
    serving = application.serving
    for pid in serving.replicas(SECOND):
        os.kill(pid, signal.SIGKILL)
    found: list[Any] = []

    def lacks() -> bool:
        found.append(serving.ask(BODY | {"timeout_ms": 500}))
        status, answer = found[-1]
        return status == 200 and bool(answer["coverage"]["missing"] == [1])

    until(lacks, lambda: found[-1], within_s=30)
    status, problem = serving.ask(BODY | {"min_coverage": 1})
    assert status in (200, 503), problem
    serving.wait_for(BODY, STARTED_S)


def test_a_new_version_is_rolled_out_by_its_files_under_load(application: Application) -> None:
    serving, folder = application.serving, application.folder
    with Load(serving, BODY, 2) as load:
        second = whole_bundle(folder / "next", "product memory", version=2, seed=6)
        cut(second, folder / "next-shards")
        for index in range(2):
            shutil.copytree(folder / "next-shards" / str(index) / "2", folder / "books-shards" / str(index) / ".2")
            (folder / "books-shards" / str(index) / ".2").rename(folder / "books-shards" / str(index) / "2")
        shutil.copytree(second.path, folder / "models" / "books" / ".2")
        (folder / "models" / "books" / ".2").rename(folder / "models" / "books" / "2")
        until(lambda: 2 in load.versions, serving.tail, within_s=STARTED_S)
    assert load.other == []
    assert load.lacking == 0
    status, answer = serving.ask(BODY)
    assert (status, answer["version"], answer["coverage"]["items"]) == (200, 2, 1.0)
