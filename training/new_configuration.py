"""A first configuration for a log or a table of items (`espalier new`): reads first rows and writes a TOML file that trains on them.

Comments in the file list every decision and its reason.
"""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from espalier.errors import MISSING, EspalierError, InvalidConfig, InvalidData
from espalier.logs.log_columns import EPOCHS, LAST_MICROSECOND, MOST_BAD, NAMES, Column, check_unit, position_of, word_of
from espalier.logs.log_layout import POSITIONS, Layout, look
from espalier.logs.log_values import MICROSECONDS, BadRows, BadRowsPolicy, present
from espalier.logs.text_files import separator_of
from espalier.masks.filters import is_list
from espalier.wording import either, option

from .data.interactions import Interactions, lists_ascend, read_interactions
from .item_columns import ItemColumns, item_columns, read_with_or_without_quotes
from .neighbours.cooccurrence import LONGEST, lists_of
from .specification.linear import LogData
from .specification.log_format import LOG_FORMAT, TextTable
from .specification.models import LINEAR_KINDS, SPECIFICATION

if TYPE_CHECKING:
    import polars as pl

MOST_IN_WINDOW = 200
VECTOR_KIND = "otm-robust"
WEIGHT_NAMES = {"weight", "count", "times", "clicked", "clicks", "ordered", "orders", "bought", "purchased", "purchases", "conversions"}
MANY_REPEATS = 0.2
"""If at least this share of the events is of items that the user had before, as in logs of songs, to find these is part of the task."""
ALIKE = 0.9
"""If at least this share of a user's events at one time are of one item, events were written twice."""


def write_configuration(
    log: Path | None, out: Path | None, force: bool, kind: str | None, column_options: Mapping[str, str | None], items: Path | None = None
) -> Path:
    """Write the configuration for a log, or for a table of items that are searched by their texts, and return its path.

    The files are read to their ends, so that their errors come up now.

    log             None: there is none, but `items`
    out             the file; by default in the current folder, named after the log
    force           overwrite an existing file
    kind            kind of model; None: chosen by the log
    column_options  as in Layout
    items           table of the items, or None
    Raises InvalidConfig, and InvalidData, which names the columns and the option, if a file leaves the choice open.
    """
    given = log or items
    if given is None:
        raise InvalidConfig(either("LOG", "log"), MISSING, f"a log, or a table of items ({option('items')})")
    name = re.sub(r"[^a-z0-9._-]+", "-", given.name.lower().partition(".")[0]).strip("._-")[:64] or "model"
    out = Path(f"{name}.toml") if out is None else out
    _check_out(out, [file for file in (log, items) if file is not None], force)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".new-") as folder:
        found = (
            _of_items(given, kind, column_options, Path(folder)) if log is None else _of_log(log, kind, column_options, items, Path(folder))
        )
    lines = [f"# Written by `espalier new`; `espalier options {found.kind}` lists all keys. It is trained by"]
    lines += [f"#     espalier fit --config {out} --out models/{name}/1", "# What was found:"]
    lines += [*(f"# - {words}" for words in found.notes), f'kind = "{found.kind}"', f'name = "{name}"', "", "[data]", *found.lines, ""]
    SPECIFICATION.checked(tomllib.loads("\n".join(lines)))
    out.write_text("\n".join(lines))
    return out


@dataclass(frozen=True)
class _Found:
    """The kind, the lines of the configuration from those of `data` on, and the decisions, in words."""

    kind: str
    lines: list[str]
    notes: list[str]


def _of_log(log: Path, kind: str | None, column_options: Mapping[str, str | None], items: Path | None, scratch: Path) -> _Found:
    def found(layout: Layout) -> _Found:
        if layout.values and not any(map(len, layout.values.values())):
            raise InvalidData(log.name, "no rows", "events")
        query = layout.column("query", is_needed=kind in LINEAR_KINDS) if kind in (None, *LINEAR_KINDS) else None
        if query is None:
            vector = _vector_column(layout) if kind in (None, VECTOR_KIND) else None
            return _histories(layout, kind, items, scratch) if vector is None else _vectors(layout, vector, items, scratch)
        if kind is None and column_options["query"] is None and layout.column("user", is_needed=False) is not None:
            expected = f"xr-linear for texts, or otm-sequence for lists of users, since {log.name} has both"
            raise InvalidConfig(option("kind"), MISSING, expected)
        return _texts(layout, query, kind or "xr-linear", items, scratch)

    try:
        return read_with_or_without_quotes(lambda quote: look(log, column_options, scratch, quote), found)
    except InvalidData as error:
        if items is None and not any(column_options.values()) and _is_of_items(log, scratch):
            expected = f"{error.expected}. If these are items to search by text, say so with {option('items', log.name)}"
            raise InvalidData(error.field, error.value, expected) from error
        raise


def _is_of_items(file: Path, scratch: Path) -> bool:
    """Whether a file seems to be a table of items."""
    try:
        return bool(item_columns(file, None, None, True, scratch).searched)
    except EspalierError:
        return False


def _of_items(file: Path, kind: str | None, column_options: Mapping[str, str | None], scratch: Path) -> _Found:
    """Of a table without a log. Raises InvalidConfig, and InvalidData if no column has words."""
    for role, value in column_options.items():
        if value is not None and role != "item":
            raise InvalidConfig(option(role), value, "nothing without a log")
    if kind not in (None, *LINEAR_KINDS):
        raise InvalidConfig(option("kind"), kind, f"one of {', '.join(LINEAR_KINDS)} without a log")
    item = column_options["item"]
    columns = item_columns(file, item, None, True, scratch)
    if item is not None and position_of([columns.items_id], item) is None:
        raise InvalidConfig(option("item"), item, f"a column of {file.name}")
    if not columns.searched:
        raise InvalidData(file.name, "no column of words", "texts to search")
    return _Found(kind or "xr-linear", ['format = "log"', *_items_lines(file, columns)], columns.notes)


def _items_lines(file: Path, columns: ItemColumns) -> list[str]:
    lines = [f"items = {_toml(str(file))}"]
    if columns.items_id.casefold() != "id":
        lines.append(f"items_id = {_toml(columns.items_id)}")
    if columns.form:
        lines.append(f"items_format = {_inline(columns.form)}")
    if columns.searched:
        lines.append(f"own_texts = {_toml(columns.searched)}")
    return lines


def _check_out(out: Path, inputs: Sequence[Path], force: bool) -> None:
    if not str(out).isprintable():
        raise InvalidConfig("--out", str(out), "a name without control characters")
    if not out.absolute().parent.is_dir():
        raise InvalidConfig("--out", str(out), "a file in a folder that exists")
    if out.exists() and any(file.exists() and out.samefile(file) for file in inputs):
        raise InvalidConfig("--out", str(out), "another file than the log and the items")
    if out.is_dir() or (out.exists() and not force):
        raise InvalidConfig("--out", str(out), "a file that does not exist yet, or --force to write over it")


def _vector_column(layout: Layout) -> Column | None:
    """The only column of lists of floats, of a log without users; else None."""
    if layout.column_options["user"] is not None or any(word_of(name) in NAMES["user"] for name in layout.values):
        return None
    columns = [name for name, values in layout.values.items() if is_list(values.type) and pa.types.is_floating(values.type.value_type)]
    return columns[0] if len(columns) == 1 else None


def _vectors(layout: Layout, vector: Column, items: Path | None, scratch: Path) -> _Found:
    """Of a log of query vectors. Their items are in the column of the option, of a usual name, or else the only other one."""
    others = [name for name in layout.values if name != vector]
    item = others[0] if len(others) == 1 else layout.column("item")
    layout.notes.append(f"vectors: column {vector!r}, by its values; their items: column {item!r}")
    layout.say_unused([vector, item])
    form = {"format": "vectors", "vector": vector, "items": item}
    interactions = read_interactions(layout.log, LOG_FORMAT.checked(form), scratch)
    layout.notes.append(f"{interactions.user_count:,} vectors, {interactions.item_count:,} items, {interactions.event_count:,} pairs")
    lines = [f"log = {_toml(str(layout.log))}", f"format = {_inline(form)}"]
    if items is not None:
        columns = item_columns(items, str(item), interactions.item_ids, False, scratch)
        layout.notes.extend(columns.notes)
        lines += _items_lines(items, columns)
    return _Found(VECTOR_KIND, lines, layout.notes)


def _weight_column(layout: Layout) -> Column | None:
    """The only column that is named as one of weights, if its numbers can be weights."""
    names = [name for name in layout.values if word_of(name) in WEIGHT_NAMES]
    if len(names) != 1:
        return None
    try:
        numbers = present(layout.values[names[0]]).cast(pa.float64())
    except pa.ArrowException:
        return None
    return names[0] if len(numbers) and pc.min(numbers).as_py() >= 0 else None


class _QueryLog(TextTable):
    SECTION = LogData.SECTION


def _texts(layout: Layout, query: Column, kind: str, items: Path | None, scratch: Path) -> _Found:
    from .data.query_logs import read_log  # needs polars

    queries = [str(value) for value in present(layout.values[query]).to_pylist()]
    if layout.column_options["query"] is None and not any(map(str.isalpha, "".join(queries))):
        expected = f"texts, or lists of users: say which with {option('query', 'NAME')} or {option('user', 'NAME')}"
        raise InvalidData(f"{layout.log.name}: column {query!r}", next(iter(queries), MISSING), expected)
    item, weight = layout.column("item"), _weight_column(layout)
    layout.say_unused([query, item, weight])
    form = {key: value for key, value in layout.form.items() if key in TextTable.model_fields}
    if form.get("separator") == separator_of(layout.log):
        del form["separator"]

    def read(policy: BadRowsPolicy) -> tuple[pl.DataFrame, Mapping[str, int]]:
        bad_rows = BadRows(policy, LogData.SECTION)
        table = _QueryLog.model_validate(form | {"bad_rows": policy})
        numbers = {} if weight is None else {"weight": str(weight)}
        return read_log(layout.log, str(query), str(item), numbers, table, bad_rows), bad_rows.counts

    frame, bad_rows = read("skip")
    if _are_many(bad_rows, len(frame)):
        frame, bad_rows = read("refuse")
    form |= layout.bad_rows(bad_rows, "data")
    layout.notes.append(f"{len(frame):,} rows, {frame['query'].n_unique():,} texts, {frame['item'].n_unique():,} items")
    lines = ['format = "log"', f"train = {_toml(str(layout.log))}", f"query = {_toml(query)}", f"item = {_toml(item)}"]
    if weight is not None:
        layout.notes.append(f"weight: column {weight!r}, by its name; rows of weight 0 teach nothing")
        lines.append(f"weight = {_toml(weight)}")
    lines += [f"{key} = {_toml(value)}" for key, value in form.items()]
    if items is None:
        return _Found(kind, lines, layout.notes)
    columns = item_columns(items, str(item), None, True, scratch)
    return _Found(kind, [*lines, *_items_lines(items, columns)], [*layout.notes, *columns.notes])


def _histories(layout: Layout, kind: str | None, items: Path | None, scratch: Path) -> _Found:
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
    events, repeats, doubled = _repeats(interactions)
    are_many, are_others = repeats >= MANY_REPEATS * events, repeats - doubled >= MANY_REPEATS * (events - doubled)
    if are_many and not are_others:
        form["unique"] = True
        layout.notes.append(f"{doubled / events:.0%} of the events are as another, also in their time: an item counts once for a user")
    lines = [f"log = {_toml(str(layout.log))}", f"format = {_inline(form)}"]
    if items is not None:
        columns = item_columns(items, str(form["item"]) if "item" in form else None, interactions.item_ids, False, scratch)
        layout.notes.extend(columns.notes)
        lines += _items_lines(items, columns)
    if interactions.order == "none" and kind not in (None, "otm-sequence", "neighbours"):
        window = int(np.clip(np.quantile(length_U, 0.95), 1, MOST_IN_WINDOW))
        more = [f"windows = [{window}] # lists have no order: one window, as long as 95 of 100 lists", "targets = 20"]
        lines += ["", "[instances]", *more]
    if are_many and are_others:
        layout.notes.append(f"{repeats / events:.0%} of the events are of an item that the user had before: such items count as answers")
        lines += ["", "[search]", "exclude_seen = false # true: choose and measure without items of the history"]
    return _Found(kind or "otm-sequence", lines, layout.notes)


def _repeats(interactions: Interactions) -> tuple[int, int, float]:
    """How many events there are; are of an item that the user had before; and have the time of such an event, too. 0 if other items often
    have the same time: times may be days.
    """
    events = int(np.minimum(np.diff(interactions.offset_U1), LONGEST).sum())
    repeats = events - int(lists_of(interactions, np.arange(interactions.user_count), distinct=True).length_U.sum())
    if interactions.time_of_event_E is None or not repeats:
        return events, repeats, 0.0
    user_E = np.repeat(np.arange(interactions.user_count), np.diff(interactions.offset_U1))
    columns = interactions.item_of_event_E, interactions.time_of_event_E, user_E
    order = np.lexsort(columns)
    is_item, is_time, is_user = (column[order[1:]] == column[order[:-1]] for column in columns)
    doubled, at_once = np.count_nonzero(is_item & is_time & is_user), np.count_nonzero(is_time & is_user)
    return events, repeats, doubled * events / len(order) if doubled >= ALIKE * at_once else 0.0


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


def _inline(table: Mapping[str, object]) -> str:
    return f"{{ {', '.join(f'{key} = {_toml(value)}' for key, value in table.items())} }}"


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
