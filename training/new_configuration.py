"""A first configuration for a log (`espalier new LOG`): reads the log's first rows and writes a TOML file that trains on it.

Comments in the file list every decision and its reason.
"""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from espalier.errors import MISSING, InvalidConfig, InvalidData
from espalier.logs.log_columns import EPOCHS, LAST_MICROSECOND, MOST_BAD, Column, check_unit
from espalier.logs.log_layout import POSITIONS, Layout, look
from espalier.logs.log_values import MICROSECONDS, BadRows, BadRowsPolicy
from espalier.logs.text_files import separator_of
from espalier.wording import option

from .data.interactions import Interactions, lists_ascend, read_interactions
from .neighbours.cooccurrence import LONGEST, lists_of
from .specification.linear import LogData
from .specification.log_format import LOG_FORMAT, TextTable
from .specification.models import LINEAR_KINDS, SPECIFICATION

if TYPE_CHECKING:
    import polars as pl

MOST_IN_WINDOW = 200
MANY_REPEATS = 0.2
"""If at least this share of the events is of items that the user had before, as in logs of songs, to find these is part of the task."""


def write_configuration(log: Path, out: Path | None, force: bool, kind: str | None, column_options: Mapping[str, str | None]) -> Path:
    """Write the configuration for a log and return its path. The whole log is read, so that its errors come up now.

    out             the file; by default in the current folder, named after the log
    force           overwrite an existing file
    kind            kind of model; None: chosen by the log
    column_options  as in Layout
    Raises InvalidConfig, and InvalidData, which names the columns and the option, if the log leaves the choice open.
    """
    name = re.sub(r"[^a-z0-9._-]+", "-", log.name.lower().partition(".")[0]).strip("._-")[:64] or "model"
    out = Path(f"{name}.toml") if out is None else out
    _check_out(out, log, force)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".new-") as scratch:
        layout = look(log, column_options, Path(scratch))
        if layout.values and not any(map(len, layout.values.values())):
            raise InvalidData(log.name, "no rows", "events")
        query = layout.column("query", is_needed=kind in LINEAR_KINDS) if kind in (None, *LINEAR_KINDS) else None
        if query is None:
            kind, body = _histories(layout, kind, Path(scratch))
        elif kind is None and column_options["query"] is None and layout.column("user", is_needed=False) is not None:
            raise InvalidConfig(
                option("kind"), MISSING, f"xr-linear for texts, or otm-sequence for lists of users, since {log.name} has both"
            )
        else:
            kind, body = kind or "xr-linear", _texts(layout, query)
    lines = [f"# Written by `espalier new`; `espalier options {kind}` lists all keys. It is trained by"]
    lines += [f"#     espalier fit --config {out} --out models/{name}/1", "# What was found:"]
    lines += [*(f"# - {words}" for words in layout.notes), f'kind = "{kind}"', f'name = "{name}"', "", "[data]", *body, ""]
    SPECIFICATION.checked(tomllib.loads("\n".join(lines)))
    out.write_text("\n".join(lines))
    return out


def _check_out(out: Path, log: Path, force: bool) -> None:
    if not str(out).isprintable():
        raise InvalidConfig("--out", str(out), "a name without control characters")
    if not out.absolute().parent.is_dir():
        raise InvalidConfig("--out", str(out), "a file in a folder that exists")
    if out.exists() and log.exists() and out.samefile(log):
        raise InvalidConfig("--out", str(out), "another file than the log")
    if out.is_dir() or (out.exists() and not force):
        raise InvalidConfig("--out", str(out), "a file that does not exist yet, or --force to write over it")


def _texts(layout: Layout, query: Column) -> list[str]:
    from .data.query_logs import read_log  # needs polars

    item = layout.column("item")
    layout.say_unused([query, item])
    form = {key: value for key, value in layout.form.items() if key in TextTable.model_fields}
    if form.get("separator") == separator_of(layout.log):
        del form["separator"]

    def read(policy: BadRowsPolicy) -> tuple[pl.DataFrame, Mapping[str, int]]:
        bad_rows = BadRows(policy, LogData.SECTION)
        table = TextTable.model_validate(form | {"bad_rows": policy})
        return read_log(layout.log, str(query), str(item), {}, table, bad_rows), bad_rows.counts

    frame, bad_rows = read("skip")
    if _are_many(bad_rows, len(frame)):
        frame, bad_rows = read("refuse")
    form |= layout.bad_rows(bad_rows, "data")
    layout.notes.append(f"{len(frame):,} rows, {frame['query'].n_unique():,} texts, {frame['item'].n_unique():,} items")
    lines = ['format = "log"', f"train = {_toml(str(layout.log))}", f"query = {_toml(query)}", f"item = {_toml(item)}"]
    return [*lines, *(f"{key} = {_toml(value)}" for key, value in form.items())]


def _histories(layout: Layout, kind: str | None, scratch: Path) -> tuple[str, list[str]]:
    """The kind, and the lines of the configuration from `data` on."""
    form = layout.form | ({"order": "none"} if layout.column_options["time"] == "none" else {})
    if layout.values:
        form |= {role: layout.column(role) for role in POSITIONS}
        form |= layout.time([form[role] for role in POSITIONS])
        layout.say_unused([form[role] for role in (*POSITIONS, "timestamp") if role in form])
    interactions = _checked_events(layout, form | {"min_user_events": 1}, scratch)
    if interactions.order == "file" and layout.column_options["time"] != "file":
        if lists_ascend(interactions):
            form["order"], interactions = "none", replace(interactions, order="none")
            layout.notes.append("events are sorted by item id, so their order says nothing: items have no order. --time file keeps it")
        else:
            layout.notes.append("events count as in order of the file. If they have no order, say --time none")
    form |= layout.bad_rows(interactions.bad_rows, "data.format")
    length_U = np.diff(interactions.offset_U1)
    if 2 * length_U[length_U > 1].sum() < length_U.sum():
        lone_users = f"{np.count_nonzero(length_U == 1):,} of {interactions.user_count:,} with one event only"
        expected = "users with 2 events or more, who have half of all events: a model learns what follows in a user's list"
        other_column = f"if another column names the users, say so with {option('user', 'NAME')}"
        raise InvalidData(f"{layout.log.name}: users", lone_users, f"{expected}; {other_column}")
    layout.notes.append(f"{interactions.user_count:,} users, {interactions.item_count:,} items, {interactions.event_count:,} events")
    format_text = ", ".join(f"{key} = {_toml(value)}" for key, value in form.items())
    lines = [f"log = {_toml(str(layout.log))}", f"format = {{ {format_text} }}"]
    if interactions.order == "none" and kind not in (None, "otm-sequence", "neighbours"):
        window = int(np.clip(np.quantile(length_U, 0.95), 1, MOST_IN_WINDOW))
        more = [f"windows = [{window}] # lists have no order: one window, as long as 95 of 100 lists", "targets = 20"]
        lines += ["", "[instances]", *more]
    return kind or "otm-sequence", [*lines, *_repeats(layout, interactions)]


def _repeats(layout: Layout, interactions: Interactions) -> list[str]:
    """The lines that let items of the history be answers, if many events are of such items."""
    events = np.minimum(np.diff(interactions.offset_U1), LONGEST).sum()
    distinct = lists_of(interactions, np.arange(interactions.user_count), distinct=True).length_U.sum()
    repeats = events - distinct
    if repeats < MANY_REPEATS * events:
        return []
    layout.notes.append(f"{repeats / events:.0%} of the events are of an item that the user had before: such items count as answers")
    return ["", "[search]", "exclude_seen = false # true: choose and measure without items of the history"]


def _checked_events(layout: Layout, form: dict[str, object], scratch: Path) -> Interactions:
    """The log's events. Raises InvalidData for times in several units, and the first error if many rows cannot be read."""

    def read(**changes: object) -> Interactions:
        return read_interactions(layout.log, LOG_FORMAT.checked(form | changes), scratch)

    unit = next((unit for unit in EPOCHS if unit == form.get("timestamp_type")), None)
    log = read(bad_rows="skip") if unit is None else read(bad_rows="skip", timestamp_type="float")  # all numbers: also of another unit
    if log.time_of_event_E is not None and form["timestamp_type"] != "datetime":
        check_unit(f"{layout.log.name}: column {form['timestamp']!r}", log.time_of_event_E)
    if unit is not None and log.time_of_event_E is not None:
        last = LAST_MICROSECOND / MICROSECONDS[unit]
        if max(-log.time_of_event_E.min(), log.time_of_event_E.max()) >= last:
            log = read(bad_rows="skip")
    return read() if _are_many(log.bad_rows, log.event_count) else log


def _are_many(bad_rows: Mapping[str, int], read_rows: int) -> bool:
    """Whether more rows are unreadable than damage explains."""
    return sum(bad_rows.values()) > MOST_BAD * (sum(bad_rows.values()) + read_rows)


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
