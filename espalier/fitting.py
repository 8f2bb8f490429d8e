"""`espalier.fit`: a data frame in, a trained model out, by the same trainer and defaults as the command `espalier fit`.

The trainer is imported only when a model is fitted: a service need not have it installed. Knows frames and the keys of a configuration.
Does not know how models are trained.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
import shutil
import tempfile
import time as clock
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from espalier.bundle import Bundle
from espalier.errors import InvalidInput, MissingExtra
from espalier.frames import as_table, column_of, frame_like, ids_of
from espalier.model import Model
from espalier.siblings import sibling

FRAME, GROUP = "data frame", 1 << 20
"""The file of a data frame, named as messages about it name it, and its rows in a row group."""
IN_PYTHON = {
    r'; data(\.format)?\.bad_rows = "skip" leaves such rows out': "; or leave such rows out (pandas: dropna, polars: drop_nulls)",
    "; the other keys do not fit the file": ": name other columns, or leave such rows out",
    r', or data\.format\.timestamp_type = "\w+"( for dates and times as ISO 8601)?,': " as in the first rows",
    ", or write time_format": ", or make them dates, as `pandas.to_datetime` does",
    r"--(\w+) (file|none|\d+)\b": r'\1="\2"',
    r"--(\w+)": r"\1=",
}
"""Words of the trainer about options and keys of a configuration, as patterns → what a caller of `fit` writes instead."""


def fit(
    data: Any,
    *,
    user: str | None = None,
    item: str | None = None,
    time: str | None = None,
    query: str | None = None,
    items: Any = None,
    kind: str | None = None,
    minutes: float | None = None,
    out: Path | str | None = None,
    seed: int = 1,
    device: str = "auto",
    **options: Any,
) -> Model:
    """Train a model on a log, one interaction a row, or one query text with the item that it led to.

    data     a data frame of pandas or polars, a table of Arrow, or the path of a file that `espalier new` reads
    user, item, time, query  its columns: `user` and `item` of histories, `query` and `item` of texts. Without `time` the rows are in order;
             "none": they have no order
    items    columns of the items, `id` among them, to filter by and to show
    kind     kind of model; the default suits the log (`espalier options` lists the kinds)
    minutes  no training step begins later than this from now. The model is then not trained again with the validation users. Without
             `minutes`, it is, and takes the configured number of steps. Kinds without training steps ignore `minutes`
    out      models/NAME/VERSION to write; the default is a temporary folder that is deleted with the model (`Model.save` keeps it)
    options  keys of the configuration, as `espalier options KIND` lists them: refit=False, optimiser={"steps": 500}
    Raises InvalidInput, InvalidData or InvalidConfig, which name the wrong value, and MissingExtra if the trainer is not installed.
    """
    if minutes is not None and not (isinstance(minutes, int | float) and 0 < minutes < math.inf):
        raise InvalidInput("minutes", minutes, "a finite number above 0")
    columns = {"user": user, "item": item, "time": time, "query": query}
    for field, name in columns.items():
        if not isinstance(name, str | None):
            raise InvalidInput(field, name, "the name of a column, a string")
    with scratch() as folder, _words_of_python():
        if out is not None:
            trainer("versions").new_version(Path(out))
        version_folder = folder / "model" / "1" if out is None else Path(out)
        log = Path(data) if isinstance(data, str | Path) else _written(folder, data, columns)
        log_columns = columns | {"time": time or ("file" if user is not None else None)}
        file = trainer("new_configuration").write_configuration(log, folder / "model.toml", True, kind, log_columns)
        raw = tomllib.loads(file.read_text()) | {"seed": seed}
        for name, keys in options.items():
            raw[name] = raw.get(name, {}) | dict(keys) if isinstance(keys, Mapping) else keys
        if items is not None:
            pq.write_table(as_table("items", items, ("id",)), folder / "items.parquet")
            raw["data"]["items"] = str(folder / "items.parquet")
        config = trainer("specification.models").SPECIFICATION.checked(raw)
        model = Model(_trained(config, version_folder, device, minutes), frame=frame_like(data))
        model.owns(folder)
        return model


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder for training. Deleted if the block raises; otherwise the caller owns it."""
    folder = Path(tempfile.mkdtemp(prefix="espalier-"))
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _written(folder: Path, data: Any, columns: Mapping[str, str | None]) -> Path:
    """Write a data frame to a file for the trainer. Raises InvalidInput if it lacks one of the columns."""
    table = as_table("data", data, (columns["user"], columns["item"]))
    for field, name in columns.items():
        if name is not None and (field, name) != ("time", "none"):
            (ids_of if field in ("user", "item") else column_of)(table, field, name)
    if not len(table):
        raise InvalidInput("data", "0 rows", "a row at least")
    pq.write_table(table, folder / FRAME, row_group_size=GROUP)
    return folder / FRAME


@contextmanager
def _words_of_python() -> Iterator[None]:
    """Raise and log what the trainer says of a log in the words of `fit`: rows of the frame, and arguments instead of options and keys."""

    def reworded(record: logging.LogRecord) -> bool:
        for value in record.args or ():
            if isinstance(value, InvalidInput):
                _reword(value)
        return True

    log: logging.Logger = trainer("data.log_values").log
    log.addFilter(reworded)
    try:
        yield
    except InvalidInput as error:
        _reword(error)
        raise
    finally:
        log.removeFilter(reworded)


def _reword(error: InvalidInput) -> None:
    def row(match: re.Match[str]) -> str:
        return f"{FRAME}: row {GROUP * (int(match[1] or 1) - 1) + int(match[2]) - 1} (from 0)"

    field = re.sub(rf"^{FRAME}: (?:row group (\d+), )?row (\d+)\b(?! \(from)", row, error.field)
    error.field = re.sub(r"^--|^data\.(?=items$)|(?<=^data)(\.format)?\.bad_rows$", "", field)
    for words, in_python in IN_PYTHON.items():
        error.expected = re.sub(words, in_python, error.expected)


def trainer(module: str) -> Any:
    """A module of the trainer. Raises MissingExtra if it, or a package that it needs, is not installed."""
    return needed(f"{sibling('training')}.{module}")


def needed(module: str) -> Any:
    """A module of the extra `train`. Raises MissingExtra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise MissingExtra(f"training needs {missing.name}: pip install 'espalier[train]'") from missing


def _trained(config: Any, out: Path, device: str, minutes: float | None) -> Bundle:
    config = config.model_copy(update={"name": out.absolute().parent.name})
    if isinstance(config, trainer("specification.linear").LinearConfig):
        linear: Bundle = trainer("linear.run").fit_version(config, out)
        return linear
    deadline = trainer("retrieval.task").Deadline(None if minutes is None else clock.monotonic() + 60 * minutes)
    run, device_of = trainer("deep.run"), trainer("deep.fit").pick_device
    bundle: Bundle = run.fit_and_export(config, None, out, device_of(device), False, deadline=deadline)
    return bundle
