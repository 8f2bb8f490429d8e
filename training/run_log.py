"""Notes the figures of a run in TensorBoard or MLflow while it lasts, if the user has one of them; nothing else needs them.

    with RunLog.opened("--log-to", "tensorboard:runs", "books"):
        …                      # training notes its losses and its validation's figures: `current().step(…)`

Knows names and numbers. Does not know their meaning.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from espalier.errors import InvalidConfig, MissingExtra
from espalier_cli.loading import no_interrupt_lost

log = logging.getLogger(__name__)

FORMS = "tensorboard:FOLDER, mlflow or mlflow:URI"


Ending = Literal["FINISHED", "FAILED", "KILLED"]
"""How a run ended, in MLflow's words."""


@dataclass(frozen=True)
class RunLog:
    """The log of a run. By default it notes nothing.

    note   takes a group, its numbers by name, and their step; None: of the whole run
    close  ends the run
    """

    note: Callable[[str, Mapping[str, float], int | None], object] = lambda group, values, step: None
    close: Callable[[Ending], object] = lambda ending: None

    @staticmethod
    @contextmanager
    def opened(option: str, target: str | None, name: str) -> Iterator[RunLog]:
        """The log of a run with this name at `target`, None: nowhere. Inside, `current` returns it. After its first error it notes nothing.

        Raises InvalidConfig if the target is none of FORMS, MissingExtra if its package is not installed.
        """
        run_log = RunLog() if target is None else _without_errors(_opened(option, target, name), target)
        token = _CURRENT.set(run_log)
        ending: Ending = "FAILED"
        try:
            with no_interrupt_lost():
                yield run_log
            ending = "FINISHED"
        except KeyboardInterrupt:
            ending = "KILLED"
            raise
        finally:
            _CURRENT.reset(token)
            run_log.close(ending)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step of training."""
        self.note("training", values, step)

    def figures(self, group: str, values: Mapping[str, float]) -> None:
        """Numbers of a whole run, or of one method in it."""
        self.note(group, values, None)


_CURRENT: ContextVar[RunLog | None] = ContextVar("run_log", default=None)


def current() -> RunLog:
    """The log of the current run, or one that notes nothing."""
    return _CURRENT.get() or RunLog()


def _opened(option: str, target: str, name: str) -> RunLog:
    kind, _, location = target.partition(":")
    try:
        if kind == "tensorboard" and location:
            return _tensorboard(Path(location) / name)
        if kind == "mlflow" and (location or target == kind):
            return _mlflow(location, name)
    except MissingExtra:
        raise
    except Exception as error:  # of a folder, or any error of a tracking server and its client
        raise InvalidConfig(option, target, f"a place that takes a run ({type(error).__name__}: {error})") from error
    raise InvalidConfig(option, target, FORMS)


def _without_errors(run_log: RunLog, target: str) -> RunLog:
    """The same log, whose first error is a warning and its end: a training is worth more than its log."""
    is_broken = False

    def attempt(action: Callable[..., object], *arguments: object) -> None:
        nonlocal is_broken
        try:
            action(*arguments)
        except Exception as error:  # of a full disk, or any error of a tracking server and its client
            if not is_broken:
                log.warning("%s: the run goes on without its log (%s: %s)", target, type(error).__name__, error)
            is_broken = True

    def note(*arguments: object) -> None:
        if not is_broken:
            attempt(run_log.note, *arguments)

    return RunLog(note, partial(attempt, run_log.close))


def _tensorboard(folder: Path) -> RunLog:
    """Event files in a folder."""
    writer = _module("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder))

    def note(group: str, values: Mapping[str, float], step: int | None) -> None:
        for metric, value in values.items():
            writer.add_scalar(f"{group}/{metric}", value, step)

    return RunLog(note, lambda ending: writer.close())


def _mlflow(uri: str, name: str) -> RunLog:
    """A run of the tracking server at a URI, or of MLflow's own settings. MLflow does not accept @ in a name, so `_at_` replaces it."""
    mlflow = _module("mlflow", "mlflow")
    if uri:
        mlflow.set_tracking_uri(uri)
    mlflow.start_run(run_name=name)

    def note(group: str, values: Mapping[str, float], step: int | None) -> None:
        metrics = {f"{group}/{metric}".replace("@", "_at_").replace(":", "_"): value for metric, value in values.items()}
        mlflow.log_metrics(metrics, step=step)

    return RunLog(note, mlflow.end_run)


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise MissingExtra(f"--log-to needs {package}: pip install {package}") from missing
