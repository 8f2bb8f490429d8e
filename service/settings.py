"""What the service can be told, and the only place that reads the environment.

Every setting is an environment variable: `ESPALIER_` and its name in capitals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from espalier.search import Device


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


class Settings(BaseSettings):
    """Read once, when the service starts."""

    model_config = SettingsConfigDict(env_prefix="ESPALIER_", env_ignore_empty=True, frozen=True)

    models: Path = Field(
        default=Path("models"), description="Folder of the models: <models>/<name>/<version>/. The highest version of each is served."
    )
    device: Device = Field(default="auto", description="`auto` takes a GPU where there is one; `cuda` without a GPU is an error.")
    engine: str | None = Field(default=None, description="Engine by name, instead of the choice by device.")
    threads: int = Field(
        default=1, ge=1, description="Threads inside one CPU search. One process per core with one thread each scales best."
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    max_batch: int | None = Field(default=None, ge=1, description="Most queries in one engine call. Default: 16 on a CPU, 512 on a GPU.")
    max_queries: int = Field(default=256, ge=1, description="Most queries in one request.")
    max_body_bytes: int = Field(default=1 << 20, ge=1, description="Largest request body.")
    max_history: int = Field(default=1000, ge=1, description="Most ids in one history, and in one list of exclusions.")
    drain_s: float = Field(default=10.0, ge=0, description="Seconds that a shutdown waits for accepted requests.")
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(_upper)] = Field(
        default="INFO", description="Least severe messages that are logged."
    )
    verify: bool = Field(default=True, description="Compare every file of a bundle with its checksum before it serves.")
