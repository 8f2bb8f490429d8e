"""The files of desired state: written whole, read again, and said where they are malformed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from espalier.errors import InvalidData
from espalier.serving import Serving
from service.errors import Conflict
from service.models.desired_state import DesiredState, Removed
from service.models.followed_file import FollowedFile


def test_a_state_is_read_as_it_was_written_and_leaves_no_other_file(tmp_path: Path) -> None:
    state = DesiredState(tmp_path)
    assert (state.read(Serving), state.read(Removed), state.signature(Serving)) == (None, None, None)
    serving, removed = Serving(generation=4, versions=(2, 3), default=3), Removed(generation=2, ids=("b12", "ü"))
    state.write(serving)
    first = state.signature(Serving)
    state.write(removed)
    assert (state.read(Serving), state.read(Removed)) == (serving, removed)
    assert json.loads((tmp_path / "serving.json").read_text()) == {"generation": 4, "versions": [2, 3], "default": 3}
    state.write(serving)
    assert first is not None
    assert state.signature(Serving) != first
    state.delete(Removed)
    state.delete(Removed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["serving.json"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "books/serving.json"),
        ('{"generation": 1, "versions": [1]}', "default"),
        ('{"generation": 0, "versions": [1], "default": 1}', "generation"),
        ('{"generation": 1, "versions": [], "default": 1}', "versions"),
        ('{"generation": 1, "versions": [0], "default": 0}', "versions.0"),
        ('{"generation": 1, "versions": [1, 2], "default": 3}', "default 3 is not among the versions"),
        ('{"generation": 1, "versions": [1], "default": 1, "canary": 2}', "canary"),
        ('{"generation": 1, "versions": [1], "default": 1', "books/serving.json"),
    ],
)
def test_a_malformed_state_is_said(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "serving.json").write_text(content)
    with pytest.raises(InvalidData, match=named):
        DesiredState(tmp_path / "books").read(Serving)


def test_a_pin_is_lifted_by_a_file_that_stays_away(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is deleted and written anew, as some programs replace files, is none."""
    now = [100.0]
    monkeypatch.setattr("service.models.followed_file.time.monotonic", lambda: now[0])
    disk = DesiredState(models / "books")
    pins = [Serving(generation=number, versions=(1,), default=1) for number in (1, 2)]
    watched = FollowedFile(disk, Serving)
    disk.write(pins[0])
    assert watched.look()
    disk.delete(Serving)
    for moment in (100.0, 100.4):
        now[0] = moment
        assert not watched.look()
        assert watched.state == pins[0]
    disk.write(pins[1])
    assert watched.look()
    assert watched.state == pins[1]
    disk.delete(Serving)
    for moment, lifted in ((200.0, False), (200.4, False), (200.5, True)):
        now[0] = moment
        assert watched.look() is lifted
    found: Serving | None = watched.state
    assert found is None
    assert watched.wrong is None


@pytest.mark.parametrize("kind", [Serving, Removed])
def test_one_change_of_a_file_at_a_time(tmp_path: Path, kind: type[Serving] | type[Removed]) -> None:
    with DesiredState(tmp_path).locked(kind), pytest.raises(Conflict, match="under way"), DesiredState(tmp_path).locked(kind):
        pass
    with DesiredState(tmp_path).locked(Serving), DesiredState(tmp_path).locked(Removed):
        pass
