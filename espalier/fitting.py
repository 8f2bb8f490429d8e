"""`espalier.fit`: a data frame in, a trained model out, by the same trainer and defaults as the command `espalier fit`.

The trainer is imported only when a model is fitted: a service need not have it installed. Knows frames and the keys of a configuration.
Does not know how models are trained.
"""

from __future__ import annotations

import importlib
import math
import time as clock
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.bundle import Bundle
from espalier.errors import InvalidInput, MissingExtra
from espalier.frames import as_file, frame_like
from espalier.model import Model, owned_folder
from espalier.search import Device, check_device
from espalier.siblings import sibling
from espalier.wording import in_python


@in_python()
def fit(
    log: Any = None,
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
    device: Device = "auto",
    **options: Any,
) -> Model:
    """Train a model on a log, one interaction a row, or one query text with the item that it led to; or on items that are searched by text.

    log      a data frame of pandas or polars, a table of Arrow, or the path of a file that `espalier new` reads; None: `items` alone
    user, item, time, query  its columns: `user` and `item` of histories, `query` and `item` of texts. Without `time` the rows are in order;
             "none": they have no order
    items    table of the items: ids, in the column `item` or `id`, and columns to filter by and to show. Texts are searched, unless the
             log has users
    kind     kind of model; the default suits the log (`espalier options` lists the kinds)
    minutes  no training step begins later than this from now. The model is then not trained again with the validation events. Without
             `minutes`, it is, and takes the configured number of steps. Kinds without training steps ignore `minutes`
    out      models/NAME/VERSION to write; the default is a temporary folder that is deleted with the model (`Model.save` keeps it)
    device   where to train
    options  keys of the configuration, as `espalier options KIND` lists them: refit=False, optimiser={"steps": 500},
             data={"split": {"kind": "last"}}
    Raises InvalidInput, InvalidData or InvalidConfig, which name the wrong value, and MissingExtra if the trainer is not installed.
    """
    if minutes is not None and not (isinstance(minutes, int | float) and 0 < minutes < math.inf):
        raise InvalidInput("minutes", minutes, "a finite number above 0")
    columns = {"user": user, "item": item, "time": time, "query": query}
    for field, name in columns.items():
        if not isinstance(name, str | None):
            raise InvalidInput(field, name, "the name of a column, a string")
    if user is not None and query is not None:
        raise InvalidInput("user, query", f"{user!r} and {query!r}", "one of them: histories have users, logs of texts have queries")
    check_device(device)
    with owned_folder() as folder:
        if out is None:
            version_folder = folder / "models" / str(options.get("name", "model")) / "1"
        else:
            version_folder, name = Path(out), trainer("versions").new_version(Path(out))
            if options.get("name", name) != name:
                raise InvalidInput("name", options["name"], f"{name!r}, as in out, or none")
        log_file = None if log is None else as_file("log", log, folder)
        items_file = None if items is None else as_file("items", items, folder, "items")  # named so in messages
        log_columns = columns | {"time": time or ("file" if user is not None else None)}
        file = trainer("new_configuration").write_configuration(log_file, folder / "model.toml", True, kind, log_columns, items_file)
        raw = tomllib.loads(file.read_text()) | {"seed": seed}
        for name, keys in options.items():
            raw[name] = raw.get(name, {}) | dict(keys) if isinstance(keys, Mapping) else keys
        config = trainer("specification.models").SPECIFICATION.checked(raw)
        model = Model(_trained(config, version_folder, device, minutes), frame=frame_like(items if log is None else log))
        model.owns(folder)
        return model


def trainer(module: str) -> Any:
    """A module of the trainer. Raises MissingExtra if it, or a package that it needs, is not installed."""
    return needed(f"{sibling('training')}.{module}")


def needed(module: str) -> Any:
    """A module of the extra `train`. Raises MissingExtra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise MissingExtra(f"training needs {missing.name}: pip install 'espalier[train]'") from missing


def _trained(config: Any, out: Path, device: Device, minutes: float | None) -> Bundle:
    config = config.model_copy(update={"name": out.absolute().parent.name})
    if isinstance(config, trainer("specification.linear").LinearConfig):
        linear: Bundle = trainer("linear.run").fit_version(config, out, device=device)
        return linear
    deadline = trainer("retrieval.task").Deadline(None if minutes is None else clock.monotonic() + 60 * minutes)
    run, device_of = trainer("deep.run"), trainer("deep.fit").pick_device
    bundle: Bundle = run.fit_and_export(config, None, out, device_of(device), False, deadline=deadline)
    return bundle
