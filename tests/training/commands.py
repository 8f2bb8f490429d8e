"""`python -m training …` inside this process, and the files that it reads."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import training.__main__
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.live.overlay import Overlay
from espalier.queries import TextKind, encode_texts
from espalier.search import SearchParams


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit status, and what it wrote to standard output and standard error."""

    status: int
    out: str
    err: str


def command(*arguments: object) -> Outcome:
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [training.__main__.__file__, *map(str, arguments)])
        patch.setattr(logging, "basicConfig", lambda **_: None)
        status = training.__main__.main()
    return Outcome(status, out.getvalue(), err.getvalue())


def trained(folder: Path, raw: dict[str, Any], model: str = "any/1", **options: Any) -> Bundle:
    """The bundle that `fit` makes of a configuration, of a linear model unless it says otherwise, in folder/models/NAME/VERSION."""
    config = written_toml(folder / f"{model.replace('/', '-')}.toml", {"kind": "xr-linear", "name": "any"} | raw)
    given = {"data": None, "test": None, "device": "cpu", "resume": False} | options
    training.__main__.fit(config=config, out=folder / "models" / model, **given)
    return Bundle.open(folder / "models" / model)


def answer_rows(bundle: Bundle, texts: list[str], beam_size: int, m: int, overlay: Overlay | None = None) -> list[list[int]]:
    """The item rows that a model of texts, perhaps with live items, answers with."""
    kind = bundle.manifest.query
    assert isinstance(kind, TextKind)
    queries, params = encode_texts(kind, bundle.vectoriser, texts), SearchParams.uniform(len(texts), beam_size, m)
    engine = open_engine(bundle, "cpu")
    if overlay is not None:
        engine.set_overlay(overlay)
    rows: list[list[int]] = engine.search(queries, params).item_rows_BM.tolist()
    return rows


def written_toml(file: Path, raw: dict[str, Any]) -> Path:
    """A configuration as a file: a line a key, a table a section."""
    sections = {name: value for name, value in raw.items() if isinstance(value, dict)}
    lines = [f"{name} = {as_toml(value)}" for name, value in raw.items() if name not in sections]
    for name, section in sections.items():
        lines += [f"[{name}]", *(f"{key} = {as_toml(value)}" for key, value in section.items())]
    file.write_text("\n".join(lines) + "\n")
    return file


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {as_toml(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    return json.dumps(value)
