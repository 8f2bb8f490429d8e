"""serving.json: which versions of a model should serve. It lies beside the versions, in a models folder and in a store.

Knows the fields of the file. Does not know its readers.
"""

from __future__ import annotations

import json
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

SERVING, REMOVED = "serving.json", "removed.json"
FORMER = ".serving.before"
"""In a model's folder while a change of versions is under way."""
MAX_SERVED = 64
"""Versions of one model that may be named in a store: each is downloaded and held in memory."""
MAX_NAMED = 1000
"""Most keys, and most groups, that a candidate may name."""
MAX_VERSION = (1 << 63) - 1
"""The largest version in an admin's request: the audit log, which is JSON, has no larger numbers."""
Version = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=128)], ...], Field(max_length=MAX_NAMED)]


class DesiredFile(BaseModel):
    """A file of desired state. generation: rises with each change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    generation: Annotated[int, Field(ge=1)]


class Candidate(BaseModel):
    """A version on trial: it answers some of the requests that name no version."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, json_schema_serialization_defaults_required=True)

    version: Annotated[Version, Field(le=MAX_VERSION, description="A version in the models folder.")]
    share: Annotated[Share, Field(description="Share of the users, or of the requests that name no user, that it answers.")] = 0.0
    keys: Annotated[Names, Field(description="Names of API keys whose requests it answers.")] = ()
    groups: Annotated[Names, Field(description="Values of the header Espalier-Group of requests that it answers.")] = ()
    shadow: Annotated[
        Share, Field(description="Share of the other requests that it answers as shadow requests. No client sees these answers.")
    ] = 0.0


class Serving(DesiredFile):
    """The versions to load, the default for requests that name no version, and the candidate that answers some of these."""

    versions: Annotated[tuple[Version, ...], Field(min_length=1)]
    default: Version
    candidate: Candidate | None = None

    @model_validator(mode="after")
    def _are_served(self) -> Self:
        if self.default not in self.versions:
            raise ValueError(f"default {self.default} is not among the versions {list(self.versions)}")
        if self.candidate is not None and (self.candidate.version not in self.versions or self.candidate.version == self.default):
            others = [version for version in self.versions if version != self.default]
            raise ValueError(f"candidate {self.candidate.version} is not among the versions beside the default, {others}")
        return self


class Former(BaseModel):
    """The content of serving.json before a change; None if there was no file. generation: of the state that the change writes."""

    generation: int
    serving: Serving | None = None


def as_file(state: BaseModel) -> str:
    """The content of the file of a state."""
    return json.dumps(state.model_dump(mode="json", exclude_none=True)) + "\n"
