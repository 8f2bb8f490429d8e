"""How benchmarks find their logs: named sets, any other log, and what is said when one is not there."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import real_logs

OUTSIDE = {name: file for name, (_, file) in real_logs.SETS.items() if file is not None}


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    real_logs.add_arguments(parser)
    return parser.parse_args(arguments)


def folder_of_sets(folder: Path) -> str:
    for name, file in OUTSIDE.items():
        (folder / name).mkdir()
        (folder / name / file).touch()
    return str(folder)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_named_set_has_its_configuration_and_its_file(tmp_path: Path, name: str) -> None:
    real = real_logs.load(options("--data", folder_of_sets(tmp_path), "--set", name))
    assert (real.name, real.log.parent, real.log.name) == (name, tmp_path / name, real.config.data.log.name)


def test_the_embedded_sample_needs_no_folder() -> None:
    real = real_logs.load(options("--set", "debian-depends"))
    assert real.log.is_file()


def test_several_sets_keep_their_order(tmp_path: Path) -> None:
    found = real_logs.load_all(options("--data", folder_of_sets(tmp_path), "--set", "s3rec-yelp,ml-1m"))
    assert [real.name for real in found] == ["s3rec-yelp", "ml-1m"]


def test_another_log_is_read_as_its_configuration_says_or_by_default(tmp_path: Path) -> None:
    log, config = tmp_path / "clicks.csv", tmp_path / "books.toml"
    log.touch()
    data = 'log = "elsewhere.csv"\nformat = { user = "reader", item = "book" }\n'
    config.write_text(f'kind = "otm-sequence"\nname = "books"\n[data]\n{data}')
    real = real_logs.load(options("--log", str(log), "--config", str(config)))
    assert (real.name, real.log, real.config.data.format.model_dump()["user"]) == ("books", log, "reader")
    real = real_logs.load(options("--log", str(log)))
    assert (real.name, real.log, real.config.data.format.model_dump()["user"]) == ("log", log, "user")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--set: got None, expected one of debian-depends, ml-1m, sasrec-amazon-games, s3rec-yelp"),
        ("--data . --set netflix", "--set: got 'netflix', expected one of"),
        ("--data . --set ml-1m,s3rec-yelp", "--set: got 'ml-1m,s3rec-yelp', expected one name"),
        ("--set ml-1m", "--data: got None, expected a folder that holds ml-1m/ratings.dat.gz"),
        ("--data nowhere --set ml-1m", "--data: got 'nowhere', expected a folder"),
        ("--data s3rec-yelp --set s3rec-yelp", "expected a folder that holds s3rec-yelp/Yelp.txt.gz, which is missing"),
        ("--log nothing.csv", "--log: got 'nothing.csv', expected a file that exists"),
        ("--log ml-1m/ratings.dat.gz --set ml-1m", "expected no --data and --set beside it"),
        ("--log ml-1m/ratings.dat.gz --config nothing.toml", "--config: got 'nothing.toml', expected a TOML file that exists"),
        ("--config some.toml --set ml-1m", "--config: got 'some.toml', expected --log FILE with it"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str) -> None:
    folder_of_sets(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        real_logs.load(options(*arguments.split()))
    assert message in str(ended.value)
