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


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """A folder of all named sets, with empty files."""
    for name, file in OUTSIDE.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    return tmp_path


def test_named_sets_have_their_configurations_and_files_in_the_order_they_are_named(sets: Path) -> None:
    found = real_logs.load_all(options("--data", str(sets), "--set", ",".join(OUTSIDE)))
    assert [real.name for real in found] == list(OUTSIDE)
    assert all(real.log == sets / real.name / real.config.data.log.name for real in found)
    assert real_logs.load(options("--set", "debian-depends")).log.is_file()


def test_another_log_is_read_as_its_configuration_says_or_by_default(tmp_path: Path) -> None:
    log, config = tmp_path / "clicks.csv", tmp_path / "books.toml"
    log.touch()
    data = 'log = "elsewhere.csv"\nformat = { user = "reader", item = "book" }\n'
    config.write_text(f'kind = "otm-sequence"\nname = "books"\n[data]\n{data}')
    for more, name, user in ((["--config", str(config)], "books", "reader"), ([], "log", "user")):
        real = real_logs.load(options("--log", str(log), *more))
        assert (real.name, real.log, real.config.data.format.model_dump()["user"]) == (name, log, user)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--set: got None, expected one of debian-depends, ml-1m, sasrec-amazon-games, s3rec-yelp"),
        ("--data . --set ml-1m,s3rec-yelp", "--set: got 'ml-1m,s3rec-yelp', expected one name"),
        ("--set ml-1m", "--data: got None, expected a folder that holds ml-1m/ratings.dat.gz"),
        ("--data s3rec-yelp --set s3rec-yelp", "expected a folder that holds s3rec-yelp/Yelp.txt.gz, which is missing"),
        ("--log nothing.csv", "--log: got 'nothing.csv', expected a file that exists"),
        ("--log ml-1m/ratings.dat.gz --set ml-1m", "expected no --data and --set beside it"),
        ("--log ml-1m/ratings.dat.gz --config nothing.toml", "--config: got 'nothing.toml', expected a TOML file that exists"),
    ],
)
def test_what_is_missing_is_named(sets: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str) -> None:
    monkeypatch.chdir(sets)
    with pytest.raises(SystemExit) as ended:
        real_logs.load(options(*arguments.split()))
    assert message in str(ended.value)
