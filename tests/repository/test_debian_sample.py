"""The embedded sample: its files keep what its README says, and the script that made it works."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pyarrow.parquet as pa_parquet
import pytest

from espalier.errors import InvalidData
from tests import ROOT
from training.data.debian_sample import Package, read_source, titles, write_sample
from training.data.interactions import read_interactions
from training.specification.log_format import ParquetFormat

SAMPLE = ROOT / "data" / "debian-bookworm"


def stated_counts(readme: Path) -> dict[str, int]:
    return {name: int(count) for name, count in re.findall(r"^\| ([\w ]+) \| (\d+) \|$", readme.read_text("utf-8"), re.MULTILINE)}


def test_the_files_hold_what_the_readme_counts() -> None:
    packages = pa_parquet.read_table(SAMPLE / "packages.parquet").to_pydict()
    depends = pa_parquet.read_table(SAMPLE / "depends.parquet").to_pydict()
    counts = stated_counts(SAMPLE / "README.md")
    counts.pop("dependencies left out")
    assert counts == {
        "packages": len(packages["id"]),
        "sections": len(set(packages["section"])),
        "packages with debtags": sum(bool(tags) for tags in packages["debtags"]),
        "dependencies": len(depends["package"]),
        "packages with a dependency": len(set(depends["package"])),
        "packages depended on": len(set(depends["dependency"])),
    }
    assert packages["id"] == sorted(set(packages["id"]))
    assert set(depends["package"]) | set(depends["dependency"]) <= set(packages["id"])
    assert all(0 < len(title) <= 81 for title in packages["title"])
    assert all(packages["section"])
    assert sum(path.stat().st_size for path in SAMPLE.iterdir()) <= 6_000_000


def test_the_log_reader_reads_the_sample(tmp_path: Path) -> None:
    log_format = ParquetFormat(user="package", item="dependency", order="none", min_item_events=3, min_user_events=4)
    log = read_interactions(SAMPLE / "depends.parquet", log_format, tmp_path)
    assert (log.user_count, log.item_count, log.event_count) == (21531, 12410, 183764)


TEXT = [
    ("foo", "Sound player for the desktop (documentation)", "Foo is a player of sounds that every desktop should have one of."),
    ("libfoo1", "Sound player for the desktop", "Foo is a player of sounds that every desktop should have one of."),
    ("python3-bar", "parser of markup languages for Python", "This package parses markup."),
    ("baz", "small tool", ""),
]


def test_a_title_ends_where_the_long_text_begins() -> None:
    packages = [Package(name, "misc", [], [], f"{summary} {text}".strip()) for name, summary, text in TEXT]
    assert titles(packages) == [summary for _, summary, _ in TEXT]


def test_siblings_show_where_their_shared_text_begins() -> None:
    text = "tones from a box of brass and wood play each time one turns the small green wheel"
    summaries = ["red sound player", "red sound player with plugins"]
    packages = [Package(f"x{number}", "misc", [], [], f"{summary} {text}") for number, summary in enumerate(summaries)]
    assert titles(packages) == summaries
    assert titles(packages[:1]) != summaries[:1]


def test_a_text_without_a_boundary_is_cut_between_words() -> None:
    (title,) = titles([Package("x", "misc", [], [], "of the " * 40)])
    assert title == "of the " * 11 + "of…"


def write_source(folder: Path, *lines: str) -> Path:
    path = folder / "packages.tsv.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


HEADER = "package\tsection\tdebtags\tdepends\tdescription"


def test_the_script_writes_the_same_bytes_each_time_and_only_known_dependencies(tmp_path: Path) -> None:
    lines = ["b\tgames\t\ta,virtual-thing\tGame of bees The bees.", "a\tlibs\trole::x,use::y\t\tLibrary This is it."]
    source = write_source(tmp_path, HEADER, *lines)
    counts = write_sample(source, tmp_path / "one")
    write_sample(source, tmp_path / "two")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    assert stated_counts(tmp_path / "one" / "README.md") == counts
    assert counts["dependencies left out"] == 1
    assert pa_parquet.read_table(tmp_path / "one" / "depends.parquet").to_pylist() == [{"package": "b", "dependency": "a"}]
    assert pa_parquet.read_table(tmp_path / "one" / "packages.parquet").to_pylist() == [
        {"id": "a", "title": "Library", "section": "libs", "debtags": ["role::x", "use::y"]},
        {"id": "b", "title": "Game of bees", "section": "games", "debtags": []},
    ]


@pytest.mark.parametrize(
    ("lines", "field"),
    [
        (["name\tsection"], "line 1"),
        ([HEADER, "a\tb\tc"], "line 2"),
        ([HEADER, "\tlibs\t\t\ttext"], "line 2"),
        ([HEADER, "a\tlibs\t\t\ttext", "a\tlibs\t\t\ttext"], "packages.tsv.gz"),
    ],
)
def test_a_source_of_another_shape_is_refused(tmp_path: Path, lines: list[str], field: str) -> None:
    with pytest.raises(InvalidData) as error:
        read_source(write_source(tmp_path, *lines))
    assert field in error.value.field
