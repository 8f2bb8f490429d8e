"""What has to be installed: requirements of pyproject.toml, one a line, so that layers depend on them and not on the source code.

    python3 docker/requirements.py service otel cpu --without torch
    python3 docker/requirements.py --of torch

Knows the tables of pyproject.toml, and what an installed distribution asks for. Does not know versions that are resolved: those are in
constraints.txt, and their hashes in requirements.lock.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any


def requirements(pyproject: str, extras: Sequence[str], without: Sequence[str] = ()) -> list[str]:
    """The dependencies and those of the extras, sorted, but for the distributions in `without`. Raises KeyError on an unknown name."""
    project = tomllib.loads(pyproject)["project"]
    wanted = {*project["dependencies"], *(line for extra in extras for line in _of_extra(project, extra))}
    names = {line: _name(line) for line in wanted}
    missing = set(without) - set(names.values())
    if missing:
        raise KeyError(f"--without {', '.join(sorted(missing))}: not required")
    return sorted(line for line, name in names.items() if name not in without)


def _of_extra(project: dict[str, Any], extra: str) -> Iterator[str]:
    """The lines of an extra; one that names other extras of the project stands for theirs."""
    for line in project["optional-dependencies"][extra]:
        own = re.fullmatch(r"([\w.-]+)\[([^]]*)\]", line)
        if own and own[1] == project.get("name"):
            for other in own[2].split(","):
                yield from _of_extra(project, other.strip())
        else:
            yield line


def _name(line: str) -> str:
    return re.split(r"[\s\[<>=!~;@]", line, maxsplit=1)[0].lower()


def of_installed(lines: Sequence[str]) -> list[str]:
    """What a distribution asks for itself, from its metadata: without what its extras add. Markers stay, for pip to read."""
    return sorted(line for line in lines if not re.search(r"\bextra\b", line.partition(";")[2]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the requirements of some extras, or those of an installed distribution.")
    parser.add_argument("extras", nargs="*", help="extras of pyproject.toml")
    parser.add_argument("--without", nargs="*", default=[], help="distributions to leave out")
    parser.add_argument("--of", help="an installed distribution, in place of the extras")
    given = parser.parse_args()
    if given.of:
        lines = of_installed(metadata.requires(given.of) or [])
    else:
        lines = requirements(Path("pyproject.toml").read_text(), given.extras, given.without)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
