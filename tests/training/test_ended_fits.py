"""`fit` ends early: Ctrl-C, a full disk, a refusal, a folder that cannot be written to."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.bundle import Bundle
from tests.training.commands import Outcome, command, written_toml
from tests.training.shop import IDS, item_frame, write_shop
from training.versions import work_folder

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A training of 3 steps, with a checkpoint after each."""
    rows = [f"u{user},i{(user * 7 + n * n) % 12}" for user in range(24) for n in range(6)]
    (tmp_path / "log.csv").write_text("user,item\n" + "\n".join(rows) + "\n")
    (tmp_path / "items.csv").write_text("id\n" + "".join(f"i{item}\n" for item in range(12)))
    monkeypatch.setattr("training.deep.fit.CHECKPOINT_EVERY", 1)
    raw: dict[str, Any] = {
        "kind": "otm-robust",
        "name": "small",
        "data": {"log": str(tmp_path / "log.csv"), "format": {"min_user_events": 1}, "items": str(tmp_path / "items.csv")},
        "instances": {"windows": [4, 2]},
        "scorer": {"node_dim": 4, "hidden": []},
        "optimiser": {"steps": 3, "batch": 8},
        "search": {"beam_size": 8, "m": 5, "max_m": 12, "max_beam_size": 64},
    }
    return written_toml(tmp_path / "small.toml", raw)


def ended(config: Path, *options: str) -> Outcome:
    return command("fit", "--config", config, "--out", config.parent / "small" / "1", *options)


@pytest.mark.parametrize(
    ("saved", "resumes"), [(0, "--resume goes on with the tree, since there is no checkpoint"), (2, "--resume goes on from step 2")]
)
def test_ctrl_c_says_what_resume_goes_on_from(config: Path, monkeypatch: pytest.MonkeyPatch, saved: int, resumes: str) -> None:
    save = torch.save

    def interrupted(content: dict[str, Any], stream: Any) -> None:
        if content["progress"]["step"] > saved:
            raise KeyboardInterrupt
        save(content, stream)

    monkeypatch.setattr(torch, "save", interrupted)
    outcome = ended(config)
    assert outcome.status == 130
    assert f"Interrupted. {resumes}" in outcome.err


def test_ctrl_c_leaves_the_trained_levels_of_a_linear_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.linear.run.export", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    outcome = ended(write_shop(tmp_path))
    assert outcome.status == 130
    assert "Interrupted. --resume goes on after the last trained level." in outcome.err


@pytest.mark.parametrize("name", ["evaluate", "fold"])
def test_ctrl_c_ends_other_commands_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(Bundle, "open", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    outcome = command(name, "--model", tmp_path / "small/1", *(["--out", tmp_path / "small/2"] if name == "fold" else []))
    assert (outcome.status, outcome.err) == (130, "Interrupted.\n")


def test_ctrl_c_in_a_callback_from_c_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    def compiled(*_: object) -> None:
        ctypes.CFUNCTYPE(None)(interrupted)()
        threading.Event().wait(30)

    monkeypatch.setattr(Bundle, "open", compiled)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outcome = command("evaluate", "--model", tmp_path / "small/1")
    finally:
        signal.signal(signal.SIGINT, former)
    assert (outcome.status, outcome.err) == (130, "Interrupted.\n")


def test_a_checkpoint_on_a_full_disk_is_deleted_and_the_one_before_it_resumes(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, _: Any) -> int:
            raise FULL

    open_file, work = Path.open, work_folder(config.parent / "small" / "1")

    def opened(path: Path, *arguments: Any, **options: Any) -> Any:
        stream = open_file(path, *arguments, **options)
        if path.name == ".checkpoint.pt.part" and (work / "checkpoint.pt").exists():
            stream.close()
            return Full()
        return stream

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        outcome = ended(config)
    assert outcome.status == 1
    assert f"error: {work}: no space is left ([Errno 28] No space left on device)" in outcome.err
    assert "When there is more, --resume goes on from step 1" in outcome.err
    assert not (work / ".checkpoint.pt.part").exists()
    assert ended(config, "--resume").status == 0


def test_a_full_disk_is_said_though_the_new_folder_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_shop(tmp_path)
    monkeypatch.setattr("training.linear.run.fit_version", lambda *_, **__: (_ for _ in ()).throw(FULL))
    outcome = command("fit", "--config", config, "--out", tmp_path / "no" / "small" / "1")
    work = work_folder(tmp_path / "no" / "small" / "1")
    assert f"error: {work}: no space is left ([Errno 28] No space left on device); " in outcome.err
    assert f" MiB are free in {tmp_path}, " in outcome.err
    assert "When there is more, --resume starts anew" in outcome.err


def test_a_refused_fit_leaves_nothing_but_the_work_folder_of_an_earlier_run(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, items = work_folder(config.parent / "small" / "1"), config.parent / "items.csv"
    content = items.read_text()
    items.write_text(content + "i3\n")
    last = content.count("\n") + 1
    expected = f"items.csv: line {last}, column id: got 'i3', expected each id once; line 5 has it, too"
    assert expected in ended(config).err
    assert not work.parent.exists()
    items.write_text(content)
    with monkeypatch.context() as patch:
        patch.setattr("training.deep.run.export", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        ended(config)
    items.write_text(content + "i3\n")
    assert "expected each id once" in ended(config, "--resume").err
    assert (work / "checkpoint.pt").exists()


def test_a_refused_fit_of_a_linear_model_leaves_nothing(tmp_path: Path) -> None:
    config = write_shop(tmp_path)
    item_frame([*IDS, IDS[0]]).write_parquet(tmp_path / "items.parquet")
    assert "expected each id once" in ended(config).err
    assert not (tmp_path / "small").exists()
    (tmp_path / "small").mkdir()
    assert "expected each id once" in ended(config).err
    assert [*(tmp_path / "small").iterdir()] == [], "a folder that was there stays"


def test_a_folder_that_cannot_be_written_to_is_named_with_its_option(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.versions.os.access", lambda _, mode: not mode & os.W_OK)
    outcome = ended(config)
    expected = f"a folder that can be written to, which {config.parent} is not"
    assert (outcome.status, outcome.err) == (1, f"error: --out: got '{config.parent / 'small/1'}', expected {expected}\n")


def test_a_folder_that_cannot_be_made_is_named_with_its_option(config: Path) -> None:
    out = Path("/proc/small/1")  # the superuser may write there, by its mode
    outcome = command("fit", "--config", config, "--out", out)
    assert outcome.status == 1
    assert outcome.err.startswith(f"error: --out: got '{out}', expected a folder that can be written to")
