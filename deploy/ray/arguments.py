"""The arguments of the application, `args` in app.yaml. Knows names and numbers, not Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator, model_validator

from espalier.errors import expectation
from service.keys_file import read_keys
from service.router.config import Patience
from service.settings import Settings

MAX_SHARDS = 1024
MAX_REPLICAS = 1024
POLL_S = 2.0
"""Seconds between two scans for new versions, unless a setting says otherwise. Admin requests cannot reach each of many replicas."""

EVERYWHERE = "0.0.0.0"
"""The ingress cannot know where Ray listens, so it takes it that other machines reach it: `private` routes need a key, or ESPALIER_OPEN."""


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Autoscale(_Checked):
    """Ray starts a replica when there are more than `target` requests in flight for each, and ends one when there are fewer."""

    min: int = Field(default=1, ge=1, le=MAX_REPLICAS, description="Fewest replicas.")
    max: int = Field(ge=1, le=MAX_REPLICAS, description="Most replicas.")
    target: float = Field(default=2.0, gt=0, description="Requests under way for each replica, on average.")
    up_after_s: float = Field(default=10.0, ge=0, description="Seconds that the load must be above the target before a replica is started.")
    down_after_s: float = Field(default=300.0, ge=0, description="Seconds that the load must be below it before a replica is ended.")
    average_over_s: float = Field(default=15.0, gt=10, description="Seconds over which the load is averaged; Ray takes no fewer than 10.")

    @model_validator(mode="after")
    def _ordered(self) -> Autoscale:
        if self.max < self.min:
            raise ValueError(f"max: got {self.max}, expected at least min, {self.min}")
        return self


class Replicas(_Checked):
    """How many replicas a deployment has, and what Ray reserves for each.

    A reservation is no limit. Ray places a replica where so much is free, and makes so many GPUs visible to it.
    """

    replicas: int = Field(default=1, ge=1, le=MAX_REPLICAS, description="How many; a name for `autoscale` with min = max.")
    autoscale: Autoscale | None = Field(default=None, description="Instead of `replicas`.")
    cpus: float = Field(default=1.0, ge=0, description="Cores of each replica; a search takes as many threads unless `threads` is set.")
    gpus: float = Field(default=0.0, ge=0, description="GPUs of each replica; parts of one are shared.")
    memory_gb: float = Field(default=0.0, ge=0, description="Memory of each replica in 10^9 bytes; 0: not reserved.")
    max_ongoing: int = Field(
        default=1024, ge=1, description="Most requests that Ray sends to a replica at a time; the replica itself refuses what it cannot do."
    )
    resources: Mapping[str, float] = Field(default_factory=dict, description="Resources of your own, as in `ray start --resources`.")
    settings: Mapping[str, JsonValue] = Field(default_factory=dict, description="Settings of the service for these replicas alone.")

    @model_validator(mode="before")
    @classmethod
    def _one_count(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("autoscale") is not None and "replicas" in values:
            raise ValueError("replicas, autoscale: got both, expected one of them")
        return values

    @property
    def threads(self) -> int:
        return max(int(self.cpus), 1)


class Shards(Replicas):
    """The shards of one model: a deployment for each."""

    folder: Path = Field(description="Folder of the shards, as `python -m training shard --out` writes it: <folder>/<index>/<version>/.")
    count: int = Field(ge=1, le=MAX_SHARDS, description="How many shards there are.")

    def deployments(self) -> Iterator[tuple[int, str]]:
        """Index and name of each shard's deployment."""
        for index in range(self.count):
            yield index, f"{self.folder.name}-{index}"


class IngressPatience(Patience):
    """How long the ingress waits for shards. Polls through Ray's handles are slower than those of HTTP connections."""

    poll_timeout_s: float = Field(default=2.0, gt=0, le=60, description="Seconds in which a look must be answered.")


class Arguments(_Checked):
    """The arguments of the application in app.yaml."""

    models: Path = Field(default=Path("models"), description="Folder of the models, as ESPALIER_MODELS; the ingress opens them whole.")
    shards: tuple[Shards, ...] = Field(min_length=1, description="The shards of each model.")
    ingress: Replicas = Field(default_factory=Replicas, description="Replicas of the ingress.")
    router: IngressPatience = Field(default_factory=IngressPatience, description="How patient the ingress is with shards.")
    settings: Mapping[str, JsonValue] = Field(
        default_factory=dict, description="Settings of the service for all replicas: those of docs/reference.md in small letters."
    )
    health_check_s: float = Field(default=2.0, gt=0, le=60, description="Seconds between two looks of Ray at a replica's health.")
    stop_s: float = Field(default=20.0, gt=0, description="Seconds that a replica may take to finish its requests when it is ended.")

    @field_validator("shards")
    @classmethod
    def _unique_names(cls, shards: tuple[Shards, ...]) -> tuple[Shards, ...]:
        names = [name for group in shards for _, name in group.deployments()]
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise ValueError(f"folder: got two whose shards are named {duplicates[0]}, expected folders of different names")
        return shards

    @model_validator(mode="after")
    def _valid_settings(self) -> Arguments:
        ingress = _check("ingress.settings", self.ingress_settings())
        for name in ("admin_address", "tls_certificate"):
            if getattr(ingress, name) is not None:
                raise ValueError(f"ingress.settings: got ESPALIER_{name.upper()}, expected none: Ray listens, in plain HTTP at one address")
        for index, group in enumerate(self.shards):
            shard = _check(f"shards.{index}.settings", self.shard_settings(group, 0))
            if shard.store is not None and shard.store == ingress.store:
                raise ValueError(f"shards.{index}.settings: store: got that of the whole bundles, expected that of these shards")
        takes_writes = ingress.write_keys or (ingress.keys_file and any(key.role == "write" for key in read_keys(ingress.keys_file)))
        if takes_writes and (self.ingress.replicas > 1 or self.ingress.autoscale is not None):
            raise ValueError(
                "ingress.replicas: got several, expected 1 where there are write keys: a put reaches one replica, and the others "
                "would answer without it"
            )
        return self

    def ingress_settings(self) -> Mapping[str, Any]:
        """The settings of the ingress in this file; others come from the environment."""
        return {"threads": self.ingress.threads, **self.settings, **self.ingress.settings, "models": self.models, "host": EVERYWHERE}

    def shard_settings(self, group: Shards, index: int) -> Mapping[str, Any]:
        return {"threads": group.threads, **self.settings, **group.settings, "models": group.folder, "shard": index}


def settings_of(values: Mapping[str, Any]) -> Settings:
    """The settings of a replica, with those of its environment. Raises ValidationError."""
    settings = Settings(**values)
    return settings if settings.poll_s is not None else settings.model_copy(update={"poll_s": POLL_S})


def _check(field: str, values: Mapping[str, Any]) -> Settings:
    """The settings. Raises ValueError, which names the field, the setting and the problem."""
    keys = sorted(name for name in values if name.endswith(("_key", "_keys")))
    if keys:
        raise ValueError(
            f"{field}: got {', '.join(keys)}, expected ESPALIER_{keys[0].upper()} in the environment: Ray logs what is said here"
        )
    try:
        return settings_of(values)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, each['loc']))}: expected {expectation(each)}" if each["loc"] else expectation(each)
            for each in error.errors()
        )
    raise ValueError(f"{field}: {problems}")
