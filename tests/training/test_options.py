"""`python -m training options`: the keys as the models that check them say."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from training.__main__ import main
from training.specification.models import SPECIFICATION
from training.specification.options import as_markdown, as_text, as_toml, kinds, options, section_of
from training.specification.ranker import RANKER_CONFIG

MODELS = ["otm-robust", "otm-sequence", "otm", "otm-no-bs", "otm-no-optest", "tdm", "plt", "hsm", "xr-linear", "xreg"]
ROOT = Path(__file__).parents[2]


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["training", "options", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    found = capsys.readouterr()
    return int(left.value.code or 0), found.out, found.err


def test_all_kinds_are_listed_with_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(kinds()) == [*MODELS, "highway", "linear"]
    status, out, _ = command(monkeypatch, capsys)
    assert status == 0
    for kind in kinds():
        assert re.search(rf"^  {kind} +\w.*\.$", out, re.MULTILINE), kind


def test_a_kind_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = command(monkeypatch, capsys, "tmd")
    assert status == 1
    assert "KIND: got 'tmd', expected one of otm-robust, otm" in err


@pytest.mark.parametrize("kind", kinds())
def test_every_key_has_a_meaning_and_its_kinds_own_default(kind: str) -> None:
    for option in options(section_of(kind)):
        assert option.meaning, option.name
        assert option.type, option.name


def test_keys_are_printed_with_type_default_and_meaning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = command(monkeypatch, capsys, "otm-robust")
    assert "\nobjective.random_nodes = 50\n    integer, at least 1. random nodes" in out
    assert "\nscorer.node_dim = 128 (product)\n" in out
    assert "\nscorer.node_dim = 24 (mlp, attention)\n" in out
    assert "\ndata.log = required\n    path." in out
    assert "level_decay" not in as_text("otm")
    assert "\nobjective.random_nodes = 0\n" in as_text("otm")


@pytest.mark.parametrize("kind", MODELS)
def test_a_template_loads_and_its_comments_are_the_defaults(kind: str) -> None:
    template = as_toml(kind)
    given = SPECIFICATION.checked(tomllib.loads(template))
    assert given.kind == kind
    every = tomllib.loads(uncommented(template))
    plain = leaves(given.model_dump(mode="json"))
    for name, value in leaves(every).items():
        if name in plain and name != "text":
            assert plain[name] == value, name
    assert {name for name in plain if plain[name] is not None and name != "text"} <= set(leaves(every))


@pytest.mark.parametrize("kind", ["highway", "linear"])
def test_a_rankers_template_loads(kind: str) -> None:
    assert RANKER_CONFIG.checked(tomllib.loads(as_toml(kind))) == RANKER_CONFIG.checked({"kind": kind})


def uncommented(template: str) -> str:
    """The template with the first of each key's defaults in force."""
    lines, seen = [], set[str]()
    for line in template.splitlines():
        table = re.fullmatch(r"(?:# )?(\[+[a-z.]+\]+)", line)
        key = re.fullmatch(r"(?:# )?([a-z_]+) = (.*)", line)
        if table:
            seen = set()
            lines.append(table[1])
        elif key and "…" not in key[2] and key[1] not in seen:
            seen.add(key[1])
            lines.append(f"{key[1]} = {key[2]}")
    return "\n".join(lines)


def leaves(raw: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in raw.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def test_the_page_of_options_is_this_commands_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert page == as_markdown(), "python -m training options --markdown > docs/options.md"
    assert command(monkeypatch, capsys, "--markdown")[1] == page
    for kind in kinds():
        for option in options(section_of(kind)):
            assert f"`{option.name}`" in page or option.name == "kind"
