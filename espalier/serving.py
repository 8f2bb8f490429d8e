"""serving.json: which versions of a model should serve. It lies beside the versions, in a models folder and in a store.

Knows what the file may say. Does not know who follows it.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

SERVING, REMOVED = "serving.json", "removed.json"
MAX_SERVED = 64
"""Versions of one model that may be named in a store: each is downloaded and held in memory."""
Version = Annotated[int, Field(ge=1)]


class DesiredFile(BaseModel):
    """A file of desired state. generation: which state it is; each change has a higher one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    generation: Annotated[int, Field(ge=1)]


class Serving(DesiredFile):
    """Which versions are loaded, and which one answers where a request names none."""

    versions: Annotated[tuple[Version, ...], Field(min_length=1)]
    default: Version

    @model_validator(mode="after")
    def _default_is_served(self) -> Self:
        if self.default not in self.versions:
            raise ValueError(f"default {self.default} is not among the versions {list(self.versions)}")
        return self
