"""How far this host has followed its store. One worker updates this state, and all workers report it.

Knows names and numbers, not how models are downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, TypeAdapter, with_config


@with_config(json_schema_serialization_defaults_required=True)
@dataclass(frozen=True)
class StoreWait:
    """A version that is to be downloaded from the store."""

    version: int
    came: Annotated[int, Field(description="Bytes that are downloaded.")] = 0
    size: Annotated[int, Field(description="Bytes of the whole version; 0 while unknown.")] = 0
    reason: Annotated[str | None, Field(description="Why the download does not go on; null while it does.")] = None
    damaged: Annotated[
        bool, Field(description="Whether the store's copy is damaged or missing. The service does not wait for it at its start.")
    ] = False

    def __str__(self) -> str:
        if self.reason is not None:
            return f"version {self.version} does not come from the store: {self.reason}"
        return f"version {self.version} comes from the store, {self.came / 1e6:.1f} of {self.size / 1e6:.1f} MB"


@dataclass(frozen=True)
class StoreState:
    """The state of all models.

    listed   the models of the store; None before its first answer
    waits    model → the version that is missing
    problem  why the store did not answer last time; None if it did
    """

    listed: tuple[str, ...] | None = None
    waits: Mapping[str, StoreWait] = field(default_factory=dict)
    problem: str | None = None

    def lines(self, present: Mapping[str, object]) -> list[str]:
        """What a service that has just started still waits for, a line each. present: the models that it has."""
        if self.listed is None:
            return [] if present else [f"waiting for the store{f': {self.problem}' if self.problem else ''}"]
        lines = [f"{name} {self.waits[name]}" if name in self.waits else f"{name}: loading" for name in self.listed if name not in present]
        return lines or ([] if present else ["the store has no model for this service"])


STATE_JSON = TypeAdapter(StoreState)
"""The state as workers write it for others."""
