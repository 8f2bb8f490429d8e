"""Figures of a run where TensorBoard or MLflow is: stand-ins of both note what they are told."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from espalier.errors import InvalidConfig, MissingExtra
from training.run_log import RunLog, current


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What TensorBoard and MLflow were told."""
    calls: list[Any] = []

    def noted(name: str) -> Any:
        def call(*given: Any, **named: Any) -> None:
            calls.append((name, *given, *named.values()))

        return call

    def writer(folder: str) -> Any:
        calls.append(("folder", folder))
        return SimpleNamespace(add_scalar=noted("scalar"), close=noted("close"))

    mlflow = SimpleNamespace(**{name: noted(name) for name in ("set_tracking_uri", "start_run", "log_metrics", "end_run")})
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=writer))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return calls


def test_tensorboard_gets_steps_and_figures_in_a_folder_of_the_run(told: list[Any], tmp_path: Path) -> None:
    with RunLog.opened("--log-to", f"tensorboard:{tmp_path}", "books") as opened:
        assert current() is opened
        current().step(100, {"loss": 2.5})
        opened.figures("neighbours", {"recall@50": 0.5})
    assert told == [
        ("folder", str(tmp_path / "books")),
        ("scalar", "training/loss", 2.5, 100),
        ("scalar", "neighbours/recall@50", 0.5, None),
        ("close",),
    ]
    assert current() == RunLog()


@pytest.mark.parametrize(("where", "uri"), [("mlflow", None), ("mlflow:http://tracking:5000", "http://tracking:5000")])
@pytest.mark.parametrize(("error", "ending"), [(None, "FINISHED"), (RuntimeError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_mlflow_gets_names_that_it_takes_and_how_the_run_ended(
    told: list[Any], where: str, uri: str | None, error: type[BaseException] | None, ending: str
) -> None:
    with nullcontext() if error is None else pytest.raises(error), RunLog.opened("--log-to", where, "books") as opened:
        opened.step(3, {"recall@50": 0.25})
        opened.figures("fusion:recipe:neighbours", {"recall@50": 0.5})
        if error is not None:
            raise error
    expected: list[Any] = [] if uri is None else [("set_tracking_uri", uri)]
    assert told == [
        *expected,
        ("start_run", "books"),
        ("log_metrics", {"training/recall_at_50": 0.25}, 3),
        ("log_metrics", {"fusion_recipe_neighbours/recall_at_50": 0.5}, None),
        ("end_run", ending),
    ]


@pytest.mark.parametrize("broken", ["log_metrics", "end_run"])
def test_a_run_goes_on_without_a_log_that_fails(
    told: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    attempts = []

    def restart(*given: Any, **__: Any) -> None:
        attempts.append(given)
        raise ConnectionError("the server restarts")

    monkeypatch.setattr(sys.modules["mlflow"], broken, restart)
    with RunLog.opened("--log-to", "mlflow", "books") as opened:
        opened.step(1, {"loss": 2.5})
        opened.step(2, {"loss": 2.0})
    (warning,) = [record.getMessage() for record in caplog.records]
    assert len(attempts) == 1
    assert warning == "mlflow: the run goes on without its log (ConnectionError: the server restarts)"
    assert [name for name, *_ in told] == (["start_run", "end_run"] if broken == "log_metrics" else ["start_run", *["log_metrics"] * 2])


@pytest.mark.parametrize("where", ["", "tensorboard", "tensorboard:", "mlflow:", "wandb:x"])
def test_what_is_neither_is_refused(where: str) -> None:
    with (
        pytest.raises(InvalidConfig, match=r"--log-to.*expected tensorboard:FOLDER, mlflow or mlflow:URI"),
        RunLog.opened("--log-to", where, "x"),
    ):
        pass


def test_a_place_that_takes_no_run_is_refused(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**named: Any) -> None:
        raise OSError("nobody answers")

    monkeypatch.setattr(sys.modules["mlflow"], "start_run", refuse)
    with pytest.raises(InvalidConfig, match="nobody answers"), RunLog.opened("--log-to", "mlflow:http://x", "x"):
        pass


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtra, match="pip install mlflow"), RunLog.opened("--log-to", "mlflow", "x"):
        pass


def test_nothing_is_noted_where_nothing_is_asked_for() -> None:
    with RunLog.opened("--log-to", None, "x") as opened:
        opened.step(1, {"loss": 1.0})
        opened.figures("x", {"recall@1": 1.0})
        assert current() == RunLog()
