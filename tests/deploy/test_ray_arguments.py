"""What app.yaml may say, and what it makes of the service and of Ray. Nothing of Ray is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tests import ROOT

pytest.importorskip("ray", reason="Ray is not installed: pip install 'espalier[ray]'")

from ray.serve.schema import ServeDeploySchema

from deploy.ray.app import build
from deploy.ray.arguments import POLL_S, Arguments, settings_of

SHARDS = {"folder": "models/books-shards", "count": 2}


def arguments(**more: Any) -> Arguments:
    return Arguments.model_validate({"shards": [SHARDS]} | more)


def shards(**more: Any) -> Arguments:
    return arguments(shards=[SHARDS | more])


def options(given: Arguments) -> dict[str, Any]:
    """What Ray is told, by the name of the deployment."""
    ingress = build(given)._bound_deployment
    found = {ingress.name: ingress}
    for bound in ingress.init_args[0].values():
        found[bound._bound_deployment.name] = bound._bound_deployment
    return found


def test_the_file_in_the_repository_is_what_ray_and_the_builder_take() -> None:
    document = yaml.safe_load((ROOT / "deploy/ray/app.yaml").read_text())
    ServeDeploySchema.model_validate(document)
    (application,) = document["applications"]
    found = options(Arguments.model_validate(application["args"]))
    assert list(found) == ["ingress", "debian-depends-shards-0", "debian-depends-shards-1"]
    reserved = sum(deployment.ray_actor_options["num_cpus"] * deployment.num_replicas for deployment in found.values())
    assert reserved <= 2, "it runs on two cores"


def test_there_is_a_deployment_for_each_shard_of_each_folder_with_its_settings() -> None:
    given = arguments(models="m", shards=[SHARDS, {"folder": "models/films-shards", "count": 1, "settings": {"timeout_ms": 7}}])
    found = options(given)
    assert list(found) == ["ingress", "books-shards-0", "books-shards-1", "films-shards-0"]
    second = settings_of(found["books-shards-1"].init_args[0])
    assert (second.models, second.shard) == (Path("models/books-shards"), 1)
    assert settings_of(found["films-shards-0"].init_args[0]).timeout_ms == 7
    assert settings_of(found["ingress"].init_args[1]).models == Path("m")


def test_what_is_reserved_and_how_many_there_are_is_said_to_ray() -> None:
    given = shards(cpus=2, gpus=0.5, memory_gb=1.5, resources={"ssd": 1}, autoscale={"min": 2, "max": 5, "target": 3})
    shard, ingress = options(given)["books-shards-0"], options(given)["ingress"]
    reserved = {name: shard.ray_actor_options[name] for name in ("num_cpus", "num_gpus", "memory", "resources")}
    assert reserved == {"num_cpus": 2, "num_gpus": 0.5, "memory": 1.5e9, "resources": {"ssd": 1}}
    scaling = shard._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 3)
    assert ingress.num_replicas == 1
    assert shard.max_ongoing_requests == 1024, "the replica itself refuses what is too much"
    assert options(shards(replicas=3))["books-shards-1"].num_replicas == 3


def test_a_search_takes_as_many_threads_as_cores_are_reserved_unless_told() -> None:
    for given, threads in ((shards(cpus=2.5), 2), (shards(cpus=0.5), 1), (shards(cpus=4, settings={"threads": 3}), 3)):
        assert settings_of(given.shard_settings(given.shards[0], 0)).threads == threads


def test_replicas_look_for_new_versions_unless_a_setting_says_how_often(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments()
    assert settings_of(given.ingress_settings()).poll_s == POLL_S
    monkeypatch.setenv("ESPALIER_POLL_S", "9")
    assert settings_of(given.ingress_settings()).poll_s == 9
    assert settings_of(arguments(settings={"poll_s": 4}).ingress_settings()).poll_s == 4


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"shards": []}, "shards"),
        ({"shards": [{"folder": "s"}]}, "shards.0.count"),
        ({"shards": [SHARDS | {"count": 0}]}, "shards.0.count"),
        ({"shards": [SHARDS | {"replica": 2}]}, "shards.0.replica"),
        ({"shards": [SHARDS | {"gpus": -1}]}, "shards.0.gpus"),
        ({"shards": [SHARDS | {"replicas": 2, "autoscale": {"max": 3}}]}, "expected one of them"),
        ({"shards": [SHARDS | {"autoscale": {"min": 3, "max": 2}}]}, "expected at least min, 3"),
        ({"shards": [SHARDS, SHARDS]}, "books-shards-0"),
        ({"shards": [SHARDS | {"settings": {"treads": 2}}]}, "shards.0.settings: treads: expected no such key"),
        ({"shards": [SHARDS], "settings": {"timeout_ms": 0}}, "timeout_ms"),
        ({"shards": [SHARDS], "ingress": {"settings": {"threads": 0}}}, "ingress.settings: threads"),
        ({"shards": [SHARDS], "router": {"hedge": 2}}, "router.hedge"),
        (  # Ray logs it
            {"shards": [SHARDS], "ingress": {"settings": {"admin_keys": "a-key-of-sixteen-characters"}}},
            "ingress.settings: got admin_keys, expected ESPALIER_ADMIN_KEYS in the environment",
        ),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Arguments.model_validate(given)
    assert says in str(raised.value)


def test_live_items_have_one_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_WRITE_KEYS", "a-key-of-sixteen-characters")
    arguments()
    for several in ({"replicas": 2}, {"autoscale": {"max": 2}}):
        with pytest.raises(ValidationError, match=r"ingress\.replicas: got several, expected 1"):
            arguments(ingress=several)
