"""A file is replaced in one step, or stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier.durable import atomic_write


def written(file: Path, content: str, error: OSError | None = None) -> None:
    with atomic_write(file) as part:
        part.write_text(content)
        if error is not None:
            raise error


def test_a_file_is_replaced_at_the_end_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    with pytest.raises(OSError, match="full"):
        written(file, "half", OSError(28, "the disk is full"))
    assert (file.read_text(), [*tmp_path.iterdir()]) == ("before", [file])
    with file.open() as reader:
        written(file, "after")
        assert reader.read() == "before", "who has it open reads on"
    assert (file.read_text(), [*tmp_path.iterdir()]) == ("after", [file])


def test_what_a_killed_process_left_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("kept")
    (tmp_path / ".file.part").symlink_to("other")
    written(tmp_path / "file", "new")
    assert ((tmp_path / "file").read_text(), (tmp_path / "other").read_text()) == ("new", "kept")
    assert not (tmp_path / "file").is_symlink()
