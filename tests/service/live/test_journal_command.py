"""`espalier journal`, upkeep of a live catalogue."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.random_bundles import make_bundle
from espalier.bundle import Bundle
from espalier.live import journal_upkeep
from espalier.live.journal import Journal
from espalier.live.journal_upkeep import LEFT_OUT
from espalier.live.operations import ItemBody, Operation
from espalier.store.backups import find_backups
from espalier.store.objects import Objects
from espalier.tree import complete_tree
from service.journal import main
from tests.espalier.live.journals import appended, put


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with a model of one version and two operations on one item."""
    version = add_bundle(tmp_path / "models", 3)
    events = ItemBody(events=(["a"], ["b"]), users=("u1", "u2"))
    journal = Journal(tmp_path / "models" / "books" / "live.db")
    appended(journal, [put("x"), Operation(0, "x", "put", events)], version=version)
    journal.close()
    return tmp_path / "models"


def run(models: Path, capsys: pytest.CaptureFixture[str], command: str, *more: str) -> Any:
    assert main([command, "--models", str(models), "--model", "books", *more]) == 0
    return json.loads(capsys.readouterr().out)


def journal(models: Path) -> Journal:
    return Journal(models / "books" / "live.db", "read")


def test_compact_keeps_places_of_versions_that_are_there(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    former = fingerprint(models, 3)
    present = add_bundle(models, 3)  # trained anew with the same number
    with Journal(models / "books" / "live.db").writing() as transaction:
        transaction.store_placements(present, transaction.placements(former, [2]))
    (models / "books" / "2").mkdir()
    (models / "books" / "2" / "manifest.json").write_text("{")  # whose places may be any
    found = run(models, capsys, "compact")
    assert (found["operations"], found["placements"]) == (1, 1)
    assert journal(models).placements(former, [1, 2]).keys() == {2}
    shutil.rmtree(models / "books" / "2")
    assert run(models, capsys, "compact")["placements"] == 1
    assert [operation.sequence for operation in journal(models).since(0, 9)] == [2]
    assert journal(models).placements(former, [1, 2]) == {}
    assert journal(models).placements(present, [1, 2]).keys() == {2}


def test_compact_keeps_places_of_a_version_that_is_published_meanwhile(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    since = Journal.since

    def publish(self: Journal, sequence: int, limit: int) -> list[Operation]:
        """Another worker loads a version while the compaction reads its first block."""
        monkeypatch.setattr(Journal, "since", since)
        add_bundle(models, 4)
        with Journal(models / "books" / "live.db").writing() as transaction:
            transaction.store_placements(fingerprint(models, 4), transaction.placements(fingerprint(models, 3), [2]))
        return since(self, sequence, limit)

    monkeypatch.setattr(Journal, "since", publish)
    run(models, capsys, "compact")
    assert journal(models).placements(fingerprint(models, 4), [1, 2]).keys() == {2}


def test_a_version_that_goes_while_the_versions_are_listed_is_none(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_upkeep, "versions_in", lambda _: (3, 9))
    assert journal_upkeep.versions_on_disk(models / "books")() == [(fingerprint(models, 3), 0)]


def test_compact_keeps_all_places_where_the_versions_cannot_be_listed(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied", str(folder))

    with monkeypatch.context() as unreadable:
        unreadable.setattr(Path, "iterdir", fail)
        assert main(["compact", "--models", str(models), "--model", "books"]) == 1
    assert "Permission denied" in capsys.readouterr().err
    assert journal(models).placements(fingerprint(models, 3), [2]).keys() == {2}


def test_compact_drops_an_old_delete_once_every_version_holds_it(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Journal(models / "books" / "live.db")
    appended(live, [put("y"), Operation(0, "y", "delete", at=1e9), Operation(0, "z", "delete", at=1e9), Operation(0, "young", "delete")])
    assert run(models, capsys, "compact")["tombstones"] == 0  # version 3 was trained without them
    add_bundle(models, 3, through=4)
    add_bundle(models, 4, through=5)
    assert run(models, capsys, "compact")["tombstones"] == 1
    assert [(operation.sequence, operation.id) for operation in live.since(0, 9)] == [(2, "x"), (5, "z"), (6, "young")]
    assert (live.latest("y"), live.dropped()) == (None, 4)
    add_bundle(models, 3, through=6)
    add_bundle(models, 4, through=6)
    assert run(models, capsys, "compact", "--keep-from", "5")["tombstones"] == 0
    assert run(models, capsys, "compact")["tombstones"] == 1
    assert [operation.id for operation in live.since(0, 9)] == ["x", "young"]  # it is not a month old
    assert (live.dropped(), live.last_sequence()) == (5, 6)
    assert appended(live, [put("y")]) == [7]


def add_bundle(models: Path, version: int, through: int = 0) -> int:
    """Put a new version in place of any former one. Returns its fingerprint."""
    shutil.rmtree(models / "books" / str(version), ignore_errors=True)
    rng = np.random.default_rng()
    bundle = make_bundle(models, rng, complete_tree(rng.permutation(8), 2), name="books", version=version)
    file = bundle.path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"live": {"through": through}}))
    return fingerprint(models, version)


def fingerprint(models: Path, version: int) -> int:
    return Bundle.open(models / "books" / str(version)).manifest.fingerprint


def test_commands_print_what_they_have_done(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy.db"
    assert run(models, capsys, "backup", "--to", str(copy)) == {"written": str(copy), "sequence": 2}
    assert Journal(copy, "read").since(0, 9) == journal(models).since(0, 9)
    assert run(models, capsys, "erase-user", "--user", "u1") == {"items": ["x"]}
    assert journal(models).since(1, 9)[0].body == ItemBody(events=(["b"],), users=("u2",))
    assert run(models, capsys, "take-over") == {"sequence": LEFT_OUT + 2}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a store that is not there yet."""
    return f"file://{tmp_path}/store"


def test_a_backup_in_a_store_is_restored(models: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(models, capsys, "backup", "--store", url)
    assert first["written"]
    assert run(models, capsys, "backup", "--store", url) == first | {"written": False}
    before = journal(models).since(0, 9)
    shutil.rmtree(models)
    assert main(["restore", "--models", str(models), "--store", url]) == 0
    (found,) = json.loads(capsys.readouterr().out)["restored"]
    assert (found["model"], found["backup"], found["sequence"]) == ("books", first["backup"], 2)
    assert journal(models).since(0, 9) == before
    content = (models / "books" / "live.db").read_bytes()
    assert main(["restore", "--models", str(models), "--store", url]) == 0
    assert (models / "books" / "live.db").read_bytes() == content
    appended(Journal(models / "books" / "live.db"), [put("y")])
    assert main(["restore", "--models", str(models), "--store", url]) == 1
    assert "--replace" in capsys.readouterr().err


def test_a_damaged_backup_does_not_keep_other_models_from_being_restored(
    models: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("alpha", "films"):
        shutil.copytree(models / "books", models / name)
    for name in ("alpha", "books", "films"):
        assert main(["backup", "--models", str(models), "--model", name, "--store", url]) == 0
    before = journal(models).since(0, 9)
    (damaged,) = (tmp_path / "store" / "backups" / "books").glob("*/live.db")
    good = damaged.read_bytes()
    damaged.write_bytes(good[:-1])
    shutil.rmtree(models)
    capsys.readouterr()
    assert main(["restore", "--models", str(models), "--store", url]) == 1
    outcome = capsys.readouterr()
    assert ([each["model"] for each in json.loads(outcome.out)["restored"]], "restore: books: " in outcome.err) == (
        ["alpha", "films"],
        True,
    )
    damaged.write_bytes(good)
    assert main(["restore", "--models", str(models), "--store", url]) == 0
    assert [each["model"] for each in json.loads(capsys.readouterr().out)["restored"]] == ["alpha", "books", "films"]
    assert journal(models).since(0, 9) == before


def test_the_setting_names_the_store_where_no_option_does(
    models: Path, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPALIER_BACKUP", url)
    monkeypatch.setenv("ESPALIER_BACKUP_KEEP", "1")
    run(models, capsys, "backup")
    appended(Journal(models / "books" / "live.db"), [put("y")])
    second = run(models, capsys, "backup")
    assert find_backups(Objects(url), "books") == [second["backup"]]
    (found,) = run(models, capsys, "restore", "--replace", "--at", datetime.now(UTC).isoformat())["restored"]
    assert found["sequence"] == 3


def test_an_erasure_with_a_store_leaves_one_backup_which_lacks_the_events(
    models: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(models, capsys, "backup", "--store", url)
    found = run(models, capsys, "erase-user", "--user", "u1", "--store", url)
    assert (found["items"], found["deleted"]) == (["x"], [first["backup"]])
    again = run(models, capsys, "erase-user", "--user", "u1", "--store", url)  # nothing is left of it
    assert (again["items"], again["deleted"]) == ([], [found["backup"]])
    (backup,) = find_backups(Objects(url), "books")
    copy = Journal(tmp_path / "store" / "backups" / "books" / backup / "live.db", "read")
    assert [operation.body.users for operation in copy.since(0, 9)] == [(), ("u2",)]
    assert all(b"u1" not in file.read_bytes() for file in (tmp_path / "store").rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compact", "--model", "films"], "films"),
        (["compact", "--model", "empty"], "nothing was ever put"),
        (["compact", "--model", "books", "--keep-from", str(2**70)], f"--keep-from: got {2**70}, expected a sequence number from 0 to"),
        (["compact", "--model", "books", "--keep-from", "-1"], "--keep-from: got -1, expected a sequence number from 0 to"),
        (["backup", "--model", "books", "--to", "."], "not there yet"),
        (["backup", "--model", "books", "--to", "/proc/no/copy.db"], "got '/proc/no/copy.db', expected a file in a folder that is there"),
        (["backup", "--model", "books", "--to", "/proc/copy.db"], "backup: proc/copy.db: "),
        (["backup", "--model", "books"], "--store is missing; expected the URL of a store, or ESPALIER_BACKUP set, or --to"),
        (["backup", "--model", "books", "--store", "ftp://a"], "expected s3://BUCKET/PATH"),
        (["backup", "--model", "empty", "--store", "file://{0}/new"], "a model with a live.db, a serving.json or a removed.json"),
        (["erase-user", "--model", "books", "--user", "u", "--store", "ftp://a"], "expected s3://BUCKET/PATH"),
        (["restore"], "--store is missing; expected the URL of a store, or ESPALIER_BACKUP set"),
        (["restore", "--store", "file:///no/such/folder"], "no such folder"),
        (["restore", "--store", "file://{0}"], "no backups"),
        (["restore", "--store", "file://{0}", "--model", "films"], "no backup of 'films'"),
        (["restore", "--store", "file://{0}", "--model", "../films"], "--model: got '../films', expected the name of a model"),
        (["restore", "--store", "file://{0}", "--at", "yesterday"], "--at: got 'yesterday', expected a time with its offset"),
        (["restore", "--store", "file://{0}", "--at", "2027-01-31T12:00:00"], "expected a time with its offset"),
        (["restore", "--store", "file://{0}", "--at", "0001-01-01T00:00:00+14:00"], "in the years 1 to 9999 of UTC"),
    ],
)
def test_what_cannot_be_done_is_said(models: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    (models / "empty").mkdir()
    assert main([*(argument.format(models) for argument in arguments), "--models", str(models)]) == 1
    found = capsys.readouterr()
    assert message in found.err
    assert not found.out


def test_a_damaged_journal_is_named_and_left_alone(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (models / "books" / "live.db").write_bytes(b"no database")
    assert main(["compact", "--models", str(models), "--model", "books"]) == 1
    assert "books/live.db" in capsys.readouterr().err
