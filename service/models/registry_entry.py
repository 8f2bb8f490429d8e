"""The state of one model: which versions there are, which of them serve, and why the others do not.

The threads of follower.py write it, the event loop reads it: what a request needs is one attribute, replaced as a whole.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from espalier.serving import Serving

from ..live.catalogue import LiveCatalogue
from ..models.desired_state import DesiredState
from ..models.loading import Files, LoadedModel
from ..models.worker_progress import WorkerProgress

State = Literal["loading", "ready", "failed"]
VersionState = Literal["loading", "ready", "draining", "failed", "available"]


class VersionInfo(NamedTuple):
    """One version. engine: where it serves; reason: why it failed, or another remark."""

    version: int
    state: VersionState
    engine: str | None = None
    reason: str | None = None


class Retired(NamedTuple):
    """A version that gets no new requests.

    handle  what requests have used; dead once the last of them is done
    model   its parts, which the follower frees then: a request must not hold the last reference to gigabytes
    """

    handle: weakref.ref[LoadedModel]
    model: LoadedModel


@dataclass(eq=False)
class Entry:
    """A model of the models folder.

    serving    what serving.json says; None where there is no such file: the highest version
    loaded     the default version, once it is ready
    reasons    why versions failed, or other remarks on them
    waiting    what versions that could not be opened yet wait for
    wrong      what is wrong with serving.json or removed.json, by file name
    tried      whether everything that should serve was tried once
    looked_at  when its files of desired state were read last, of time.monotonic()
    late       found while the service was running, so that /readyz does not wait for it
    lock       held while `ready` or `removed` changes
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
    wrong: Mapping[str, str] = field(default_factory=dict)
    retired: tuple[Retired, ...] = ()
    loading: int | None = None
    tried: bool = False
    looked_at: float = 0.0
    progress: WorkerProgress = field(default_factory=WorkerProgress)
    bad_files: Mapping[int, Files] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, version: int, reason: str, files: Files) -> None:
        """Note that a version with these files failed; without a reason, that it did not. Holds the lock."""
        others = {v: text for v, text in self.reasons.items() if v != version}
        other_files = {v: bad for v, bad in self.bad_files.items() if v != version}
        self.reasons = {**others, version: reason} if reason else others
        self.bad_files = {**other_files, version: files} if reason else other_files

    @property
    def version(self) -> int:
        """The version that answers where a request names none, or would."""
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
        """Why the default version does not serve, or what is wrong although it does."""
        texts = [*self.wrong.values()]
        if self.loaded is None:
            texts += [known[self.version] for known in (self.waiting, self.reasons) if self.version in known]
        else:
            others = [entry for known in (self.waiting, self.reasons) for entry in sorted(known.items(), reverse=True)]
            texts += [f"version {version}: {text}" for version, text in others]
        return "; ".join(texts) or None

    @property
    def desired(self) -> tuple[int, ...]:
        """The versions that should serve, as far as known."""
        return self.serving.versions if self.serving is not None else (self.version,)

    def states(self) -> list[VersionInfo]:
        """Every version on disk or in memory, ascending."""
        ready, draining, reasons = self.ready, {retired.model.version for retired in self.retired}, {**self.reasons, **self.waiting}
        found = []
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
            found.append(VersionInfo(version, state, engine, reasons.get(version)))
        return found
