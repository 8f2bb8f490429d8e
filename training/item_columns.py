"""What `espalier new` finds in a table of items: its format, the column of the ids, and the columns of words, which are searched.

Knows files and values. Does not know configurations.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from espalier.errors import InvalidConfig, InvalidData
from espalier.logs.log_columns import NAMES, position_of, word_of
from espalier.logs.log_layout import Layout, look
from espalier.logs.log_values import is_text_type, present
from espalier.logs.text_files import EndlessQuotes, separator_of
from espalier.masks.filters import is_list
from espalier.wording import option

from .data.item_tables import item_table
from .specification.log_format import TextTable

WORD = re.compile(r"[^\W\d_]{2,}")
NO_WORDS = re.compile(r"\S*(://|@)\S*|\S+\.\w{2,4}|[0-9A-Fa-f-]{16,}")
"""Addresses, names of files, and numbers in hexadecimal digits."""
MEAN_WORDS = 1.5
"""A column with so many words a value is one of texts."""
DISTINCT_WORDS = 10
"""So is one of single words, if so many are different: brands and authors, but not states and currencies."""

Read = TypeVar("Read")


@dataclass(frozen=True)
class ItemColumns:
    """form: keys of data.items_format; items_id: the column of the ids; searched: those of words; notes: the decisions, in words."""

    form: dict[str, Any]
    items_id: str
    searched: list[str]
    notes: list[str]


def item_columns(file: Path, item: str | None, ids: pa.Array | None, are_searched: bool, scratch: Path) -> ItemColumns:
    """The columns of a table, all of which is read, so that its errors come up now.

    item          the log's column of item ids, or None. The table's has the same name; or `id`; or a usual name; or it is the first one,
                  if its values are all different and no texts
    ids           the log's items; None: the table's
    are_searched  by their texts
    Raises InvalidData and InvalidConfig.
    """
    if not file.is_file():
        raise InvalidConfig(option("items"), str(file), "a Parquet, CSV or TSV file that exists")

    def found(layout: Layout) -> ItemColumns:
        form = {key: value for key, value in layout.form.items() if key in TextTable.model_fields}
        if form.get("separator") == separator_of(file):
            del form["separator"]
        items_id = _id_column(layout, item)
        notes = [f"{file.name}: ids in column {items_id!r}"]
        try:
            item_table(file, ids, TextTable.model_validate(form), items_id)
        except InvalidData as error:
            form["bad_rows"] = "skip"
            item_table(file, ids, TextTable.model_validate(form), items_id)
            notes.append(f"rows that cannot be read are left out, the first being {error.field}")
        if not are_searched:
            return ItemColumns(form, items_id, [], notes)
        others = {str(name): values for name, values in layout.values.items() if name != items_id and str(name).casefold() != "id"}
        columns = others | {"id": layout.values[items_id]}
        searched = [name for name, values in columns.items() if are_words(values)]
        not_searched = ", ".join(name for name in columns if name not in searched)
        notes.append(f"searched are its columns of words: {', '.join(searched) or 'none'}; not searched: {not_searched or 'none'}")
        return ItemColumns(form, items_id, searched, notes)

    return read_with_or_without_quotes(lambda quote: look(file, {}, scratch, quote, has_header=True), found)


def read_with_or_without_quotes(look_with: Callable[[str | None], Layout], read: Callable[[Layout], Read]) -> Read:
    """What is read by a layout. If quotes in a text have no end, they are characters, unless fields of its first rows are in quotes."""
    try:
        return read(look_with(None))
    except EndlessQuotes:
        layout = look_with("")
        if any(text[0] == text[-1] == '"' for values in layout.values.values() for text in values.to_pylist() if len(text) > 1):
            raise
        return read(layout)


def _id_column(layout: Layout, item: str | None) -> str:
    names = [*map(str, layout.values)]
    for name in (item, "id"):
        position = None if name is None else position_of(names, name)
        if position is not None:
            return names[position]
    usual_names = [name for name in names if word_of(name) in NAMES["item"]]
    if len(usual_names) == 1:
        return usual_names[0]
    if not usual_names and names[0].strip() and _are_different_ids(next(iter(layout.values.values()))):
        return names[0]
    expected = f"a column of ids, `id` or with the name of the log's: say which with {option('item', 'NAME')}"
    raise InvalidConfig(option("items"), names, expected)


def _are_different_ids(values: pa.Array) -> bool:
    if is_text_type(values.type):
        is_id = pc.match_substring_regex(values, r"^\S+$")
        return len(values.unique()) == len(values) and bool(pc.all(is_id, skip_nulls=False).as_py())
    return pa.types.is_integer(values.type) and len(values.unique()) == len(values)


def are_words(values: pa.Array) -> bool:
    """Whether a column of a table's first rows has words that people search for."""
    values = present(values)
    if is_list(values.type):
        values = pa.array([" ".join(map(str, filter(None, entries))) for entries in values.to_pylist()], pa.string())
    if not is_text_type(values.type):
        return False
    texts = values.to_pylist()
    words_of_text = [[] if NO_WORDS.fullmatch(text.strip()) else WORD.findall(text) for text in texts]
    if sum(map(len, words_of_text)) >= MEAN_WORDS * max(1, len(texts)):
        return len(set(texts)) > 1 or len(texts) == 1
    distinct = {text for text, words in zip(texts, words_of_text, strict=True) if words and not any(map(str.isdigit, text))}
    return len(distinct) >= DISTINCT_WORDS and 2 * sum(map(bool, words_of_text)) >= len(texts)
