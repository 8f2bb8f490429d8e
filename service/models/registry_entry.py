"""The state of one model: its versions, which of them serve, and why the others do not.

The threads of follower.py write it, and the event loop reads it: each attribute that a request needs is replaced as a whole.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from espalier.serving import Serving

from ..live.catalogue import LiveCatalogue
from ..models.desired_state import DesiredState
from ..models.loading import Files, LoadedModel
from ..models.worker_progress import WorkerProgress

State = Literal["loading", "ready", "failed"]
VersionState = Literal["loading", "ready", "draining", "failed", "available"]


@dataclass(frozen=True)
class VersionInfo:
    """A version that is in the models folder or still in memory."""

    version: int
    state: VersionState
    engine: Annotated[str | None, Field(description="The engine that searches it, if it is ready.")]
    reason: Annotated[str | None, Field(description="Why it failed, or another remark.")]


class Retired(NamedTuple):
    """A version that gets no new requests.

    handle  the object that requests have used; dead once the last request is done
    model   a copy with the same parts. The follower frees them then: a request must not drop the last reference to gigabytes
    """

    handle: weakref.ref[LoadedModel]
    model: LoadedModel


@dataclass(eq=False)
class Entry:
    """A model of the models folder.

    serving        the content of serving.json; None without the file: the highest version serves
    loaded         the default version, once it is ready
    reasons        version → why it failed, or another remark
    waiting        version → what it waits for before it can be opened
    file_problems  what is wrong with the files of desired state: "serving" or "removed" → text
    tried          whether all versions that should serve were tried once
    looked_at      when its files of desired state were read last, of time.monotonic()
    late           whether it appeared while the service was running; /readyz does not wait for it
    lock           held while `ready` or `removed` changes
    """

    name: str
    disk: DesiredState
    versions: tuple[int, ...]
    catalogue: LiveCatalogue
    late: bool = False
    serving: Serving | None = None
    removed: tuple[str, ...] = ()
    loaded: LoadedModel | None = None
    ready: Mapping[int, LoadedModel] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)
    waiting: Mapping[int, str] = field(default_factory=dict)
    file_problems: Mapping[str, str] = field(default_factory=dict)
    retired: tuple[Retired, ...] = ()
    loading: int | None = None
    tried: bool = False
    looked_at: float = 0.0
    progress: WorkerProgress = field(default_factory=WorkerProgress)
    bad_files: Mapping[int, Files] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, version: int, reason: str, files: Files) -> None:
        """Note that a version with these files failed; an empty reason says that it did not. The caller holds the lock."""
        others = {v: text for v, text in self.reasons.items() if v != version}
        other_files = {v: bad for v, bad in self.bad_files.items() if v != version}
        self.reasons = {**others, version: reason} if reason else others
        self.bad_files = {**other_files, version: files} if reason else other_files

    @property
    def version(self) -> int:
        """The default version, whether it serves already or not."""
        if self.loaded is not None:
            return self.loaded.version
        return self.serving.default if self.serving is not None else self.versions[-1]

    @property
    def state(self) -> State:
        if self.loaded is not None:
            return "ready"
        return "failed" if self.tried and self.loading is None and self.version not in self.waiting else "loading"

    @property
    def reason(self) -> str | None:
        """Why the default version does not serve; if it serves, all other problems."""
        texts = [*self.file_problems.values()]
        if self.loaded is None:
            texts += [reasons[self.version] for reasons in (self.waiting, self.reasons) if self.version in reasons]
        else:
            remarks = [remark for reasons in (self.waiting, self.reasons) for remark in sorted(reasons.items(), reverse=True)]
            texts += [f"version {version}: {text}" for version, text in remarks]
        return "; ".join(texts) or None

    @property
    def desired(self) -> tuple[int, ...]:
        """The versions that should serve. Without a serving.json, the default version."""
        return self.serving.versions if self.serving is not None else (self.version,)

    def states(self) -> list[VersionInfo]:
        """Every version on disk or in memory, ascending."""
        ready, draining, reasons = self.ready, {retired.model.version for retired in self.retired}, {**self.reasons, **self.waiting}
        infos = []
        for version in sorted({*self.versions, *ready, *draining, *reasons}):
            if version in ready:
                state: VersionState = "ready"
            elif version == self.loading or version in self.waiting:
                state = "loading"
            elif version in draining:
                state = "draining"
            elif version in reasons:
                state = "failed"
            else:
                state = "loading" if not self.tried and version in self.desired else "available"
            engine = ready[version].engine.name if version in ready else None
            infos.append(VersionInfo(version, state, engine, reasons.get(version)))
        return infos
