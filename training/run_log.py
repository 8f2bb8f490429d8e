"""Figures of a run to TensorBoard or MLflow while it lasts, where the user has one of them: nothing else needs either.

    with RunLog.opened("--log-to", "tensorboard:runs", "books"):
        …                      # training notes its losses and its validation's figures: `current().step(…)`

Knows names and numbers. Does not know what they are of.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.errors import InvalidConfig, MissingExtra

FORMS = "tensorboard:FOLDER, mlflow or mlflow:URI"


@dataclass(frozen=True)
class RunLog:
    """Where nothing is asked for: notes nothing.

    note   takes a group, its numbers by name, and the step that they are of, None: of a whole run
    close  ends the run
    """

    note: Callable[[str, Mapping[str, float], int | None], object] = lambda group, values, step: None
    close: Callable[[], object] = lambda: None

    @staticmethod
    @contextmanager
    def opened(option: str, where: str | None, name: str) -> Iterator[RunLog]:
        """A run of this name, noted where `where` says, and what `current` is meanwhile.

        Raises InvalidConfig where that is none of FORMS, MissingExtra where what it needs is not installed.
        """
        opened = RunLog() if where is None else _opened(option, where, name)
        token = _CURRENT.set(opened)
        try:
            yield opened
        finally:
            _CURRENT.reset(token)
            opened.close()

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step of training."""
        self.note("training", values, step)

    def figures(self, group: str, values: Mapping[str, float]) -> None:
        """Numbers of a whole run, or of one method in it."""
        self.note(group, values, None)


_CURRENT: ContextVar[RunLog | None] = ContextVar("run_log", default=None)


def current() -> RunLog:
    """The run that is noted, or one that notes nothing."""
    return _CURRENT.get() or RunLog()


def _opened(option: str, where: str, name: str) -> RunLog:
    kind, _, place = where.partition(":")
    try:
        if kind == "tensorboard" and place:
            return _tensorboard(Path(place) / name)
        if kind == "mlflow" and (place or where == kind):
            return _mlflow(place, name)
    except MissingExtra:
        raise
    except Exception as error:  # of a folder, or of whatever a tracking server and its client may raise
        raise InvalidConfig(option, where, f"a place that takes a run ({type(error).__name__}: {error})") from error
    raise InvalidConfig(option, where, FORMS)


def _tensorboard(folder: Path) -> RunLog:
    """Event files in a folder."""
    writer = _module("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder))

    def note(group: str, values: Mapping[str, float], step: int | None) -> None:
        for metric, value in values.items():
            writer.add_scalar(f"{group}/{metric}", value, step)

    return RunLog(note, writer.close)


def _mlflow(uri: str, name: str) -> RunLog:
    """A run of the tracking server that a URI, or MLflow's own settings, name. It takes no @ in a name, for which there is `_at_`."""
    mlflow = _module("mlflow", "mlflow")
    if uri:
        mlflow.set_tracking_uri(uri)
    mlflow.start_run(run_name=name)

    def note(group: str, values: Mapping[str, float], step: int | None) -> None:
        named = {f"{group}/{metric}".replace("@", "_at_").replace(":", "_"): value for metric, value in values.items()}
        mlflow.log_metrics(named, step=step)

    return RunLog(note, mlflow.end_run)


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise MissingExtra(f"--log-to needs {package}: pip install {package}") from missing
