"""Figures of a run to TensorBoard or MLflow while it lasts, where the user has one of them: nothing else needs either.

    with RunLog.opened("--log-to", "tensorboard:runs", "books"):
        …                      # training notes its losses and its validation's figures: `current().step(…)`

Knows names and numbers. Does not know what they are of.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from espalier.errors import InvalidConfig, MissingExtra

FORMS = "tensorboard:FOLDER, mlflow or mlflow:URI"


class RunLog:
    """Where nothing is asked for: notes nothing."""

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

    def figures(self, group: str, values: Mapping[str, float]) -> None:
        """Numbers of a whole run, or of one method in it."""

    def close(self) -> None:
        """The end of the run."""


class TensorBoard(RunLog):
    """Event files in a folder's folder of the run's name."""

    def __init__(self, folder: Path, name: str) -> None:
        self._writer: Any = _module("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder / name))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        for metric, value in values.items():
            self._writer.add_scalar(f"training/{metric}", value, step)

    def figures(self, group: str, values: Mapping[str, float]) -> None:
        for metric, value in values.items():
            self._writer.add_scalar(f"{group}/{metric}", value)

    def close(self) -> None:
        self._writer.close()


class MLflow(RunLog):
    """A run of the tracking server that a URI, or MLflow's own settings, name. It takes no @ in a name, for which there is `_at_`."""

    def __init__(self, uri: str | None, name: str) -> None:
        self._mlflow: Any = _module("mlflow", "mlflow")
        if uri is not None:
            self._mlflow.set_tracking_uri(uri)
        self._mlflow.start_run(run_name=name)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({_key(f"training/{metric}"): value for metric, value in values.items()}, step=step)

    def figures(self, group: str, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({_key(f"{group}/{metric}"): value for metric, value in values.items()})

    def close(self) -> None:
        self._mlflow.end_run()


_CURRENT: ContextVar[RunLog | None] = ContextVar("run_log", default=None)


def current() -> RunLog:
    """The run that is noted, or one that notes nothing."""
    return _CURRENT.get() or RunLog()


def _opened(option: str, where: str, name: str) -> RunLog:
    kind, _, place = where.partition(":")
    try:
        if kind == "tensorboard" and place:
            return TensorBoard(Path(place), name)
        if kind == "mlflow" and (place or where == kind):
            return MLflow(place or None, name)
    except MissingExtra:
        raise
    except Exception as error:  # of a folder, or of whatever a tracking server and its client may raise
        raise InvalidConfig(option, where, f"a place that takes a run ({type(error).__name__}: {error})") from error
    raise InvalidConfig(option, where, FORMS)


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise MissingExtra(f"--log-to needs {package}: pip install {package}") from missing


def _key(name: str) -> str:
    return name.replace("@", "_at_").replace(":", "_")
