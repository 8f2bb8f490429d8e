"""Which shards and versions serve, and for how long."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import BundleNotFound
from espalier.search import SearchParams
from service.app import create_app
from service.settings import Settings
from tests.service.running import Running, run
from tests.service.shards.cutting import cut, post, queries_of, query_for, whole_bundle
from tests.waiting import until

open_cpu = partial(open_engine, device="cpu")


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Bundle], list[list[Bundle]]]:
    """Four versions of a bundle and the two shards of each, in folders of their own."""
    folder = tmp_path_factory.mktemp("versions")
    wholes = [whole_bundle(folder / "whole", version=version, seed=version) for version in range(1, 5)]
    return wholes, [cut(whole, folder / f"shards-{whole.manifest.version}") for whole in wholes]


def put(models: Path, shards: list[Bundle]) -> None:
    for shard in shards:
        hidden = models / f".{shard.manifest.name}-{shard.manifest.version}"
        shutil.copytree(shard.path, hidden)
        (models / shard.manifest.name).mkdir(exist_ok=True)
        hidden.rename(models / shard.manifest.name / str(shard.manifest.version))


def served(service: Running) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for entry in service.client.get("/internal/shards").json()["shards"]:
        found.setdefault(entry["model"], []).append(entry["version"])
    return found


def status(service: Running, whole: Bundle, shard: Bundle) -> int:
    return post(service, query_for(whole, shard, queries_of(whole), SearchParams.uniform(3, 4, 4))).status_code


def test_the_two_highest_versions_of_each_shard_serve(versions: Any, tmp_path: Path) -> None:
    wholes, shards = versions
    for number in range(3):
        put(tmp_path, shards[number])
    with run(tmp_path, open_cpu) as service:
        assert served(service) == {"0": [2, 3], "1": [2, 3]}
        for number, right in ((0, 410), (1, 200), (2, 200), (3, 410)):
            assert [status(service, wholes[number], shard) for shard in shards[number]] == [right, right]
        assert service.client.get("/models/0").json()["version"] == 3
        assert service.client.get("/readyz").status_code == 200


def test_what_the_service_says_of_its_shards(versions: Any, tmp_path: Path) -> None:
    _, shards = versions
    put(tmp_path, shards[0])
    with run(tmp_path, open_cpu) as service:
        document = service.client.get("/internal/shards").json()
    info = shards[0][1].manifest.shard
    assert document["shards"][1] == {
        "model": "1",
        "of": "books",
        "version": 1,
        "digest": info.digest,
        "index": 1,
        "count": 2,
        "items": shards[0][1].tree.item_count,
        "engine": "compiled-cpu",
        "ready": True,
    }
    with run(tmp_path, open_cpu) as service:
        assert service.client.get("/internal/shards").json()["process"] != document["process"]


def test_no_shard_is_ready_while_the_service_shuts_down(versions: Any, tmp_path: Path) -> None:
    wholes, shards = versions
    put(tmp_path, shards[0])
    with run(tmp_path, open_cpu) as service:
        service.app.state.service.registry.leaving = True
        assert [entry["ready"] for entry in service.client.get("/internal/shards").json()["shards"]] == [False, False]
        assert status(service, wholes[0], shards[0][0]) == 200
        service.app.state.service.registry.draining = True
        assert status(service, wholes[0], shards[0][0]) == 503


def test_the_workers_of_one_start_are_one_process(tmp_path: Path, versions: Any) -> None:
    put(tmp_path, versions[1][0])
    for name in ("a", "b"):
        (tmp_path / "run" / name).mkdir(parents=True)
    ids = []
    for name in ("a", "a", "b"):
        app = create_app(Settings(models=tmp_path, run_folder=tmp_path / "run" / name))
        ids.append(app.state.service.registry.shards.process)
    assert ids[0] == ids[1] != ids[2]


def test_a_version_that_routers_still_search_stays_beside_two_higher_ones(
    versions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wholes, shards = versions
    now = [100.0]
    monkeypatch.setattr("service.models.registry.monotonic", lambda: now[0])
    monkeypatch.setattr("service.models.swapping.monotonic", lambda: now[0])
    put(tmp_path, shards[0])
    put(tmp_path, shards[1])
    with run(tmp_path, open_cpu, poll_s=0.05, shard_linger_s=60) as service:
        assert status(service, wholes[0], shards[0][1]) == 200
        put(tmp_path, shards[2])
        until(lambda: served(service) == {"0": [2, 3], "1": [1, 2, 3]}, "nobody searches version 1 of shard 0")
        now[0] += 59
        assert status(service, wholes[0], shards[0][1]) == 200
        now[0] += 59
        put(tmp_path, [shards[3][0]])
        until(lambda: 4 in served(service)["0"], "the folder was looked at")
        assert served(service)["1"] == [1, 2, 3]
        assert status(service, wholes[1], shards[1][1]) == 200
        now[0] += 100
        put(tmp_path, [shards[3][1]])
        until(lambda: served(service)["1"] == [1, 2, 3, 4], "no router has asked for a higher version")
        assert status(service, wholes[0], shards[0][1]) == 200
        now[0] += 1
        assert status(service, wholes[3], shards[3][1]) == 200
        now[0] += 61
        until(lambda: served(service)["1"] == [3, 4], "version 1 has gone")
        assert status(service, wholes[0], shards[0][1]) == 410


def test_a_new_version_that_fails_leaves_the_two_that_serve(versions: Any, tmp_path: Path) -> None:
    wholes, shards = versions
    put(tmp_path, shards[0])
    put(tmp_path, shards[1])
    damaged = tmp_path / ".damaged"
    shutil.copytree(shards[2][0].path, damaged)
    (damaged / "nodes.safetensors").write_bytes(b"\0" * (damaged / "nodes.safetensors").stat().st_size)
    with run(tmp_path, open_cpu, poll_s=0.05) as service:
        damaged.rename(tmp_path / "0" / "3")
        until(lambda: service.client.get("/models/0").json()["reason"] is not None, "version 3 has failed")
        assert served(service)["0"] == [1, 2]
        put(tmp_path, [shards[3][0]])
        until(lambda: served(service)["0"] == [2, 4], "the highest two that load serve")
        assert status(service, wholes[3], shards[3][0]) == 200


def test_a_file_of_desired_state_says_what_serves(versions: Any, tmp_path: Path) -> None:
    _, shards = versions
    for number in range(3):
        put(tmp_path, shards[number])
    (tmp_path / "0" / "serving.json").write_text(json.dumps({"generation": 1, "versions": [1], "default": 1}))
    with run(tmp_path, open_cpu) as service:
        assert served(service) == {"0": [1], "1": [2, 3]}


def test_one_shard_of_a_folder_can_be_served_alone(versions: Any, tmp_path: Path) -> None:
    wholes, shards = versions
    put(tmp_path, shards[0])
    with run(tmp_path, open_cpu, shard=1, poll_s=0.05) as service:
        assert served(service) == {"1": [1]}
        assert [model["name"] for model in service.client.get("/models").json()["models"]] == ["1"]
        assert [status(service, wholes[0], shard) for shard in shards[0]] == [410, 200]
        put(tmp_path, shards[1])
        until(lambda: served(service) == {"1": [1, 2]}, "a new version of it is found, and of the others none")
    with pytest.raises(BundleNotFound, match=r"expected 2/<version>/manifest.json.*ESPALIER_SHARD"):
        create_app(Settings(models=tmp_path, shard=2))
