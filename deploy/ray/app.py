"""The application that app.yaml names: a deployment for each shard, and the ingress that searches them."""

# Ray finds the class of the arguments in the annotation, which therefore must not be a string: no `from __future__ import annotations`.
from collections.abc import Mapping
from typing import Any

from ray import serve

from ..ray.arguments import Arguments, Autoscale, Replicas
from ..ray.ingress import Ingress
from ..ray.shard import Shard

HEALTH_TIMEOUT_S = 5.0
"""Ray replaces a replica after three health checks that took longer."""
IDLE_CHECK_S = 0.2
"""A replica that is being ended checks so often whether its requests are finished."""


def build(arguments: Arguments) -> serve.Application:
    """The application. Raises pydantic's ValidationError, which names the field."""
    shards = {
        name: serve.deployment(name=name, **_options(arguments, group))(Shard).bind(arguments.shard_settings(group, index))
        for group in arguments.shards
        for index, name in group.deployments()
    }
    ingress = serve.deployment(name="ingress", **_options(arguments, arguments.ingress))(serve.ingress()(Ingress))
    return ingress.bind(shards, arguments.ingress_settings(), arguments.router.model_dump())


def _options(arguments: Arguments, group: Replicas) -> Mapping[str, Any]:
    count = {"num_replicas": group.replicas} if group.autoscale is None else {"autoscaling_config": _autoscaling(group.autoscale)}
    actor = {"num_cpus": group.cpus, "num_gpus": group.gpus, "memory": group.memory_gb * 1e9, "resources": {**group.resources}}
    return {
        **count,
        "ray_actor_options": {name: value for name, value in actor.items() if value or name == "num_cpus"},
        "max_ongoing_requests": group.max_ongoing,
        "health_check_period_s": arguments.health_check_s,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": arguments.stop_s,
        "graceful_shutdown_wait_loop_s": IDLE_CHECK_S,
    }


def _autoscaling(autoscale: Autoscale) -> Mapping[str, Any]:
    return {
        "min_replicas": autoscale.min,
        "max_replicas": autoscale.max,
        "target_ongoing_requests": autoscale.target,
        "upscale_delay_s": autoscale.up_after_s,
        "downscale_delay_s": autoscale.down_after_s,
        "look_back_period_s": autoscale.average_over_s,
    }
