"""The real logs that benchmarks run on: named sets, or any other log with a configuration.

Knows names, files and command-line options. Does not know methods: a benchmark replaces the objective of the configuration as it needs.

    real_logs.add_arguments(parser)
    options = parser.parse_args()
    real = real_logs.load(options)          # one log; load_all takes --set NAME,NAME,…
    prepare(real.config, real.log, work)
"""

from __future__ import annotations

import argparse
import gzip
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from espalier.errors import InvalidConfig
from training.specification.deep import DeepConfig
from training.specification.models import deep_config, read_deep_config

CONFIGS = Path(__file__).parent.parent / "training" / "configs"
SETS: dict[str, tuple[str, str | None]] = {
    "debian-depends": ("debian-depends.toml", None),
    "ml-1m": ("ml-1m.toml", "ratings.dat.gz"),
    "sasrec-amazon-games": ("amazon-games.toml", "Video.txt.gz"),
    "s3rec-yelp": ("yelp.toml", "Yelp.txt.gz"),
    "ml-1m-sasrec": ("ml-1m-sasrec.toml", "ml-1m.txt.gz"),
}
"""Name of a set → its file in training/configs, and the log inside DIR/NAME; None: the embedded sample, which needs no DIR."""


@dataclass(frozen=True)
class RealLog:
    """`name` is the set's, or that of the configuration; `log` takes the place of `config.data.log`."""

    name: str
    config: DeepConfig
    log: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--data DIR --set NAME`, or `--log FILE [--config FILE]`."""
    group = parser.add_argument_group("log", "either --data and --set, or --log")
    group.add_argument("--data", type=Path, metavar="DIR", help="folder in which DIR/NAME holds a set")
    group.add_argument("--set", metavar="NAME", help=", ".join(SETS))
    group.add_argument("--log", type=Path, metavar="FILE", help="any other log")
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="its configuration (default: that of a CSV file with columns user, item)"
    )


def load(options: argparse.Namespace) -> RealLog:
    """The one log that the options name. Ends the program with what was expected where they name none or several, or a file is missing."""
    logs = load_all(options)
    if len(logs) > 1:
        raise SystemExit(f"error: {InvalidConfig('--set', options.set, 'one name')}")
    return logs[0]


def load_all(options: argparse.Namespace) -> tuple[RealLog, ...]:
    """The logs that the options name, at least one: `--set` may be several names, comma-separated. Ends the program as `load` does."""
    try:
        if options.log is not None:
            return (_other(options),)
        if options.config is not None:
            raise InvalidConfig("--config", str(options.config), "--log FILE with it; the sets have their own configurations")
        if options.set is None:
            raise InvalidConfig("--set", None, f"one of {', '.join(SETS)} (with --data DIR), or --log FILE instead")
        return tuple(_named(options.data, name) for name in options.set.split(","))
    except InvalidConfig as error:
        raise SystemExit(f"error: {error}") from None


def _other(options: argparse.Namespace) -> RealLog:
    if options.set is not None or options.data is not None:
        raise InvalidConfig("--log", str(options.log), "no --data and --set beside it")
    if not options.log.is_file():
        raise InvalidConfig("--log", str(options.log), "a file that exists")
    recipe = {"kind": "otm-sequence", "name": "log", "data": {"log": options.log}}
    config = deep_config(recipe) if options.config is None else read_deep_config(options.config)
    return RealLog(config.name, config, options.log)


def _named(folder: Path | None, name: str) -> RealLog:
    if name not in SETS:
        raise InvalidConfig("--set", name, f"one of {', '.join(SETS)}")
    config, file = SETS[name]
    if file is None:
        sample = read_deep_config(CONFIGS / config)
        return RealLog(name, sample, CONFIGS.parent.parent / sample.data.log)
    if folder is None or not folder.is_dir():
        raise InvalidConfig("--data", None if folder is None else str(folder), f"a folder that holds {name}/{file}")
    if not (folder / name / file).is_file():
        raise InvalidConfig("--data", str(folder), f"a folder that holds {name}/{file}, which is missing")
    return RealLog(name, read_deep_config(CONFIGS / config), folder / name / file)


def movies(folder: Path, out: Path) -> Path:
    """The item table of MovieLens 1M, written to `out` as Parquet: title, with the year, and genres. Raises InvalidConfig."""
    file = folder / "movies.dat.gz"
    if not file.is_file():
        raise InvalidConfig("--data", str(folder), "a folder that holds ml-1m/movies.dat.gz")
    with gzip.open(file, "rt", encoding="latin-1") as lines:
        rows = [line.rstrip("\n").split("::") for line in lines]
    table = {"id": [row[0] for row in rows], "title": [row[1] for row in rows], "genres": [row[2].split("|") for row in rows]}
    pq.write_table(pa.table(table), out)
    return out
