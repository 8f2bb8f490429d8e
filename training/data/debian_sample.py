"""The embedded sample: packages of Debian 12 and what they depend on, made from a table of the package index.

    python -m training.data.debian_sample --source packages.tsv.gz --out data/debian-bookworm

The source is a gzipped TSV with the columns package, section, debtags, depends and description, where lists are joined by commas and the
description is the index's one-line summary and its long text joined by a space. The same source gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pa_parquet

from espalier.errors import InvalidData

SOURCE_COLUMNS = ["package", "section", "debtags", "depends", "description"]
LONGEST_SUMMARY = 80
SHARED_WORDS = 12

# Words that begin a long text, follow its subject, or cannot end a summary.
OPENER = re.compile(
    "This|The|These|A|An|It|Its|In|For|With|When|You|If|Most|Provides|Contains|Implements|Allows|Currently|There|Many|Some|All|As|At|By|"
    "From|On|One|Unlike|Using|While|Features|Includes|Note|Main|Based|Designed|Written|Supports|Besides|Since|To|Their|They|Also|Why|What|"
    "That|Each|Several|Various|Install|Given|Both|However|Here"
)
VERB = re.compile(
    "is|are|was|provides|provide|implements|allows|contains|adds|has|supports|aims|offers|gives|enables|makes|can|will|lets|helps|uses|"
    "creates|generates|consists|comes|includes|takes|defines|performs|supplies|works"
)
UNFINISHED = re.compile(
    "the|a|an|of|for|and|to|in|with|from|on|by|or|using|is|as|into|your|via|that|based|at|like|are|can|be|its|under|over|about|through|"
    "without|which|against|between|than"
)
USUALLY_FOLLOWED = re.compile("module|interface|The|Perl|GNU|R")


@dataclass(frozen=True)
class Package:
    id: str
    section: str
    debtags: list[str]
    depends: list[str]
    description: str


def read_source(path: Path) -> list[Package]:
    """The rows of the source, in file order. Raises InvalidData with file and line."""
    packages = []
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            values = line.rstrip("\n").split("\t")
            if number == 1 and values != SOURCE_COLUMNS:
                raise InvalidData(f"{path.name}: line 1", values, f"the columns {SOURCE_COLUMNS}")
            if len(values) != len(SOURCE_COLUMNS) or not values[0]:
                raise InvalidData(f"{path.name}: line {number}", line, f"{len(SOURCE_COLUMNS)} fields with a package name first")
            if number > 1:
                package, section, debtags, depends, description = values
                packages.append(Package(package, section, _list(debtags), _list(depends), description))
    if len({package.id for package in packages}) != len(packages):
        raise InvalidData(path.name, "a package twice", "each package once")
    return packages


def titles(packages: Sequence[Package]) -> list[str]:
    """The summary of every package: where its long text seems to begin, the words before it.

    Every place between two words within the first 80 characters is scored by its cues. For: the next word opens texts ("This",
    "Provides"), is capitalised, is part of the package's name, repeats the first word, or has a verb soon after ("FooBar is"); a
    parenthesis closes before it; the next twelve words follow other words in another package (siblings share their long text, not
    their summary). Against: the summary would be one or two words, or end in a preposition, an article, a comma or a full stop. The
    best place wins, the first of equals; none inside parentheses. Without any such place the description is cut before 80 characters
    with an ellipsis, or taken whole if it is shorter.
    """
    words_before: dict[tuple[str, ...], set[str]] = defaultdict(set)
    split = [package.description.split(" ") for package in packages]
    for words in split:
        for place, _ in _places(words):
            if len(words) >= place + SHARED_WORDS:
                words_before[tuple(words[place : place + SHARED_WORDS])].add(words[place - 1])
    return [
        _title(package, words, [len(words_before.get(tuple(words[place : place + SHARED_WORDS]), ())) > 1 for place, _ in _places(words)])
        for package, words in zip(packages, split, strict=True)
    ]


def _title(package: Package, words: list[str], shared: list[bool]) -> str:
    text = package.description
    best, title = 0.0, None
    for (place, end), is_shared in zip(_places(words), shared, strict=True):
        summary = text[:end]
        if summary.count("(") == summary.count(")"):
            score = _boundary_score(package.id, words, place) + 5 * is_shared
            if score > best:
                best, title = score, summary
    if title is not None:
        return title
    return text if len(text) <= LONGEST_SUMMARY else text[:LONGEST_SUMMARY].rsplit(" ", 1)[0] + "…"


def _boundary_score(package: str, words: list[str], place: int) -> float:
    before, word, after = words[place - 1], words[place], words[place + 1 : place + 4]
    bare = re.sub(r"[^a-z0-9]", "", word.lower())
    score = 5.0 * bool(OPENER.fullmatch(word))
    score += 2 if word[:1].isupper() else 0.5 * (not word[:1].islower())
    score += next((4 if distance == 0 else 2 for distance, near in enumerate(after) if VERB.fullmatch(near)), 0)
    score += 2 * (len(bare) > 1 and bare in package.replace("-", ""))
    score += 2 * (word.lower() == words[0].lower())
    score += 3 * before.endswith(")")
    score -= 6 / place if place < 3 else 0
    score -= 4 * (UNFINISHED.fullmatch(before.lower()) is not None or before.endswith((",", ":", ";", "-", "–", "/", "&", "+")))
    score -= 2 * bool(USUALLY_FOLLOWED.fullmatch(before)) + 2 * before.endswith(".")
    return score


def _places(words: list[str]) -> Iterator[tuple[int, int]]:
    """(index of the next word, length of the text before it) of every place where a summary of at most 80 characters may end."""
    end = len(words[0])
    for place in range(1, len(words)):
        if end > LONGEST_SUMMARY:
            return
        yield place, end
        end += 1 + len(words[place])


def write_sample(source: Path, out: Path) -> dict[str, int]:
    """Write packages.parquet, depends.parquet and README.md into `out`; returns the counts that the README states."""
    packages = sorted(read_source(source), key=lambda package: package.id)
    known = {package.id for package in packages}
    title_of = dict(zip((package.id for package in packages), titles(packages), strict=True))
    events = [(package.id, name) for package in packages for name in package.depends if name in known]
    named = sum(len(package.depends) for package in packages)
    out.mkdir(parents=True, exist_ok=True)
    _write(
        pa.table(
            {
                "id": pa.array([package.id for package in packages], pa.string()),
                "title": pa.array([title_of[package.id] for package in packages], pa.string()),
                "section": pa.array([package.section for package in packages], pa.string()),
                "debtags": pa.array([package.debtags for package in packages], pa.list_(pa.string())),
            }
        ),
        out / "packages.parquet",
    )
    _write(
        pa.table(
            {
                "package": pa.array([package for package, _ in events], pa.string()),
                "dependency": pa.array([dependency for _, dependency in events], pa.string()),
            }
        ),
        out / "depends.parquet",
    )
    counts = {
        "packages": len(packages),
        "sections": len({package.section for package in packages}),
        "packages with debtags": sum(bool(package.debtags) for package in packages),
        "dependencies": len(events),
        "packages with a dependency": len({package for package, _ in events}),
        "packages depended on": len({dependency for _, dependency in events}),
        "dependencies left out": named - len(events),
    }
    (out / "README.md").write_text(README.format(counts="\n".join(f"| {name} | {count} |" for name, count in counts.items())), "utf-8")
    return counts


README = """# debian-bookworm: the embedded sample

Packages of Debian 12 "bookworm" and what they depend on: a catalogue with titles, sections and tags, and an interaction log in which a
package is the user and the packages it depends on are its items.

- Source: the package index of Debian 12 (main, amd64: `Packages` and the English descriptions `Translation-en`, release of 2026-07-11).
- Licence: Debian package metadata. Names, sections, tags and dependencies are facts about the archive; the summaries come from the
  packages and are under each package's own free licence (`/usr/share/doc/<package>/copyright` on a Debian system).
- Made by `python -m training.data.debian_sample --source packages.tsv.gz --out data/debian-bookworm`; the same source gives the same bytes.

| what | count |
|---|---|
{counts}

## packages.parquet

One row per package, sorted by id.

| column | type | |
|---|---|---|
| id | string | package name |
| title | string | one-line summary |
| section | string | archive section, for instance `games` |
| debtags | list of strings | facets such as `use::gameplaying`; empty if the package has no tags |

The source joins summary and long text with a space, so the title is recovered by a rule: each place between two words in the first 80
characters is scored by cues (the next word opens a text, is capitalised, is part of the package's name or has a verb after it; a
parenthesis just closed; siblings share what follows but not what precedes; the title would end in a preposition or comma) and the best
one wins. Where no place has a cue, the text is cut before 80 characters with "…". Compared with the summaries of the index itself, 93 %
of the titles are exact (the cues were chosen on those same summaries); most of the others are a few words too long or too short.

## depends.parquet

One row per (package, dependency), in the order of the source: packages sorted, dependencies sorted inside a package. The order means
nothing: read the log with `order="none"`.

| column | type | |
|---|---|---|
| package | string | the package that depends |
| dependency | string | the package that it depends on (Depends, Recommends, Pre-Depends; the first of alternatives) |

Every dependency is a package of the index. Other names (virtual packages such as `r-api-4.0` or `perlapi-5.36.0`, interface hashes, names
outside the index) are left out: they mark versions and interfaces and have neither title nor section.
No other filter is applied here; `min_item_events` and `min_user_events` of the log reader do that.
"""


def _list(joined: str) -> list[str]:
    return joined.split(",") if joined else []


def _write(table: pa.Table, path: Path) -> None:
    pa_parquet.write_table(table, path, compression="zstd", compression_level=19, store_schema=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedded sample from a table of the Debian package index.")
    parser.add_argument("--source", type=Path, required=True, help="packages.tsv.gz: package, section, debtags, depends, description")
    parser.add_argument("--out", type=Path, required=True, help="folder to write packages.parquet, depends.parquet and README.md into")
    arguments = parser.parse_args()
    for name, count in write_sample(arguments.source, arguments.out).items():
        print(f"{name}: {count}")


if __name__ == "__main__":
    main()
